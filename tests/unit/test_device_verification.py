"""Verification in one transfer decides as `sampling.verify` does, and is exact by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.decoder import SamplingParams
from harness.equivalence.exact import check_case
from harness.equivalence.exact_cases import default_cases
from harness.errors import NonFiniteLogitsError
from impl.engine import device_verification
from impl.engine.device_verification import Case, verifications
from impl.engine.sampling import Draft, TreeDraft, Verification
from impl.engine.truncation import cut_by_rank, truncated

VOCAB = 12
PARAMS = (
    SamplingParams(0.0),
    SamplingParams(1.0),
    SamplingParams(0.7, top_k=5),
    SamplingParams(1.3, top_p=0.8),
    SamplingParams(1.0, top_k=6, top_p=0.9),
)


def together(logits, draft, params, uniforms) -> Verification:
    return verifications([Case(logits, draft, params, uniforms)], together=True)[0]()


CHAINS = [case for case in default_cases() if case.name.startswith("chain,")]


@pytest.mark.parametrize("case", CHAINS[::5], ids=lambda case: case.name)
def test_it_is_exact(case):
    assert check_case(case, together).exact


def random_case(generator: np.random.Generator, params: SamplingParams) -> Case:
    """A chain of any kind: full, trimmed or padded vocabulary, with and without q's for its end."""
    count = int(generator.integers(0, 5))
    width = int(generator.choice([VOCAB, VOCAB - 3, VOCAB + 3]))
    ids = None
    if generator.random() < 0.5:
        width = int(generator.integers(2, VOCAB))
        ids = torch.from_numpy(np.sort(generator.permutation(VOCAB)[:width]))
    with_q = count if params.temperature else 0
    with_q = int(generator.integers(0, with_q + 1))
    q = torch.from_numpy(generator.dirichlet(np.full(width, 0.3), count)).float()
    columns = torch.tensor(
        [int(generator.choice(width, p=np.array(r) / sum(r))) for r in q.tolist()]
    )
    tokens = columns.long() if ids is None else ids[columns.long()]
    draft = Draft(tokens, q[:with_q] if with_q else None, ids)
    rows = count + 1 if count == 0 or generator.random() < 0.7 else count  # the last token unfed
    logits = torch.from_numpy(generator.normal(0, 2, (rows, VOCAB))).float()
    for row, token in enumerate(tokens[:rows].tolist()):
        if token < VOCAB and generator.random() < 0.7:
            logits[row, token] += 4  # or too few would be accepted
    return Case(logits, draft, params, generator.random(count + 1))


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_it_decides_as_verification_row_by_row_does(params):
    generator = np.random.default_rng(3)
    cases = [random_case(generator, params) for _ in range(150)]
    apart = [conclude() for conclude in verifications(cases, together=False)]
    assert [conclude() for conclude in verifications(cases, together=True)] == apart
    assert len({(v.accepted, v.token_drafted) for v in apart}) > 4  # ways to end


def test_trees_are_judged_beside_chains():
    tree = TreeDraft(torch.tensor([1, 2, 3]), None, None, (-1, -1, 1), ())
    logits = torch.full((4, VOCAB), -9.0)
    logits[0, 2] = logits[2, 3] = logits[3, 7] = logits[1, 5] = 9.0
    for params in (SamplingParams(0.0), SamplingParams(0.05)):
        cases = [
            Case(logits, tree, params, [0.5] * 4),
            Case(logits[:1], Draft(torch.tensor([], dtype=torch.int64)), params, [0.5]),
        ]
        found = [conclude() for conclude in verifications(cases, together=True)]
        assert found == [Verification(2, 7, (1, 2)), Verification(0, 2)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_named(temperature):
    logits = torch.zeros(3, VOCAB)
    logits[:, 4] = 50.0
    logits[2, 1] = float("nan")
    params, uniforms = SamplingParams(temperature), [0.5] * 3
    sound = Case(logits[:2], Draft(torch.tensor([4])), params, uniforms[:2])
    bad = Case(logits, Draft(torch.tensor([4, 4])), params, uniforms)
    first, second = verifications([sound, bad], together=True)
    assert first() == Verification(1, 4)
    with pytest.raises(NonFiniteLogitsError, match="row 2 of 3"):
        second()


def test_a_batch_is_read_once(monkeypatch):
    reads = []
    read = device_verification.read
    monkeypatch.setattr(
        device_verification, "read", lambda all_: reads.append(len(all_)) or read(all_)
    )
    generator = np.random.default_rng(5)
    verifications([random_case(generator, SamplingParams(1.0)) for _ in range(4)], together=True)
    assert reads == [4]


@pytest.mark.parametrize("params", PARAMS[2:], ids=str)
def test_cutting_by_rank_keeps_what_looking_for_the_likely_keeps(params):
    generator = torch.Generator().manual_seed(1)
    probs = torch.randn(200, 50, generator=generator).mul(2).softmax(-1)
    probs[100:] = torch.randint(1, 4, (100, 50), generator=generator).float()  # ties
    probs[100:] /= probs[100:].sum(-1, keepdim=True)
    want = truncated(probs.clone(), params)
    got = cut_by_rank(probs.clone(), params)
    torch.testing.assert_close(got, want)
    assert torch.equal(got > 0, want > 0)
