import json
from dataclasses import replace

import pytest
from fake_decoding import EOS, decode, emit, one_token_rounds, stored

from harness.commands.show import print_run
from harness.decoder import FinishReason, Span, SpanKind
from harness.plan import Cell
from harness.store import RunStore, read_run
from harness.summary import summarise

A, B, C = (f"mini/{i}/r0" for i in range(3))
AR = Cell("ar", "mini", 0.0, 1)
CONTROL = Cell("ar", "mini", 0.0, 1, control=True)
SD = Cell("sd", "mini", 0.0, 1)
SSD = Cell("ssd", "mini", 0.0, 1)

# Names that scripts depend on, as the issue that introduced `harness show --json` spells them.
CELL_NAMES = {
    *("method", "dataset", "temperature", "batch_size", "requests", "tokens", "tokens_per_s"),
    *("tokens_per_s_per_device", "tpot_ms", "ttft_ms", "acceptance_length", "acceptance_rate"),
    *("hit_rate", "draft_ms", "verify_ms", "wait_ms", "transfer_ms", "speedup"),
}
TIMES = ("tpot_ms", "ttft_ms", "latency_ms", "inter_token_ms", "inter_round_ms")


def autoregressive(cell, step_ns=10, outputs=((1, 2, 9), (3, 9))):
    script = {n: one_token_rounds(n, *ids) for n, ids in zip((A, B), outputs, strict=True)}
    return decode(cell, script, step_ns=step_ns)


def blockwise(cell, step_ns=10, outputs=((1, 2, 9), (3, 9))):
    script = {n: [emit(n, *ids, finish=EOS)] for n, ids in zip((A, B), outputs, strict=True)}
    return decode(cell, script, step_ns=step_ns)


def summary(tmp_path, *results, **manifest):
    found = summarise(stored(tmp_path / "run", *results, **manifest))
    return json.loads(json.dumps(found, allow_nan=False))  # strict JSON values throughout


def checks(found, name):
    return [check for check in found["checks"] if check["name"] == name]


def test_cells_have_the_names_that_scripts_depend_on(tmp_path):
    found = summary(tmp_path, autoregressive(AR), autoregressive(CONTROL), blockwise(SD))
    assert found.keys() == {"schema", "cells", "checks", "warnings"}
    assert found["schema"] == 1
    assert [(c["method"], c["control"]) for c in found["cells"]] == [
        ("ar", False),
        ("ar", True),
        ("sd", False),
    ]
    assert all(cell.keys() >= CELL_NAMES for cell in found["cells"])
    percentiles = {"p50", "p90", "p95", "p99"}
    assert all(found["cells"][0][name].keys() == percentiles for name in TIMES)
    assert found["cells"][0]["hit_rate"] is None  # null, not NaN


def test_speedups_are_over_ar_and_sd_but_not_over_itself(tmp_path):
    results = autoregressive(AR), autoregressive(CONTROL), blockwise(SD), blockwise(SSD, step_ns=5)
    ar, control, sd, ssd = (cell["speedup"] for cell in summary(tmp_path, *results)["cells"])
    assert (ar.keys(), control.keys()) == ({"sd"}, {"ar"})
    assert (sd.keys(), ssd.keys()) == ({"ar"}, {"ar", "sd"})
    # ar 5 steps of 10 ns, sd 2 of 10, ssd 2 of 5
    assert sd["ar"]["value"] == pytest.approx(2.5)
    assert ssd["ar"]["value"] == pytest.approx(5.0)
    # as many tokens a round in half the time
    assert ssd["sd"] == {
        "value": 2.0,
        "low": 2.0,
        "high": 2.0,
        "n": 2,
        "geometric_mean": 2.0,
        "tokens_per_round": 1.0,
        "time_per_round": 2.0,
    }
    assert control["ar"]["value"] == 1.0


def test_devices_of_the_manifest_divide_the_rate(tmp_path):
    decoders = {AR.id: {"devices": 1}, SSD.id: {"devices": 2}}
    found = summary(tmp_path, autoregressive(AR), blockwise(SSD), blockwise(SD), decoders=decoders)
    ar, sd, ssd = found["cells"]
    assert ar["tokens_per_s_per_device"] == ar["tokens_per_s"] == pytest.approx(5 / 50e-9)
    assert ssd["tokens_per_s_per_device"] == pytest.approx(ssd["tokens_per_s"] / 2)
    assert sd["tokens_per_s_per_device"] is None


