"""A conversation of two turns through `harness run` and `harness verify`, on the tiny pair."""

import json

from click.testing import CliRunner

from harness.cli import cli
from harness.pairs import find_pair
from harness.store import read_run
from impl.engine.loader import load_tokenizer


def test_the_second_turn_follows_the_targets_own_greedy_answer(tmp_path):
    talk = tmp_path / "talk.jsonl"
    turns = ["Name three birds.", "Now three fish."]
    talk.write_text(json.dumps({"turns": turns}) + "\n")
    out = tmp_path / "run"
    result = CliRunner().invoke(
        cli,
        ["run", "--no-isolate", "--pair", "tiny", "--methods", "ar,sd", "--datasets", str(talk),
         "--split", "all", "--max-new-tokens", "12", "--warmup-steps", "1", "--no-verify",
         "--out", str(out)],
    )  # fmt: skip
    assert result.exit_code in (0, 1), result.output  # 1: the noise check of a busy machine

    assert "earlier answers: 1 of 1" in result.stderr
    requests = read_run(out).requests
    lines = (out / "prompts.jsonl").read_text().splitlines()
    tokenizer = load_tokenizer(find_pair("tiny").target.sources[0].path)
    stored = {row["index"]: row["ids"] for row in map(json.loads, lines)}
    first = requests[(requests["prompt_index"] == 0) & (requests["method"] == "ar")].iloc[0]
    answer = tokenizer.decode(first["output_ids"], skip_special_tokens=True).strip()
    conversation = [
        {"role": "user", "content": turns[0]},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": turns[1]},
    ]
    expected = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=False
    )
    assert stored[1] == list(expected)
    assert set(requests[requests["prompt_index"] == 1]["prompt_tokens"]) == {len(expected)}
    for _, outputs in requests.groupby("prompt_index")["output_ids"]:
        assert len({tuple(ids) for ids in outputs}) == 1  # greedy: every method alike

    again = CliRunner().invoke(cli, ["verify", str(out)])
    assert again.exit_code == 0, again.output
