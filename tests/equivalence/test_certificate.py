"""The certificate on runs of the known chain, put together as the harness would store them."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from known_process import ARGMAX, DRAFT, TARGET, decode, sharpened, toward

from harness.config import RunConfig
from harness.equivalence.certificate import certify, correct
from harness.equivalence.hypothesis import TestOutcome, holm
from harness.equivalence.reference_scores import References
from harness.equivalence.replay import as_decoded, replay_command, round_of
from harness.equivalence.strata import strata
from harness.equivalence.token_table import Group, place_tokens
from harness.errors import StoreError
from harness.greedy import Divergence, GreedyCheck
from harness.store import RunData

PROMPT = (5, 1)  # the chain starts behind token 1
NO_GREEDY = GreedyCheck(0, None, ())


class Chain:
    """A model whose logits are the logarithms of a table's rows."""

    exact = True

    def __init__(self, table: np.ndarray) -> None:
        self.log = torch.from_numpy(table).log()

    def chunks(self, prompt_ids, output_ids) -> Iterator[torch.Tensor]:
        yield self.log[[prompt_ids[-1], *output_ids[:-1]]]


REFERENCES = References(Chain(TARGET), Chain(DRAFT))


def request(method, index, output, temperature=1.0, batch_size=1, control=False, finish="eos"):
    label = f"{method}@control" if control else method
    return {
        "item": f"{label}/d/t{temperature:g}/b{batch_size}/r0/k0",
        "method": method,
        "dataset": "d",
        "control": control,
        "temperature": temperature,
        "batch_size": batch_size,
        "request_id": f"d/{index}/r0",
        "prompt_index": index,
        "prompt_tokens": len(PROMPT),
        "output_tokens": len(output),
        "output_ids": list(output),
        "finish": finish,
    }


def one_token_rounds(row, step=0):
    return [
        {
            "item": row["item"],
            "request_id": row["request_id"],
            "step": step + i,
            "round": i,
            "emitted": 1,
            "drafted": 0,
            "cache": None,
        }
        for i in range(row["output_tokens"])
    ]


def run_of(*requests, **config):
    rounds = [one for row in requests for one in one_token_rounds(row)]
    settings = RunConfig(pair="tiny", **config).model_dump(mode="json")
    manifest = {"config": settings, "stop_token_ids": [0]}
    return RunData(manifest, pd.DataFrame(requests), pd.DataFrame(rounds))


def outputs_of(table, outputs=120, seed=0):
    tokens = decode(table, outputs, 60, seed)
    order = np.argsort(tokens.output, kind="stable")
    ends = np.bincount(tokens.output).cumsum()[:-1]
    return [part.tolist() for part in np.split(tokens.token[order], ends)]


def sampled(method, table, **where):
    return [request(method, i, output, **where) for i, output in enumerate(outputs_of(table))]


def judged(run, greedy=NO_GREEDY, references=REFERENCES):
    prompts = dict.fromkeys(run.requests["request_id"], PROMPT)
    certificate = certify(run, prompts, references, greedy)
    return certificate, {verdict.method: verdict for verdict in certificate.verdicts}


def test_holm_by_hand():
    # sorted: 0.01 * 3, 0.03 * 2, 0.04 * 1, each at least the one before
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.5]) == pytest.approx([1.0, 1.0])
    assert len(holm([])) == 0


def test_tests_are_corrected_over_all_methods_together():
    one, other = Group("ar", 1.0, 1), Group("sd", 1.0, 1)
    test = TestOutcome("argmax", "all", 10_000, 2.0, 0.01, variance=0.25)
    found = correct({one: [test], other: [replace(test, p_value=0.04), test]}, alpha=0.01)
    assert [t.adjusted for t in (*found[one], *found[other])] == pytest.approx([0.03, 0.04, 0.03])
    # level 0.01 / 3, two-sided: 2.9352 + 1.6449 standard errors of 0.5 / 100
    assert found[one][0].smallest_bias == pytest.approx(0.0229, abs=1e-4)