def with_diagnostics(**diagnostics):
    return {SSD.id: {"options": {"lookahead": 4}, "tuned": True, "diagnostics": diagnostics}}


def test_a_degraded_cell_has_its_reason_and_no_speedups(tmp_path):
    decoders = with_diagnostics(degraded="draft process 7: died")
    found = summary(tmp_path, autoregressive(AR), blockwise(SSD), decoders=decoders)
    ar, ssd = found["cells"]
    assert (ar["degraded"], ssd["degraded"]) == (None, "draft process 7: died")
    assert ssd["speedup"] == {}
    assert ssd["tokens_per_s"] is not None
    assert found["warnings"][0] == (
        "ssd/mini/t0/b1 is degraded, the target went on alone and no speedup is told: "
        "draft process 7: died"
    )


def test_a_degraded_cell_has_no_speedups_by_category_either(tmp_path):
    script = {A: one_token_rounds(A, 1, 9), B: one_token_rounds(B, 3, 9)}
    ar, ssd = (decode(cell, script, categories=["chat", "code"]) for cell in (AR, SSD))
    found = summary(tmp_path, ar, ssd, decoders=with_diagnostics(degraded="died"))
    assert [c["speedup"] for c in found["cells"][1]["categories"].values()] == [{}, {}]


def test_contention_is_what_the_decoder_measured(tmp_path):
    times = {"verify_idle_ms": 100.0, "verify_loaded_ms": 125.0}
    decoders = with_diagnostics(**times, budget=4)
    ar, ssd = summary(tmp_path, autoregressive(AR), blockwise(SSD), decoders=decoders)["cells"]
    assert (ar["contention"], ssd["contention"]) == (None, times)


@pytest.mark.parametrize(("ratio", "warned"), [(0.55, True), (0.74, False)])
def test_a_plan_by_disturbed_pass_times_is_warned_of(tmp_path, ratio, warned):
    decoders = with_diagnostics(verify_over_timed=ratio)
    found = summary(tmp_path, autoregressive(AR), blockwise(SSD), decoders=decoders)["warnings"]
    told = (
        "ssd/mini/t0/b1 planned by pass times that something had disturbed: its verifications took "
        "55% of them; measure again"
    )
    assert (told in found) is warned
    assert any("had disturbed" in line for line in found) is warned


def test_categories_are_told_apart(tmp_path):
    ar = decode(
        AR,
        {A: one_token_rounds(A, 1, 2, 9), B: one_token_rounds(B, 3, 9)},
        categories=["chat", "code"],
    )
    sd = decode(
        SD,
        {A: [emit(A, 1, 2, 9, finish=EOS)], B: one_token_rounds(B, 3, 9)},
        categories=["chat", "code"],
    )
    chat, code = summary(tmp_path, ar, sd)["cells"][1]["categories"].values()
    assert (chat["speedup"]["ar"]["value"], code["speedup"]["ar"]["value"]) == (3.0, 1.0)
    assert (chat["acceptance_length"], code["acceptance_length"]) == (3.0, 1.0)


def test_equal_outputs_pass(tmp_path):
    (check,) = checks(summary(tmp_path, autoregressive(AR), blockwise(SD)), "greedy_equality")
    assert (check["status"], check["cell"]) == ("pass", SD.id)
    assert check["detail"] == "sd/mini/t0/b1: 2 of 2 outputs equal"


def divergence(tie):
    where = {"item": f"{SD.id}/r0/k0", "request_id": A, "position": 1}
    return where | {"expected": 2, "emitted": 7, "gap": 0.01, "tie": tie}


@pytest.mark.parametrize(
    ("stored_check", "status", "told"),
    [
        ({}, "fail", "2 became 7 (not classified)"),
        ({"greedy": {"divergences": [divergence(tie=False)]}}, "fail", "(logit gap 0.01)"),
        ({"greedy": {"divergences": [divergence(tie=True)]}}, "tie", "(logit gap 0.01)"),
    ],
)
def test_different_outputs_fail_unless_classified_as_a_tie(tmp_path, stored_check, status, told):
    sd = blockwise(SD, outputs=((1, 7, 9), (3, 9)))
    found = summary(tmp_path, autoregressive(AR), sd, **stored_check)
    (check,) = checks(found, "greedy_equality")
    assert check["status"] == status
    assert "1 of 2 outputs equal" in check["detail"]
    assert "mini/0/r0 at position 1" in check["detail"]
    assert told in check["detail"]
    assert check["divergences"][0]["position"] == 1


