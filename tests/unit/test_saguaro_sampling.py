"""Saguaro sampling: the reweighted distribution, its exactness, and what it buys."""

import numpy as np
import pytest
import torch

from harness.decoder import SamplingParams
from impl.engine.sampling import Draft, residual, verify
from impl.ssd.saguaro_sampling import reweight

Q = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)


def test_by_hand():
    # Top 2 are tokens 1 and 2, halved: (.1, .2, .15, .2) / .65.
    expected = [0.1 / 0.65, 0.2 / 0.65, 0.15 / 0.65, 0.2 / 0.65]
    assert reweight(Q, 2, 0.5).tolist() == pytest.approx(expected)
    # C = 0 takes them out: (1/3, 0, 0, 2/3).
    assert reweight(Q, 2, 0.0).tolist() == pytest.approx([1 / 3, 0, 0, 2 / 3])


def test_c_one_and_no_guesses_are_plain_sampling_bit_for_bit():
    q = torch.softmax(torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)), -1)
    assert torch.equal(reweight(q, 8, 1.0), q)
    assert torch.equal(reweight(q, 0, 0.3), q)


@pytest.mark.parametrize("c", [0.0, 0.25, 0.75])
@pytest.mark.parametrize("top", [1, 3, 4, 9])
def test_rows_stay_distributions_and_the_input_is_kept(c, top):
    rows = torch.stack([Q, torch.tensor([0, 1, 0, 0], dtype=torch.float64)])
    before = rows.clone()
    lowered = reweight(rows, top, c)
    assert lowered.sum(-1).tolist() == pytest.approx([1, 1])
    assert bool((lowered >= 0).all())
    assert torch.equal(rows, before)


def test_all_the_mass_guessed_at_c_zero_stays_q():
    assert torch.equal(reweight(Q, 4, 0.0), Q)
    point = torch.tensor([0.0, 0.0, 1.0, 0.0])
    assert torch.equal(reweight(point, 1, 0.0), point)


def test_lower_c_leaves_more_residual_on_the_guessed_tokens():
    # p = (.1, .5, .3, .1). Guessed: 1 and 2. Residual mass there, by hand: C = 1: .1 of .1;
    # C = 0: .5 + .3 = .8. In general p - q' on the guessed tokens grows as C falls.
    p = torch.tensor([0.1, 0.5, 0.3, 0.1], dtype=torch.float64)
    masses = [
        float(residual(p, reweight(Q, 2, c), None, 0)[[1, 2]].sum())
        for c in (1, 0.75, 0.5, 0.25, 0)
    ]
    assert masses == sorted(masses)
    assert masses[0] == pytest.approx(0.1)
    assert masses[-1] == pytest.approx(0.8)


@pytest.mark.parametrize("c", [0.0, 0.5, 1.0])
def test_output_is_the_target_at_any_c(c):
    # First emitted token, integrating the acceptance by its closed form but taking the rejected
    # emission from the real code, at fine midpoints of its uniform.
    p = np.array([0.1, 0.5, 0.3, 0.1])
    logits = torch.tensor(np.stack([p, p])).log()
    lowered = reweight(Q, 2, c)
    emitted = np.zeros(4)
    for token, mass in enumerate(lowered.tolist()):
        if mass == 0:
            continue
        accepted = min(1.0, p[token] / mass)
        emitted[token] += mass * accepted
        draft = Draft(torch.tensor([token]), lowered[None])
        for middle in (np.arange(2000) + 0.5) / 2000 if accepted < 1 else ():
            outcome = verify(
                logits, draft, SamplingParams(1.0), [(accepted + 1) / 2, float(middle)]
            )
            assert outcome.accepted == 0
            emitted[outcome.token] += mass * (1 - accepted) / 2000
    assert emitted == pytest.approx(p, abs=1e-3)  # the grid's resolution
