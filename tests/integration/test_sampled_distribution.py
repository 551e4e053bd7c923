"""What drafting methods emit at temperature > 0, counted against the target's exact distribution.

The target draws every token from one distribution p, whatever came before, so any three tokens in a
row have the joint distribution p x p x p; the draft follows a Markov chain far from it. Windows of
three tokens begin where a round begins, and are told apart by what was known then: the round's
speculation was a hit or a miss. Windows of a text do not overlap, so they are independent draws.

Each Pearson chi-square test has a false-alarm rate of 1e-4 over the choice of seeds, which are
fixed here.
"""

import itertools
import math
from collections import Counter
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fixed_logits import FixedLogitSpec, Markov, Pair, decode, emitted
from scipy.stats import chi2

from baselines.pearl import MAX_AUTO_LOOKAHEAD, SpeedRatio
from harness.decoder import CacheOutcome, Request, SamplingParams
from impl.engine import drafter
from impl.engine.models import Models
from impl.engine.randomness import Role
from impl.engine.sampling import Draft
from impl.ssd import decoder
from impl.ssd import decoder as ssd
from impl.ssd.budgeting import Costs, PassTimes
from impl.ssd.policy import Policy

pytestmark = pytest.mark.no_cover  # so many draws that tracing them costs a minute

FALSE_ALARM = 1e-4
P = (0.45, 0.33, 0.22)
TARGET = Markov((P,) * 3)
DRAFT = Markov(((0.15, 0.25, 0.6), (0.8, 0.1, 0.1), (0.1, 0.85, 0.05)))
PAIR = Pair(Models(FixedLogitSpec(TARGET, 3), FixedLogitSpec(DRAFT, 3)), batch_size=8)


def requests(params, count=110, length=48):
    return [Request(f"r{i}", (i % 3,), length, params) for i in range(count)]


def windows(log, width=3):
    """Triples that begin with a round, by the round's cache outcome."""
    counts = {outcome: Counter() for outcome in (None, *CacheOutcome)}
    for name, text in emitted(log).items():
        start = free = 0
        for round_ in log[name]:
            if start >= free and start + width <= len(text):
                counts[round_.cache][text[start : start + width]] += 1
                free = start + width
            start += len(round_.tokens)
    return counts


def p_value(counts, p):
    """Pearson's test of triples against p x p x p; tokens that p cannot draw must not occur."""
    possible = [token for token in range(len(p)) if p[token] > 0]
    cells = list(product(possible, repeat=3))
    total = sum(counts.values())
    assert sum(counts[cell] for cell in cells) == total, "an impossible token was emitted"
    expected = total * np.array([p[a] * p[b] * p[c] for a, b, c in cells])
    assert expected.min() > 2, f"{total} windows are too few"
    observed = np.array([counts[cell] for cell in cells])
    return chi2.sf(((observed - expected) ** 2 / expected).sum(), len(cells) - 1)


def ssd_windows(params=None, count=110, **options):
    params = params or SamplingParams(temperature=1.0)
    with PAIR.ssd(lookahead=3, budget=3, **options) as decoder:
        return windows(decode(decoder, requests(params, count)))


def test_sd_draws_from_the_target():
    log = decode(PAIR.sd(3), requests(SamplingParams(temperature=1.0)))
    assert p_value(windows(log)[None], P) > FALSE_ALARM


@pytest.mark.parametrize(
    "options",
    [
        {"nodes": 4, "depth": 3, "branching": 2},
        {"nodes": 4, "depth": 3, "branching": 2, "candidates": "likeliest"},
        {"shape": [2, 2]},
    ],
    ids=["dynamic", "likeliest", "static"],
)
def test_tree_draws_from_the_target(options):
    log = decode(PAIR.tree(**options), requests(SamplingParams(temperature=1.0)))
    assert p_value(windows(log)[None], P) > FALSE_ALARM


@pytest.mark.parametrize(
    "options",
    [
        {"fan_out": "geometric"},
        {"fan_out": "confidence"},
        {"saguaro_c": 0.5, "saguaro_top": 1},
        {"saguaro_c": 0.0, "saguaro_top": 1},
        {"fallback": "fast"},
    ],
    ids=["geometric", "confidence", "c-0.5", "c-0", "fast"],
)
def test_ssd_draws_from_the_target_after_hits_and_after_misses(options):
    counts = ssd_windows(**options)
    for outcome in CacheOutcome:
        assert p_value(counts[outcome], P) > FALSE_ALARM