def test_one_failure_outweighs_a_tie(tmp_path):
    sd = blockwise(SD, outputs=((1, 7, 9), (8, 9)))
    greedy = {"divergences": [divergence(tie=True)]}
    (check,) = checks(summary(tmp_path, autoregressive(AR), sd, greedy=greedy), "greedy_equality")
    assert check["status"] == "fail"
    assert "1 within rounding; mini/1/r0 at position 0: 3 became 8" in check["detail"]


def test_the_baseline_at_a_larger_batch_size_must_equal_its_smallest(tmp_path):
    larger = replace(AR, batch_size=4)
    found = summary(tmp_path, autoregressive(AR), blockwise(larger, outputs=((1, 7, 9), (3, 9))))
    (check,) = checks(found, "greedy_equality")
    assert (check["cell"], check["status"]) == (larger.id, "fail")
    assert "1 of 2 outputs equal" in check["detail"]


def test_greedy_equality_needs_a_baseline_and_temperature_0(tmp_path):
    warm = replace(SD, temperature=1.0)
    found = summary(tmp_path, blockwise(SD), blockwise(warm))
    (check,) = checks(found, "greedy_equality")
    assert (check["status"], check["cell"]) == ("skip", SD.id)


@pytest.mark.parametrize(("step_ns", "status"), [(10, "pass"), (11, "fail")])
def test_the_control_must_hold_1(tmp_path, step_ns, status):
    # every prompt takes equally long a token: the interval is a point, 1 or 10 / 11
    found = summary(tmp_path, autoregressive(AR), autoregressive(CONTROL, step_ns=step_ns))
    (check,) = checks(found, "aa_control")
    assert (check["status"], check["cell"]) == (status, CONTROL.id)


def test_a_control_of_one_prompt_proves_nothing(tmp_path):
    results = [decode(cell, {A: one_token_rounds(A, 1, 9)}) for cell in (AR, CONTROL)]
    (check,) = checks(summary(tmp_path, *results), "aa_control")
    assert check["status"] == "skip"


def with_rounds(result, **fields):
    return replace(result, rounds=tuple(replace(row, **fields) for row in result.rounds))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"emitted": 2}, "mini/0/r0 emitted 2 tokens in its rounds, its output has 3"),
        ({"accepted": 3}, "accepted 3 of 2 drafted tokens"),
        ({"end_ns": 5}, "has a verify span outside its step"),
    ],
)
def test_rows_that_do_not_add_up_are_found(tmp_path, fields, message):
    spans = (Span(SpanKind.VERIFY, 1100, 1110), Span(SpanKind.SPECULATE, 1090, 1120))
    sound = decode(SD, {A: [emit(A, 1, 2, 9, finish=EOS, spans=spans)]})
    (check,) = checks(summary(tmp_path / "sound", sound), "invariants")
    assert check["status"] == "pass"
    (check,) = checks(summary(tmp_path, with_rounds(sound, **fields)), "invariants")
    assert check["status"] == "fail"
    assert message in check["detail"]


def test_a_shared_gpu_is_named(tmp_path):
    ar = decode(AR, {C: one_token_rounds(C, 9)})
    found = summary(
        tmp_path, ar, fingerprint={"placement": {"shared": True, "draft_device": "cuda:0"}}
    )
    line = "target and draft share cuda:0: asynchronous methods are slower than they could be"
    assert line in found["warnings"]


def test_warnings_say_what_a_reader_must_know(tmp_path):
    loop = tuple([1, 2, 3] * 12)
    length = FinishReason.LENGTH
    ar = decode(
        AR, {A: [emit(A, *loop, finish=length)], B: [], C: one_token_rounds(C, 9)}, refuses=[B]
    )
    found = summary(
        tmp_path,
        ar,
        fingerprint={
            "placement": {"shared": True},
            "load_average": 1.5,
            "cpu": {"cores_available": 2},
        },
        git={"dirty": True},
        failures=[{"item": "sd/mini/t0/b1/r0/k0", "error": "DraftProcessError", "message": "died"}],
        decoders={AR.id: {"options": {}}, SD.id: {"options": {"lookahead": 4}}},
    )
    where = "mini at temperature 0, batch size 1"
    assert found["warnings"] == [
        "sd/mini/t0/b1/r0/k0 failed: DraftProcessError: died",
        "1 requests were skipped; the first: mini/1/r0: prompt of mini/1/r0 is longer than "
        "the context",
        "target and draft share cores: asynchronous methods are slower than they could be",
        "load average 1.5 on 2 cores at the start: other programs were running",
        "the source tree had uncommitted changes",
        "sd ran with default parameters, not tuned for this pair and machine",
        f"{where}: 2 prompts; intervals from fewer than 10 mislead",
        f"{where}: no A/A control, so the noise of this machine is unknown",
        "mini at temperature 0: 1 of 2 outputs end in a loop, which flatters acceptance",
        "mini at temperature 0: 1 of 2 outputs were cut at max_new_tokens",
    ]


