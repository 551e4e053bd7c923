"""Earlier answers of a conversation, with decoders and tokenizers of known output."""

import json

import pytest

from harness.encoding import EncodedPrompt, ids_sha256
from harness.errors import StoreError
from harness.prompts import Message, Prompt, PromptSet
from harness.reference_turns import write_answers
from harness.run_prompts import stored_prompts, write_prompts


def prompt(index, *turns):
    roles = ("user", "assistant")
    messages = (Message(role=roles[i % 2], content=text) for i, text in enumerate(turns))
    return Prompt(index, "chat", tuple(messages))


def prompts_of(*prompts):
    return PromptSet("own", "0" * 64, "here", "unknown", len(prompts), prompts)


def test_every_open_answer_is_written_once_from_all_that_was_said_before():
    asked = []

    def answer(given):
        asked.append([message.content for message in given.messages])
        return f"answer {len(asked)}"

    found = write_answers(
        prompts_of(prompt(2, "a", None, "b", None, "c"), prompt(1, "a", None, "b"), prompt(0, "a")),
        answer,
    )
    assert asked == [["a"], ["a", "answer 1", "b"]]
    contents = [[message.content for message in each.messages] for each in found.prompts]
    assert contents == [["a", "answer 1", "b", "answer 2", "c"], ["a", "answer 1", "b"], ["a"]]
    assert [each.index for each in found.prompts] == [2, 1, 0]


def test_stored_answers_are_left_alone():
    given = prompts_of(prompt(0, "a", "stored", "b"))
    assert write_answers(given, lambda _: pytest.fail("asked")) == given


def test_prompts_are_stored_with_their_hash_and_an_altered_file_is_refused(tmp_path):
    prompts = {
        "one": (EncodedPrompt(3, "a", (1, 2)), EncodedPrompt(0, "b", ())),
        "two": (EncodedPrompt(0, "c", (9,)),),
    }
    manifest = {name: {"ids_sha256": ids_sha256(found)} for name, found in prompts.items()}
    assert stored_prompts(tmp_path, manifest) is None
    write_prompts(tmp_path, prompts)
    assert stored_prompts(tmp_path, manifest) == prompts
    path = tmp_path / "prompts.jsonl"
    lines = path.read_text().splitlines()
    assert json.loads(lines[0]) == {"dataset": "one", "index": 3, "category": "a", "ids": [1, 2]}
    path.write_text("\n".join(lines).replace("[1, 2]", "[1, 3]"))
    with pytest.raises(StoreError, match=r"prompts\.jsonl: prompts of one are not those"):
        stored_prompts(tmp_path, manifest)
    path.write_text("{oops")
    with pytest.raises(StoreError, match=r"prompts\.jsonl: cannot be read"):
        stored_prompts(tmp_path, manifest)