def test_exact_methods_pass_and_biased_ones_fail():
    biased = toward(TARGET, ARGMAX, 0.15)
    run = run_of(*sampled("ar", TARGET), *sampled("good", TARGET), *sampled("bad", biased))
    certificate, verdicts = judged(run)
    assert {name: v.status for name, v in verdicts.items()} == {
        "ar": "pass",
        "good": "pass",
        "bad": "fail",
    }
    assert not certificate.passed
    assert verdicts["good"].tokens == sum(map(len, outputs_of(TARGET)))
    assert "bias of" in verdicts["good"].reason
    case = verdicts["bad"].reproducer
    assert case.request_id.startswith("d/")
    assert case.prompt_tokens == 2
    assert case.round == case.position  # one token a round
    assert case.command.startswith("harness verify --methods bad --temperatures 1 ")


def test_an_impossible_token_fails():
    table = TARGET.copy()
    table[:, 7] = 0
    table /= table.sum(1, keepdims=True)
    rows = sampled("sd", table)
    place = next(i for i, row in enumerate(rows) if row["output_tokens"] > 3)
    rows[place]["output_ids"][2] = 7
    _, verdicts = judged(run_of(*rows), references=References(Chain(table), Chain(DRAFT)))
    assert verdicts["sd"].status == "fail"
    assert verdicts["sd"].reason.startswith("rarest token")
    case = verdicts["sd"].reproducer
    assert (case.request_id, case.position) == (f"d/{place}/r0", 2)


def test_random_numbers_used_twice_show_in_the_order_of_ids():
    """Every row uniform: all tokens are equally likely, and the draw always falls in one half."""
    flat = np.full((8, 8), 1 / 8)
    rng = np.random.default_rng(0)
    outputs = [[*rng.integers(1, 5, size=30).tolist(), 0] for _ in range(20)]
    rows = [request("sd", i, output) for i, output in enumerate(outputs)]
    _, verdicts = judged(run_of(*rows), references=References(Chain(flat), Chain(DRAFT)))
    worst = {t.test: t.adjusted for t in verdicts["sd"].tests if t.stratum == "all"}
    assert worst["pit by id"] < 1e-6


def test_an_end_that_is_never_emitted_fails():
    swallowed = TARGET.copy()
    swallowed[:, 0] = 0
    swallowed /= swallowed.sum(1, keepdims=True)
    rows = [request("sd", i, o, finish="length") for i, o in enumerate(outputs_of(swallowed, 40))]
    _, verdicts = judged(run_of(*rows))
    found = {t.test: t for t in verdicts["sd"].tests if t.stratum == "all"}
    assert found["end of sequence"].statistic < -5
    assert verdicts["sd"].status == "fail"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_whose_ids_are_not_told_certify_nothing(temperature):
    untold = [request("endpoint", i, [-1] * 9, temperature) for i in range(40)]
    honest = [{**row, "temperature": temperature} for row in sampled("ar", TARGET)]
    _, verdicts = judged(run_of(*honest, *untold))
    assert verdicts["endpoint"].status == "open"
    assert "how many tokens, not which" in verdicts["endpoint"].reason
    assert (verdicts["endpoint"].outputs, verdicts["endpoint"].tokens) == (40, 360)


def test_own_kernels_may_round_at_the_edge_of_top_p():
    """A token just outside the reference's nucleus is possible only by other kernels' rounding."""
    table = TARGET.copy()
    table[:, 7] = 0
    table /= table.sum(1, keepdims=True)
    rows = sampled("hf", table)
    place = next(row for row in rows if row["output_tokens"] > 3)
    place["output_ids"][2] = 7
    references = References(Chain(table), Chain(DRAFT))
    for own_kernels, status in ((False, "fail"), (True, "pass")):
        run = run_of(*rows, top_p=0.99999)
        run.manifest["decoders"] = {"hf/d/t1/b1": {"own_kernels": own_kernels}}
        _, verdicts = judged(run, references=references)
        assert verdicts["hf"].status == status