def test_items_that_failed_of_one_thing_are_one_line(tmp_path):
    reasons = ("died", "died", "hangs", "died")
    failures = [
        {"item": f"sd/mini/t0/b1/r0/k{block}", "error": "DraftProcessError", "message": reason}
        for block, reason in enumerate(reasons)
    ]
    found = summary(tmp_path, autoregressive(AR), failures=failures)
    assert [warning for warning in found["warnings"] if "failed" in warning] == [
        "sd/mini/t0/b1/r0/k0 and 2 more items failed: DraftProcessError: died",
        "sd/mini/t0/b1/r0/k2 failed: DraftProcessError: hangs",
    ]


def test_a_method_that_chooses_for_itself_is_automatic_not_untuned(tmp_path, capsys):
    decoders = {
        SD.id: {"options": {"lookahead": 4}, "tuned": False, "automatic": False},
        SSD.id: {"options": {"lookahead": "auto"}, "tuned": False, "automatic": True},
    }
    found = summary(tmp_path, blockwise(SD), blockwise(SSD), decoders=decoders)
    marks = {c["method"]: (c["untuned"], c["automatic"]) for c in found["cells"]}
    assert marks == {"sd": (True, False), "ssd": (False, True)}
    assert [w for w in found["warnings"] if "not tuned" in w] == [
        "sd ran with default parameters, not tuned for this pair and machine"
    ]
    print_run(tmp_path / "run")
    shown = capsys.readouterr().out
    assert "sd (untuned)" in shown
    assert "ssd (automatic)" in shown


def test_a_clean_run_has_no_warnings(tmp_path):
    script = {
        f"mini/{i}/r0": one_token_rounds(f"mini/{i}/r0", *range(i, i + 40)) for i in range(10)
    }
    decoders = {SD.id: {"options": {"lookahead": 4}, "tuned": True}}
    results = [decode(cell, script) for cell in (AR, CONTROL, SD)]
    assert summary(tmp_path, *results, decoders=decoders)["warnings"] == []


def test_a_run_under_way_is_summarised_and_says_so(tmp_path):
    store = RunStore.create(tmp_path / "run", {})
    assert summarise(read_run(store.directory))["cells"] == []
    store.append_item(autoregressive(AR))
    found = summarise(read_run(store.directory))
    assert len(found["cells"]) == 1
    assert found["warnings"][0] == "the run is running: the figures cover the items measured so far"


def test_methods_without_the_baseline_are_warned_about_once_for_a_setting(tmp_path):
    script = {A: one_token_rounds(A, 1, 9)}
    found = summary(tmp_path, decode(SD, script), decode(SSD, script))
    where = "mini at temperature 0, batch size 1"
    assert [warning for warning in found["warnings"] if warning.startswith(where)] == [
        f"{where}: 1 prompt; intervals from fewer than 10 mislead",
        f"{where}: no A/A control, so the noise of this machine is unknown",
    ]


def test_what_many_settings_have_is_one_line(tmp_path):
    cells = [replace(AR, batch_size=size) for size in (1, 2, 4)]
    found = summary(tmp_path, *map(autoregressive, cells))
    assert [warning for warning in found["warnings"] if "batch size" in warning] == [
        "mini at temperature 0, batch size 1 and 2 more settings: 2 prompts; "
        "intervals from fewer than 10 mislead",
        "mini at temperature 0, batch size 1 and 2 more settings: "
        "no A/A control, so the noise of this machine is unknown",
        "mini at temperature 0, batch size 4: 2 prompts never fill the batch",
    ]


def test_a_batch_that_is_never_full_is_warned_about(tmp_path):
    found = summary(tmp_path, autoregressive(replace(AR, batch_size=4)))
    where = "mini at temperature 0, batch size 4"
    assert f"{where}: 2 prompts never fill the batch" in found["warnings"]
