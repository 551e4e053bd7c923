from pathlib import Path

import numpy as np
import pytest
import torch

from harness.decoder import SamplingParams
from harness.equivalence.reference_scores import (
    LEAST_LOG_P,
    EngineLogits,
    References,
    TransformersLogits,
    reduce_rows,
    score_output,
)
from impl.engine.models import ModelSpec

TINY = Path(__file__).parents[2] / "harness" / "tiny"
PROMPT, OUTPUT = (7, 20, 31, 44), (50, 61, 72, 83, 94, 12)


@pytest.fixture(scope="module")
def target():
    return ModelSpec(TINY / "target", "float32").load()


def logits_of(source, prompt=PROMPT, output=OUTPUT):
    return torch.cat(list(source.chunks(prompt, output)))


def test_moments_of_log_p_by_hand():
    p = torch.tensor([[0.5, 0.25, 0.25, 0.0]], dtype=torch.float64)
    columns = reduce_rows(p, torch.tensor([1]), None)
    # log2 p is -1 or -2, each with probability 1/2: mean -1.5, variance 1/4, symmetric
    log2 = np.log(2)
    assert columns["log_p"] == pytest.approx([-2 * log2])
    assert columns["log_p_mean"] == pytest.approx([-1.5 * log2])
    assert columns["log_p_variance"] == pytest.approx([0.25 * log2**2])
    assert columns["log_p_third"] == pytest.approx([0.0], abs=1e-12)


def test_third_moment_by_hand():
    p = torch.tensor([[np.exp(-1), 1 - np.exp(-1)]], dtype=torch.float64)
    columns = reduce_rows(p, torch.tensor([0]), None)
    low, high, mean = -1.0, np.log(1 - np.exp(-1)), columns["log_p_mean"][0]
    weights = (np.exp(-1), 1 - np.exp(-1))
    assert mean == pytest.approx(weights[0] * low + weights[1] * high)
    third = weights[0] * (low - mean) ** 3 + weights[1] * (high - mean) ** 3
    assert columns["log_p_third"][0] == pytest.approx(third)


def test_an_impossible_token():
    p = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
    columns = reduce_rows(p, torch.tensor([2, 9]), None)  # 9 is outside the vocabulary
    assert columns["p_token"].tolist() == [0, 0]
    assert columns["p_tail"].tolist() == [0, 0]
    assert columns["p_above"].tolist() == [1, 1]
    assert columns["log_p"].tolist() == [LEAST_LOG_P, LEAST_LOG_P]
    assert columns["is_argmax"].tolist() == [False, False]


def test_mass_by_id_and_of_the_ends():
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).repeat(2, 1)
    columns = reduce_rows(p, torch.tensor([2, 3]), None, end_ids=[0, 3, 99])
    assert columns["p_lower_ids"] == pytest.approx([0.3, 0.6])
    assert columns["end_p"] == pytest.approx([0.5, 0.5])
    assert columns["is_end"].tolist() == [False, True]


def test_the_draft_favourites_and_their_mass_under_the_target():
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).repeat(2, 1)
    favourites = torch.tensor([[1, 3, 0], [0, 7, 2]])  # 7: an id that only the draft knows
    columns = reduce_rows(p, torch.tensor([3, 3]), favourites)
    assert columns["in_draft_top1"].tolist() == [False, False]
    assert columns["draft_top1_p"] == pytest.approx([0.2, 0.1])
    assert columns["in_draft_top3"].tolist() == [True, False]
    assert columns["draft_top3_p"] == pytest.approx([0.7, 0.4])


def test_the_engine_and_transformers_give_the_same_logits(target):
    """Two independent implementations of the same float32 model."""
    engine = logits_of(EngineLogits(target))
    assert engine.shape[0] == len(OUTPUT)
    torch.testing.assert_close(
        engine, logits_of(TransformersLogits(TINY / "target")), rtol=1e-4, atol=1e-4
    )


def test_a_prompt_kept_from_the_last_output_changes_nothing(target):
    source = EngineLogits(target)
    first = logits_of(source)
    logits_of(source, output=(5, 5, 5, 5, 5, 5, 5, 5))  # same prompt, its cells written over
    assert torch.equal(logits_of(source), first)
    longer = logits_of(source, prompt=(9, *PROMPT), output=range(20, 60))
    fresh = logits_of(EngineLogits(target), prompt=(9, *PROMPT), output=range(20, 60))
    assert torch.equal(longer, fresh)
    assert torch.equal(logits_of(source), first)


def test_a_trimmed_head_never_favours_what_it_lacks():
    spec = ModelSpec(TINY / "draft", "float32", vocab_limit=300)
    trimmed, full = (
        logits_of(EngineLogits(spec.load())),
        logits_of(EngineLogits(ModelSpec(TINY / "draft", "float32").load())),
    )
    assert trimmed.shape == (len(OUTPUT), 300)
    torch.testing.assert_close(trimmed, full[:, :300])


@pytest.mark.parametrize("params", [SamplingParams(0.7), SamplingParams(1.0, top_k=5, top_p=0.9)])
def test_scores_follow_the_sampling_parameters(target, params):
    """Against probabilities worked out from transformers' logits with NumPy, token by token."""
    found = score_output(References(EngineLogits(target)), PROMPT, OUTPUT, params)
    logits = logits_of(TransformersLogits(TINY / "target")).double().numpy()
    for i, token in enumerate(OUTPUT):
        p = np.exp((logits[i] - logits[i].max()) / params.temperature)
        order = np.argsort(-p, kind="stable")
        if params.top_k:
            p[order[params.top_k :]] = 0
        share = p[order].cumsum() / p.sum()
        p[order[np.searchsorted(share, params.top_p) + 1 :]] = 0
        p /= p.sum()
        assert found["p_token"][i] == pytest.approx(p[token], abs=1e-5)
        assert found["argmax_p"][i] == pytest.approx(p.max(), abs=1e-5)
        assert found["p_above"][i] == pytest.approx(p[p > p[token]].sum(), abs=1e-5)
