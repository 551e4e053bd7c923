"""The change of a cell's speed, spread over acceptance, hit rate and step time by hand."""

from dataclasses import replace
from math import prod

import pandas as pd
import pytest

from harness.factors import factors
from harness.metrics import CellData
from harness.plan import Cell

MS = 1_000_000


def cell(*rounds: tuple[str | None, int, float]) -> CellData:
    """Rounds of (cache outcome, tokens, milliseconds), all time spent verifying."""
    table = pd.DataFrame(rounds, columns=["cache", "emitted", "ms"])
    spent = (table["ms"] * MS).astype("int64")
    table = table.assign(
        item="i", request_id="mini/0/r0", step=range(len(table)), live=1, draft_ns=0, wait_ns=0
    ).assign(start_ns=0, end_ns=spent, verify_ns=spent, transfer_ns=0.0, spans=[[]] * len(table))
    return CellData(Cell("ssd", "mini", 0.0, 1), pd.DataFrame({"request_id": ["mini/0/r0"]}), table)


def ratios(base: CellData, new: CellData) -> tuple[float, float, float]:
    found = factors(base, new)
    assert found is not None
    return found.acceptance, found.hit_rate, found.step_time


def speed(data: CellData) -> float:
    return data.rounds["emitted"].sum() / data.rounds["ms"].sum()


HIT, MISS = ("hit", 4, 100.0), ("miss", 2, 150.0)


def test_fewer_hits_are_blamed_on_the_hit_rate():
    # 8 hits and 2 misses: 36 tokens in 1100 ms; 5 and 5: 30 tokens in 1250 ms
    base, new = cell(*[HIT] * 8, *[MISS] * 2), cell(*[HIT] * 5, *[MISS] * 5)
    assert ratios(base, new) == pytest.approx((1.0, (30 / 1250) / (36 / 1100), 1.0))
    assert factors(base, new).blame == "hit rate"


def test_shorter_rounds_of_the_same_time_are_blamed_on_acceptance():
    base, new = cell(*[HIT] * 4), cell(*[("hit", 3, 100.0)] * 4)
    assert ratios(base, new) == pytest.approx((3 / 4, 1.0, 1.0))
    assert factors(base, new).blame == "acceptance"


def test_slower_rounds_are_blamed_on_step_time_and_its_span():
    base, new = cell((None, 1, 100.0)), cell((None, 1, 108.0))
    assert ratios(base, new) == pytest.approx((1.0, 1.0, 100 / 108))
    assert factors(base, new).blame == "step time (verify +8 ms)"


def test_a_run_from_before_transfers_were_told_apart_has_them_in_wait():
    # of 100 ms, 8 waited for; then 5 waited for and 3 of transfers, and 10 more ms of verifying
    before, after = cell((None, 1, 100.0)), cell((None, 1, 110.0))
    old = before.rounds.assign(verify_ns=92 * MS, wait_ns=8 * MS, transfer_ns=float("nan"))
    new = after.rounds.assign(verify_ns=102 * MS, wait_ns=5 * MS, transfer_ns=3.0 * MS)
    found = factors(replace(before, rounds=old), replace(after, rounds=new))
    assert found.blame == "step time (verify +10 ms)"


def test_two_changes_at_once_are_averaged_over_their_orders():
    # no misses before; the miss group's own figures then change nothing but the shares:
    # tokens 4 -> 3, time 100 -> 125
    base, new = cell(HIT, HIT), cell(HIT, MISS)
    assert ratios(base, new) == pytest.approx((1.0, (3 / 125) / (4 / 100), 1.0))
    # shares (1/2, 1/2) -> (1/4, 3/4), tokens (4, 2) -> (3, 2): means 3 -> 2.25, with the new shares
    # alone 2.5, with the new tokens alone 2.5
    base = cell(("hit", 4, 1.0), ("miss", 2, 1.0))
    new = cell(("hit", 3, 1.0), *[("miss", 2, 1.0)] * 3)
    shares = ((2.5 / 3) * (2.25 / 2.5)) ** 0.5
    assert ratios(base, new) == pytest.approx((shares, shares, 1.0))


@pytest.mark.parametrize("seed", range(5))
def test_the_factors_multiply_to_the_ratio_of_the_speeds(seed):
    outcomes = pd.Series(["hit", "miss", None, "hit"])
    rows = [
        [
            (outcome, 1 + (seed * 7 + i) % 5, 50.0 + (seed * 13 + 3 * i) % 17)
            for i, outcome in enumerate(outcomes.sample(40, replace=True, random_state=seed + run))
        ]
        for run in (0, 100)
    ]
    base, new = (cell(*own) for own in rows)
    assert prod(ratios(base, new)) == pytest.approx(speed(new) / speed(base), rel=1e-12)


def test_no_rounds_have_no_factors():
    assert factors(cell(), cell(HIT)) is None