def test_too_few_tokens_certify_nothing():
    _, verdicts = judged(run_of(*sampled("sd", TARGET)[:8]))
    assert verdicts["sd"].status == "open"


def test_a_failing_baseline_leaves_nobody_certified():
    # the outputs are right for TARGET, but the reference is another model
    wrong = References(Chain(sharpened(TARGET, 0.6)), Chain(DRAFT))
    _, verdicts = judged(run_of(*sampled("ar", TARGET)), references=wrong)
    assert verdicts["ar"].status == "fail"
    honest = sampled("luck", sharpened(TARGET, 0.6))
    _, verdicts = judged(run_of(*sampled("ar", TARGET), *honest), references=wrong)
    assert verdicts["luck"].status == "open"
    assert "ar itself fails" in verdicts["luck"].reason


def test_text_after_the_end_fails_whatever_its_distribution():
    rows = sampled("sd", TARGET)
    rows.append(request("sd", 999, [3, 0, 2]))
    _, verdicts = judged(run_of(*rows))
    assert verdicts["sd"].status == "fail"
    assert verdicts["sd"].content.after_eos == 1
    case = verdicts["sd"].reproducer
    assert (case.request_id, case.position) == ("d/999/r0", 2)


def test_greedy_outputs_are_judged_by_their_divergences():
    rows = [request("ar", i, [1, 2, 0], 0.0) for i in range(3)]
    rows += [request("ar", i, [1, 2, 0], 0.0, control=True) for i in range(3)]
    rows += [request("sd", i, [1, 3, 0], 0.0) for i in range(3)]
    item = rows[-1]["item"]
    parted = tuple(
        Divergence(item, f"d/{i}/r0", 1, 2, 3, gap=0.1 * i, tie=i == 0) for i in range(3)
    )
    _, verdicts = judged(run_of(*rows), GreedyCheck(6, 0.05, parted))
    assert (verdicts["ar"].status, verdicts["sd"].status) == ("pass", "fail")
    assert (verdicts["ar"].greedy.compared, verdicts["ar"].greedy.failures) == (3, 0)
    greedy = verdicts["sd"].greedy
    assert (greedy.compared, greedy.ties, greedy.failures) == (3, 1, 2)
    case = verdicts["sd"].reproducer
    assert (case.request_id, case.position, case.round) == ("d/1/r0", 1, 1)
    ties = tuple(replace(found, tie=True) for found in parted)
    _, verdicts = judged(run_of(*rows), GreedyCheck(6, 0.5, ties))
    assert verdicts["sd"].status == "pass"


def test_the_baseline_at_a_larger_batch_size_is_judged_by_its_smallest():
    rows = [
        request("ar", i, [1, 2, 0], 0.0, batch_size=size, control=control)
        for size in (1, 4)
        for control in (False, True)
        for i in range(3)
    ]
    (item,) = {row["item"] for row in rows if row["batch_size"] == 4 and not row["control"]}
    parted = (Divergence(item, "d/1/r0", 1, 2, 3, gap=0.5, tie=False),)
    certificate, _ = judged(run_of(*rows), GreedyCheck(9, 0.1, parted))
    by_size = {verdict.batch_size: verdict for verdict in certificate.verdicts}
    assert (by_size[1].status, by_size[1].greedy.compared) == ("pass", 3)  # its control
    assert (by_size[4].status, by_size[4].greedy.compared) == ("fail", 6)
    assert by_size[4].reproducer.request_id == "d/1/r0"