@pytest.mark.parametrize("passes", [None, 2], ids=["whole builds", "2 passes"])
@pytest.mark.parametrize("c", [1.0, 0.5])
def test_replicas_draw_from_the_target(monkeypatch, passes, c):
    """Which of them is first with a hit, and how far it gets, depends on what has been drafted."""
    monkeypatch.setattr(
        Policy, "worth_drafting", lambda _, paths, __: paths[0].confidences[-1] > 0.2
    )
    several = replace(PAIR, drafts=2)
    with several.ssd(lookahead=3, budget=2, passes=passes, saguaro_c=c, saguaro_top=1) as decoder:
        log = decode(decoder, requests(SamplingParams(temperature=1.0)))
    for outcome in CacheOutcome:
        assert p_value(windows(log)[outcome], P) > FALSE_ALARM


@pytest.mark.parametrize("passes", [None, 2], ids=["whole builds", "2 passes"])
def test_drafts_returned_short_draw_from_the_target(monkeypatch, passes):
    """However short, and though what was drafted so far decides it: here an unlikely token ends."""
    monkeypatch.setattr(
        Policy, "worth_drafting", lambda _, paths, __: paths[0].confidences[-1] > 0.2
    )
    with PAIR.ssd(lookahead=3, budget=3, passes=passes) as decoder:
        log = decode(decoder, requests(SamplingParams(temperature=1.0)))
    drafted = Counter(r.drafted for rounds in log.values() for r in rounds)
    assert min(drafted[k] for k in (1, 2, 3)) > 100
    for outcome in CacheOutcome:
        assert p_value(windows(log)[outcome], P) > FALSE_ALARM


def amusd_windows(**options):
    params = SamplingParams(temperature=1.0)
    with PAIR.amusd(max_verified=3, **options) as decoder:
        return windows(decode(decoder, requests(params)))[None]


def pearl_windows(**options):
    params = SamplingParams(temperature=1.0)
    with PAIR.pearl(**options) as decoder:
        return windows(decode(decoder, requests(params)))[None]


@pytest.mark.parametrize(
    "options",
    [{"beside": 0}, {"beside": 1}, {"beside": 4}, {"fixed": True}],
    ids=["bonus tokens", "no more than one ahead", "far ahead", "fixed"],
)
def test_amusd_draws_from_the_target(options):
    assert p_value(amusd_windows(**options), P) > FALSE_ALARM


@pytest.mark.parametrize(("lookahead", "beside"), [(1, 0), (3, 1), (3, 9)])
def test_pearl_draws_from_the_target(lookahead, beside):
    assert p_value(pearl_windows(lookahead=lookahead, beside=beside), P) > FALSE_ALARM


def test_pearl_with_blocks_of_changing_length_draws_from_the_target(monkeypatch):
    lengths = itertools.cycle((1, MAX_AUTO_LOOKAHEAD, 2, 5))
    monkeypatch.setattr(SpeedRatio, "lookahead", lambda _: next(lengths))
    assert p_value(pearl_windows(lookahead="auto", beside=4), P) > FALSE_ALARM


def test_branches_that_grow_by_their_worth_draw_from_the_target(monkeypatch):
    """Which branch grows, and how far, is decided by what has been drafted for all of them."""
    times = PassTimes((1, 9), (0.1, 0.116))
    costs = Costs(times, times, PassTimes((1, 9), (0.01, 0.02)), PassTimes((1, 9), (0.01, 0.05)))
    monkeypatch.setattr(decoder, "measure_costs", lambda *_: costs)
    monkeypatch.setattr(Policy, "expected_verification", lambda *_: math.inf)
    monkeypatch.setattr(Policy, "observe_round", lambda *_: None)  # the speed stays as believed
    options = {"lookahead": "auto", "budget": "auto", "build": "likeliest", "return_short": True}
    with PAIR.ssd(passes=4, **options | {"fan_out": "confidence"}) as ssd:
        log = decode(ssd, requests(SamplingParams(temperature=1.0)))
    drafted = Counter(r.drafted for rounds in log.values() for r in rounds)
    assert sum(count > 100 for count in drafted.values()) >= 3
    for outcome in CacheOutcome:
        assert p_value(windows(log)[outcome], P) > FALSE_ALARM


