"""The verifier against a target of known logits: outcomes, its cache, and what it says of NaN."""

import pytest
import torch
from fixed_logits import Counting, FixedLogits, NotFinite

from harness.decoder import Request, SamplingParams
from harness.errors import NonFiniteLogitsError
from impl.engine.sampling import Draft, Verification
from impl.engine.sequence import SequenceSlots
from impl.engine.verifier import Verifier

NOTHING = Draft(torch.empty(0, dtype=torch.int64))


def draft(*tokens):
    return Draft(torch.tensor(tokens))


@pytest.fixture
def verify():
    """Prefills prompts, then judges one draft for each; returns outcomes, cache and sequences."""

    def run(rule, prompts, drafts, sampling=None):
        target = FixedLogits(rule, 10, None)
        verifier = Verifier(target, target.new_cache(len(prompts), 32))
        slots = SequenceSlots(len(prompts), 32)
        for i, prompt in enumerate(prompts):
            verifier.prefill(slots.open(Request(f"r{i}", prompt, 9, sampling or SamplingParams())))
        return verifier.verify(slots.live(), drafts).outcomes, verifier.cache

    return run


@pytest.mark.parametrize(
    ("proposed", "outcome"),
    [
        ((), Verification(0, 4)),
        ((4,), Verification(1, 5)),
        ((4, 5, 6), Verification(3, 7)),  # all accepted: the bonus token
        ((4, 5, 7), Verification(2, 6)),
        ((5, 5, 6), Verification(0, 4)),  # later matches do not count
        ((12, 13), Verification(0, 4)),  # ids that the target lacks
    ],
)
def test_accepts_while_the_draft_counts_on(verify, proposed, outcome):
    outcomes, cache = verify(Counting(10), [(1, 2, 3)], [draft(*proposed) if proposed else NOTHING])
    assert outcomes == [outcome]
    assert cache.lengths == [3 + outcome.accepted]  # all but the token just emitted


def test_sequences_of_different_lengths_and_drafts_are_judged_apart(verify):
    outcomes, cache = verify(
        Counting(10), [(1,), (1, 2, 3, 4), (8, 9)], [draft(2, 3, 9), NOTHING, draft(1)]
    )
    assert outcomes == [Verification(2, 4), Verification(0, 5), Verification(0, 0)]
    assert cache.lengths == [3, 4, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_not_finite_logits_name_the_sequence_and_the_position(verify, temperature):
    with pytest.raises(
        NonFiniteLogitsError, match=r"request r1, output position 0: target .*NaN or infinity"
    ):
        verify(
            NotFinite(Counting(10), length=3),
            [(1,), (1, 2, 3)],
            [NOTHING, NOTHING],
            SamplingParams(temperature=temperature),
        )