def test_temperatures_and_batch_sizes_are_never_pooled():
    rows = [
        row
        for temperature in (0.5, 1.0)
        for size in (1, 4)
        for row in sampled(
            "ar", sharpened(TARGET, temperature), temperature=temperature, batch_size=size
        )
    ]
    certificate, _ = judged(run_of(*rows))
    groups = [(v.temperature, v.batch_size) for v in certificate.verdicts]
    assert groups == [(0.5, 1), (0.5, 4), (1.0, 1), (1.0, 4)]
    assert certificate.passed


def rounds_frame(*rounds, step=0):
    columns = ("emitted", "drafted", "cache")
    rows = [dict(zip(columns, one, strict=True)) for one in rounds]
    return pd.DataFrame(
        [row | {"request_id": "d/0/r0", "round": i, "step": step + i} for i, row in enumerate(rows)]
    )


def test_tokens_are_placed_in_their_rounds():
    rounds = rounds_frame((3, 2, None), (1, 2, "miss"), (2, 1, "hit"), step=5)
    table = pd.DataFrame(place_tokens(6, rounds)).assign(dataset="d")
    assert table["round"].tolist() == [0, 0, 0, 1, 2, 2]
    assert table["index"].tolist() == [0, 1, 2, 0, 0, 1]
    masks = {name: mask.tolist() for name, mask in strata(table)}
    assert masks == {
        "all": [True] * 6,
        "cache miss": [False, False, False, True, False, False],
        "cache hit": [False, False, False, False, True, True],
        "first of round": [True, False, False, True, True, False],
        "later in round": [False, True, False, False, False, False],
        "bonus token": [False, False, True, False, False, True],
        "first round": [True, True, True, False, False, False],
        "after refill": [True, True, True, True, False, False],  # it was admitted at step 5
    }
    assert not place_tokens(6, rounds_frame((6, 5, None)))["refilled"].any()


def test_rounds_that_do_not_add_up_are_refused():
    with pytest.raises(StoreError, match="emitted 3 tokens, its output has 4"):
        place_tokens(4, rounds_frame((3, 2, None)))


def test_the_round_of_a_position():
    rounds = rounds_frame((3, 2, None), (1, 2, None), (2, 1, None))
    assert [round_of(position, rounds) for position in range(7)] == [0, 0, 0, 1, 2, 2, 2]


def test_a_replay_has_what_tuning_gave_the_group_and_nothing_that_is_tuned_later():
    config = RunConfig(pair="tiny", methods=("sd",), options={"sd": {"lookahead": 6}})
    decoders = {
        "sd/mini/t0/b1": {
            "options": {"lookahead": 6, "stop_below": 0.4},
            "tuned_options": ["stop_below"],
        },
        "sd/mini/t1/b1": {"options": {"lookahead": 6, "stop_below": 0.0}, "tuned_options": []},
    }
    manifest = {
        "config": config.model_dump(mode="json"),
        "datasets": {"mini": {}},
        "decoders": decoders,
    }
    told = {t: replay_command(as_decoded(manifest, "sd", t, 1), "sd", t, 1) for t in (0.0, 1.0)}
    assert told[0.0].endswith("--no-tuned --set sd.lookahead=6 --set sd.stop_below=0.4")
    assert told[1.0].endswith("--no-tuned --set sd.lookahead=6")


def test_the_replay_command_names_what_differs_from_the_defaults():
    config = RunConfig(
        pair="tiny",
        methods=("ar", "sd"),
        datasets=("mini", "my file.jsonl"),
        options={"sd": {"lookahead": 6}, "ssd": {"budget": 3}},
        top_p=0.9,
        seed=4,
        raw=True,
        repeats=3,
    ).model_dump(mode="json")
    assert replay_command(config, "sd", 0.7, 2) == (
        "harness verify --methods sd --temperatures 0.7 --batch-sizes 2 --pair tiny "
        "--datasets 'mini,my file.jsonl' --top-p 0.9 --repeats 3 --seed 4 --raw "
        "--set sd.lookahead=6"
    )