def texts(**options):
    with PAIR.ssd(lookahead=3, budget=3, **options) as decoder:
        return emitted(decode(decoder, requests(SamplingParams(temperature=1.0), count=20)))


def test_c_of_1_is_plain_sampling():
    plain = emitted(decode(PAIR.sd(3), requests(SamplingParams(temperature=1.0), count=20)))
    assert texts(saguaro_c=1.0, saguaro_top=2) == plain
    assert texts(saguaro_c=0.5, saguaro_top=0) == plain  # nothing to lower
    assert texts(saguaro_c=0.5, saguaro_top=2) != plain


@pytest.mark.parametrize(
    ("params", "p"),
    [
        (SamplingParams(temperature=1.0, top_k=2), (0.45 / 0.78, 0.33 / 0.78, 0.0)),
        (SamplingParams(temperature=1.0, top_p=0.7), (0.45 / 0.78, 0.33 / 0.78, 0.0)),
        (SamplingParams(temperature=0.7), tuple(np.array(P) ** (1 / 0.7) / 0.6398)),
    ],
    ids=["top-k", "top-p", "temperature"],
)
def test_the_target_is_what_the_parameters_make_of_it(params, p):
    counts = ssd_windows(params, count=110 if min(p) else 50)
    for outcome in CacheOutcome:
        assert p_value(counts[outcome], p) > FALSE_ALARM
    log = decode(PAIR.sd(3), requests(params, count=50))
    assert p_value(windows(log)[None], p) > FALSE_ALARM


# --- bugs that these tests must see ---------------------------------------------------------------


def accepted_blindly_after_a_miss(
    self, sequence, speculation, draft_of=ssd.SaguaroDecoder._draft_of
):
    """Takes over what the backup drew: q = 0 accepts every token that the target can say at all."""
    draft = draft_of(self, sequence, speculation)
    missed = speculation.backup and draft.probs is not None
    return Draft(draft.tokens, torch.zeros_like(draft.probs), draft.ids) if missed else draft


def q_of_another_branch(self, sequence, speculation, draft_of=ssd.SaguaroDecoder._draft_of):
    """Judges each token of a hit by another row than the one it was drawn from."""
    draft = draft_of(self, sequence, speculation)
    hit = speculation.cache is CacheOutcome.HIT and draft.probs is not None
    return Draft(draft.tokens, draft.probs.roll(1, dims=-1), draft.ids) if hit else draft


@pytest.mark.parametrize(
    ("bug", "stratum"),
    [(accepted_blindly_after_a_miss, CacheOutcome.MISS), (q_of_another_branch, CacheOutcome.HIT)],
)
def test_a_planted_bug_is_seen_where_it_is(monkeypatch, bug, stratum):
    monkeypatch.setattr(ssd.SaguaroDecoder, "_draft_of", bug)
    assert p_value(ssd_windows()[stratum], P) < FALSE_ALARM


def test_q_rows_of_another_replica_are_seen(monkeypatch):
    draft_of = ssd.SaguaroDecoder._draft_of

    def draft_of_the_first(self, sequence, speculation):
        return draft_of(self, sequence, speculation._replace(replica=0))

    monkeypatch.setattr(ssd.SaguaroDecoder, "_draft_of", draft_of_the_first)
    with replace(PAIR, drafts=2, deterministic=True).ssd(lookahead=3, budget=3) as decoder:
        log = decode(decoder, requests(SamplingParams(temperature=1.0)))
    assert p_value(windows(log)[CacheOutcome.HIT], P) < FALSE_ALARM


def test_draws_shared_with_the_verifier_are_seen(monkeypatch):
    monkeypatch.setattr(drafter, "Role", SimpleNamespace(DRAFT=Role.VERIFY))
    counts = ssd_windows()
    assert min(p_value(counts[outcome], P) for outcome in CacheOutcome) < FALSE_ALARM / 2
