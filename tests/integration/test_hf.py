"""transformers behind the decoder contract: `generate`'s own tokens, in rounds, tiny pair."""

from pathlib import Path

import pytest
import torch
from fixed_logits import Pair, decode, emitted

from baselines.hf import TransformersDecoder, TransformersOptions
from harness.decoder import FinishReason, Request, SamplingParams, SpanKind
from harness.decoder_pool import Method
from harness.errors import ModelError, RequestError, UsageError
from harness.registry import decoder_options
from harness.tuning.search import candidates
from impl.engine.models import Models, ModelSpec

TINY = Path(__file__).parents[2] / "harness" / "tiny"
EOS = frozenset({0, 2})
PROMPTS = ((5, 9, 40, 41), (7,), tuple(range(30, 90)), (100, 101, 102), (60, 61) * 10)
REQUESTS = [
    Request(f"r{i}", prompt, 3 + 9 * (i % 3), eos_token_ids=EOS) for i, prompt in enumerate(PROMPTS)
]


@pytest.fixture(scope="module")
def models():
    return Models(*(ModelSpec(TINY / name, dtype="float32") for name in ("target", "draft")))


@pytest.fixture(scope="module")
def expected(models):
    """What `generate` says when it is called the plain way."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32)
    texts = {}
    for request in REQUESTS:
        prompt = torch.tensor([request.prompt_ids])
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=request.max_new_tokens,
        )
        texts[request.request_id] = tuple(output[0, prompt.shape[1] :].tolist())
    return texts


def hf(models, batch_size=1, max_context=512, **options):
    setup = Pair(models, batch_size, max_context).setup(TransformersOptions(**options))
    return TransformersDecoder.create(setup)


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_greedy_output_is_that_of_generate(models, expected, batch_size):
    log = decode(hf(models, batch_size), REQUESTS)
    assert emitted(log) == expected
    rounds = [r for own in log.values() for r in own]
    assert {(len(r.tokens), r.drafted, r.accepted) for r in rounds} == {(1, 0, 0)}
    assert {span.kind for r in rounds for span in r.spans} == {SpanKind.VERIFY}


@pytest.mark.parametrize("options", [{}, {"lookahead": 3, "stop_below": 0.0}])
def test_assisted_output_is_that_of_generate(models, expected, options):
    log = decode(hf(models, assisted=True, **options), REQUESTS)
    assert emitted(log) == expected
    rounds = [r for own in log.values() for r in own]
    assert max(r.accepted for r in rounds) >= 2
    assert all(len(r.tokens) == r.accepted + 1 for r in rounds)
    assert max(r.drafted for r in rounds) <= options.get("lookahead", 20)
    drafted = next(r for r in rounds if r.drafted)
    assert [span.kind for span in drafted.spans] == [SpanKind.DRAFT, SpanKind.VERIFY]


@pytest.mark.parametrize("assisted", [False, True])
def test_a_prompt_is_fed_before_the_first_step(models, assisted):
    """Every pass of a step takes the pending token and the draft, never the prompt."""
    decoder = hf(models, assisted=True, lookahead=4, stop_below=0.0) if assisted else hf(models)
    fed: dict[str, list[int]] = {"target": [], "draft": []}
    for name, model in (("target", decoder.target), ("draft", decoder.draft)):
        if model is not None:
            model.register_forward_pre_hook(
                lambda _m, _a, kwargs, name=name: fed[name].append(kwargs["input_ids"].shape[1]),
                with_kwargs=True,
            )
    decoder.start([Request("a", tuple(range(30, 90)), 12)])
    assert fed == {"target": [59], "draft": [59] if assisted else []}
    decoder.step()
    assert fed["target"][1:] == [5 if assisted else 1]
    assert len(fed["target"]) == 2  # and nothing was computed behind the step's back
    assert max(fed["draft"][1:], default=0) <= 2
    decoder.close()


def test_temperature_1_is_seeded_by_the_request(models):
    def sampled(seed, name="a"):
        request = Request(name, (5, 9, 40, 41), 20, SamplingParams(1.0, seed=seed))
        return emitted(decode(hf(models), [request]))[name]

    assert sampled(1) == sampled(1)
    assert len({sampled(1), sampled(2), sampled(1, "b")}) == 3


def test_what_ends_a_sequence_is_the_harness_s_rule(models, expected):
    text = expected["r2"]
    assert len(text) == 21
    assert text[2:4] not in (text[0:2], text[1:3])
    request = Request("a", PROMPTS[2], 21, stop_sequences=(text[2:4],))
    log = decode(hf(models), [request])["a"]
    assert [t for r in log for t in r.tokens] == list(text[:4])
    assert log[-1].finish is FinishReason.STOP
    full = decode(hf(models, max_context=65), [Request("a", PROMPTS[2], 21)])["a"]
    assert [t for r in full for t in r.tokens] == list(text[:5])
    assert full[-1].finish is FinishReason.CONTEXT


def test_refusals(models):
    with pytest.raises(ModelError, match="assisted generation decodes one sequence"):
        hf(models, batch_size=2, assisted=True)
    alone = Models(ModelSpec(TINY / "target", dtype="float32"))
    with pytest.raises(ModelError, match="this pair has no draft"):
        hf(alone, assisted=True)
    with pytest.raises(UsageError, match="hf: lookahead: is for assisted generation"):
        decoder_options("hf", {"lookahead": 4})
    decoder = hf(models, batch_size=2)
    decoder.start([REQUESTS[0]])
    warm = Request("warm", (1, 2), 3, SamplingParams(1.0), eos_token_ids=EOS)
    with pytest.raises(RequestError, match="request warm: samples or ends differently"):
        decoder.admit(warm)
    assert [r.request_id for r in decoder.step()] == ["r0"]
    decoder.close()


def test_an_error_inside_generate_ends_the_step(models):
    decoder = hf(models)
    decoder.start([REQUESTS[0]])

    def broken(*args):
        raise ValueError("broken inside")

    decoder.target.register_forward_pre_hook(broken)
    with pytest.raises(ValueError, match="broken inside"):
        decoder.step()
    decoder.close()


def test_assisted_generation_alone_has_something_to_tune():
    plain = Method(TransformersDecoder, TransformersOptions())
    assert plain.grid == {}
    assisted = TransformersOptions(assisted=True)
    found = candidates(Method(TransformersDecoder, assisted, frozenset({"assisted"})))
    assert [point["lookahead"] for point in found] == [20, 2, 3, 4, 5, 6, 8]  # its default first
    for point in found:
        TransformersOptions.model_validate(assisted.model_dump() | point)
