import gc

import pytest
from fake_decoding import EOS, FakeClock, ScriptedDecoder, decode, emit, one_token_rounds, request

from harness.decoder import CacheOutcome, FinishReason, Round, Span, SpanKind
from harness.errors import HarnessError
from harness.measure import ContractError, run_item, warm_up
from harness.plan import Cell, WorkItem

A, B, C, D = (f"mini/{i}/r0" for i in range(4))
PAIR = Cell("sd", "mini", 0.0, batch_size=2)
SINGLE = Cell("sd", "mini", 0.0, batch_size=1)


def by_id(result):
    return {row.request_id: row for row in result.requests}


def test_batch_of_two_is_refilled_and_timed():
    #  start A,B [0,200]  step [200,210] A:1 B:2   step [210,220] A:1,eos B:2
    #  admit C [220,320]  step [320,330] B:1,eos C:1   step [330,340] C:1,eos
    result = decode(
        PAIR,
        {
            A: one_token_rounds(A, 1, 9),
            B: [emit(B, 1, 2), emit(B, 3, 4), emit(B, 9, finish=EOS)],
            C: one_token_rounds(C, 1, 9),
        },
    )
    rows = by_id(result)
    assert {k: r.output_ids for k, r in rows.items()} == {A: (1, 9), B: (1, 2, 3, 4, 9), C: (1, 9)}
    assert {k: r.prefill_ns for k, r in rows.items()} == {A: 200, B: 200, C: 100}
    assert {k: r.ttft_ns for k, r in rows.items()} == {A: 210, B: 210, C: 110}
    assert {k: r.decode_ns for k, r in rows.items()} == {A: 20, B: 30, C: 20}
    # B: first token at 210, last at 330, C's prefill of 100 taken out, four tokens after the first
    assert {k: r.tpot_ns for k, r in rows.items()} == {A: 10, B: 5, C: 10}
    times = {(r.step, r.start_ns, r.end_ns, r.live) for r in result.rounds}
    assert times == {(0, 0, 10, 2), (1, 10, 20, 2), (2, 120, 130, 2), (3, 130, 140, 1)}
    assert [(r.request_id, r.round) for r in result.rounds if r.step == 2] == [(B, 2), (C, 0)]
    assert (result.tokens, result.decode_ns) == (9, 40)


def test_ttft_has_the_prefill_of_another_and_decode_time_has_not():
    #  step [200,210] ends A and B; admit C [210,310]; admit D [310,410]; step [410,420]
    script = {name: one_token_rounds(name, 9) for name in (A, B, C, D)}
    rows = by_id(decode(PAIR, script))
    assert [rows[name].ttft_ns for name in (A, B, C, D)] == [210, 210, 210, 110]
    assert [rows[name].decode_ns for name in (A, B, C, D)] == [10] * 4
    assert [rows[name].tpot_ns for name in (A, B, C, D)] == [None] * 4  # one token: no interval


def test_eos_inside_a_block_counts_only_what_was_emitted():
    cut = Round(A, (5, 9), drafted=4, accepted=4, finish=FinishReason.EOS)
    result = decode(SINGLE, {A: [cut]})
    assert result.requests[0].output_ids == (5, 9)
    assert result.requests[0].output_tokens == 2
    assert result.requests[0].finish == "eos"
    assert (result.rounds[0].emitted, result.rounds[0].accepted) == (2, 4)


def test_spans_are_totalled_by_kind_relative_to_the_first_step():
    spans = (
        Span(SpanKind.DRAFT, 1100, 1102),
        Span(SpanKind.VERIFY, 1102, 1108),
        Span(SpanKind.DRAFT, 1108, 1109),
        Span(SpanKind.TRANSFER, 1109, 1110),
        Span(SpanKind.SPECULATE, 1099, 1110),
    )
    done = emit(A, 9, finish=EOS, spans=spans, cache=CacheOutcome.MISS, backup="fast", guesses=12)
    (row,) = decode(SINGLE, {A: [done]}).rounds  # the first step starts at 1000 + 100
    assert (row.draft_ns, row.verify_ns, row.wait_ns, row.speculate_ns) == (3, 6, 0, 11)
    assert row.transfer_ns == 1
    assert [(s.kind, s.start_ns, s.end_ns) for s in row.spans] == [
        ("draft", 0, 2),
        ("verify", 2, 8),
        ("draft", 8, 9),
        ("transfer", 9, 10),
        ("speculate", -1, 10),
    ]
    assert (row.cache, row.backup, row.guesses) == ("miss", "fast", 12)


def test_rows_name_their_cell_prompt_and_category():
    cell = Cell("ar", "mini", 1.0, 1, control=True)
    script = {"mini/7/r1": one_token_rounds("mini/7/r1", 9)}
    (row,) = decode(cell, script, block=3, repeat=1, categories=["math"]).requests
    assert row.item == "ar@control/mini/t1/b1/r1/k3"
    assert (row.method, row.control, row.temperature, row.batch_size) == ("ar", True, 1.0, 1)
    assert (row.repeat, row.block, row.prompt_index, row.category) == (1, 3, 7, "math")
    assert row.prompt_tokens == 3
    assert decode(SINGLE, {A: one_token_rounds(A, 9)}).requests[0].category == "mini"


@pytest.mark.parametrize("bad", [A, B, C])
def test_a_refused_request_is_skipped_and_the_rest_is_measured_alike(bad):
    script = {name: one_token_rounds(name, 1, 9) for name in (A, B, C, D)}
    result = decode(PAIR, script, refuses=[bad])
    assert [(s.request_id, s.dataset) for s in result.skipped] == [(bad, "mini")]
    assert result.skipped[0].reason == f"prompt of {bad} is longer than the context"
    assert list(by_id(result)) == [name for name in (A, B, C, D) if name != bad]
    first, second, third = result.requests
    # finding the bad one costs prefills that nobody's times contain
    assert (first.prefill_ns, second.prefill_ns, third.prefill_ns) == (200, 200, 100)
    assert (first.ttft_ns, second.ttft_ns) == (210, 210)


def test_an_item_whose_every_request_is_refused_is_empty():
    result = decode(PAIR, {A: [], B: []}, refuses=[A, B])
    assert (result.requests, result.rounds) == ((), ())
    assert [s.request_id for s in result.skipped] == [A, B]
    assert (result.tokens, result.decode_ns) == (0, 0)


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        ([Round(A, (), 0, 0)], "emitted no token"),
        ([Round("mini/5/r0", (1,), 0, 0)], "mini/5/r0, which is not live"),
        ([Round(A, (1,), 2, 3)], "accepted 3 of 2 drafted"),
        ([Round(A, (1,), 0, -1)], "accepted -1 of 0 drafted"),
        ([Round(A, tuple(range(65)), 64, 64)], "emitted 65 tokens where max_new_tokens left .* 64"),
        ([Round(A, tuple(range(64)), 63, 63)], "did not finish"),
        ([], "1 sequences are live, but a step returned rounds for \\[\\]"),
    ],
)
def test_a_broken_contract_is_fatal_and_names_the_decoder(rounds, message):
    with pytest.raises(ContractError, match=f"^scripted: .*{message}") as error:
        decode(SINGLE, {A: rounds})
    assert isinstance(error.value, HarnessError)


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (A, "2 sequences are live"),  # twice in the first step
        (B, "stepped mini/0/r0, which is not live"),  # in the second step, after its end
    ],
)
def test_a_sequence_stepped_twice_or_after_its_end_is_fatal(again, message):
    class Repeating(ScriptedDecoder):
        def step(self):
            return [emit(A, 9, finish=EOS), emit(again, 1)]

    clock = FakeClock()
    decoder = Repeating(clock, {A: [], B: []})
    with pytest.raises(ContractError, match=message):
        run_item(decoder, WorkItem(PAIR, 0, 0, (0, 1)), [request(A), request(B)], clock=clock)


def test_a_decoder_that_refuses_only_the_batch_is_at_fault():
    class Moody(ScriptedDecoder):
        def start(self, requests):
            if len(requests) == 1:
                return
            self.refuses = [A]
            super().start(requests)

    clock = FakeClock()
    item = WorkItem(PAIR, 0, 0, (0, 1))
    with pytest.raises(ContractError, match="refused a batch but none of its requests"):
        run_item(Moody(clock, {}), item, [request(A), request(B)], clock=clock)


def test_the_garbage_collector_runs_before_the_item_and_is_off_during_it(monkeypatch):
    events = []
    monkeypatch.setattr(gc, "collect", lambda: events.append("collect"))
    clock = FakeClock()
    script = {A: one_token_rounds(A, 1, 9)}
    decoder = ScriptedDecoder(clock, script, step_ns=lambda _: events.append(gc.isenabled()) or 1)
    run_item(decoder, WorkItem(SINGLE, 0, 0, (0,)), [request(A)], clock=clock)
    assert events == ["collect", False, False]
    assert gc.isenabled()


def test_the_garbage_collector_is_on_again_after_a_failure():
    with pytest.raises(ContractError):
        decode(SINGLE, {A: []})
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("durations", "steps"),
    [
        ([500, 100, 100, 100, 100, 100], 4),  # steps 2, 3 and 4 agree
        ([500, 100, 109, 100], 4),  # within 10%
        ([100, 100, 100], 3),
        ([100, 111] * 10, 8),  # never agree: the bound
    ],
)
def test_warm_up_ends_when_steps_agree_or_at_the_bound(durations, steps):
    clock = FakeClock()
    rounds = [emit(A, token) for token in range(20)]
    decoder = ScriptedDecoder(clock, {A: rounds}, step_ns=durations.__getitem__)
    assert warm_up(decoder, [request(A)], most_steps=8, clock=clock) == steps
    assert decoder.left == {}


def test_warm_up_starts_again_when_all_have_finished():
    clock = FakeClock()
    script = {A: one_token_rounds(A, 1, 9)}
    decoder = ScriptedDecoder(clock, script, step_ns=lambda step: 100 + 50 * (step % 2))
    assert warm_up(decoder, [request(A)], most_steps=5, clock=clock) == 5
    assert decoder.calls.count(f"start {A}") == 3
    assert decoder.left == {}


def test_warm_up_without_a_usable_request_does_nothing():
    clock = FakeClock()
    assert warm_up(ScriptedDecoder(clock, {}, refuses=[A]), [request(A)], clock=clock) == 0


def test_a_sequence_is_cut_after_its_rounds_and_makes_room_for_the_next():
    clock = FakeClock()
    script = {
        A: [emit(A, 1, 2), emit(A, 3, 4), emit(A, 5)],
        B: one_token_rounds(B, 1, 9),  # ends by itself with its last allowed round
        C: one_token_rounds(C, 9),
    }
    item = WorkItem(SINGLE, repeat=0, block=0, prompt_indices=(0, 1, 2))
    scripted = ScriptedDecoder(clock, script)
    result = run_item(scripted, item, [request(name) for name in script], (), clock, max_rounds=2)
    rows = by_id(result)
    assert {k: r.output_ids for k, r in rows.items()} == {A: (1, 2, 3, 4), B: (1, 9), C: (9,)}
    assert {k: r.finish for k, r in rows.items()} == {A: "rounds", B: "eos", C: "eos"}
    assert (len(result.rounds), result.decode_ns) == (5, 50)
    assert [call for call in scripted.calls if call.startswith("release")] == [
        f"release {name}" for name in script
    ]
