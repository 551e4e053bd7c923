"""Greedy output on the `tiny` pair: all methods equal AR id by id, and AR equals Hugging Face.

In float32 on PyTorch, where a batch can only change a logit's last bits; and, with random weights,
in bfloat16 on the CPU kernels, whose rows do not depend on the batch at all.
"""

from pathlib import Path

import pytest
from fixed_logits import Pair, decode, emitted

from harness.decoder import CacheOutcome, Request
from impl.engine.cpu_kernels import CpuKernels
from impl.engine.models import Models, ModelSpec

TINY = Path(__file__).parents[2] / "harness" / "tiny"
PROMPTS = [
    "What is a decoding method?",
    "The speculation cache",
    "A",
    "def step(self)",
    "Why does the draft wait for the target? Explain it in two sentences, and give an example.",
    "Write a poem about rain in spring.",
    "Which licence applies to the work?",
    "A request is refused when",
    "1 2 3 4",
]


EOS = frozenset({0, 2})


@pytest.fixture(scope="module")
def requests():
    """Prompts of 1 to about 60 tokens and outputs of 3 to 33: slots free up at different times."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    return [
        Request(f"r{i}", tuple(tokenizer(p)["input_ids"]), 3 + 10 * (i % 4), eos_token_ids=EOS)
        for i, p in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def float32():
    return Models(*(ModelSpec(TINY / name, dtype="float32") for name in ("target", "draft")))


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory):
    """Random weights in shapes that the kernels run; the draft is the target with noise added."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    kernels = tmp_path_factory.mktemp("kernels")
    if CpuKernels.load(kernels) is None:
        pytest.skip(f"CPU kernels: {CpuKernels.unavailable_reason(kernels)}")
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    folders = [tmp_path_factory.mktemp(name) for name in ("target", "draft")]
    for folder in folders:
        model.save_pretrained(folder)
        for weight in model.parameters():
            weight.data += 0.005 * torch.randn_like(weight)
    return Models(*(ModelSpec(folder, kernel_dir=kernels) for folder in folders))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def models(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def expected(models, requests):
    """What AR emits, each request alone."""
    return emitted(decode(Pair(models, max_context=512).ar(), requests))


def test_ar_equals_hugging_face(float32, requests):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32)
    texts = emitted(decode(Pair(float32, max_context=512).ar(), requests))
    for request in requests:
        prompt = torch.tensor([request.prompt_ids])
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=request.max_new_tokens,
        )
        assert texts[request.request_id] == tuple(output[0, prompt.shape[1] :].tolist())


@pytest.mark.parametrize("batch_size", [2, 7])
def test_ar_does_not_depend_on_the_batch(models, requests, expected, batch_size):
    pair = Pair(models, batch_size, max_context=512)
    assert emitted(decode(pair.ar(), requests)) == expected


@pytest.mark.parametrize("batch_size", [1, 2, 7])
@pytest.mark.parametrize("lookahead", [1, 4, 9])
def test_sd_equals_ar(models, requests, expected, batch_size, lookahead):
    pair = Pair(models, batch_size, max_context=512)
    assert emitted(decode(pair.sd(lookahead), requests)) == expected


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_sd_that_stops_when_unsure_equals_ar(models, requests, expected, batch_size):
    decoder = Pair(models, batch_size, max_context=512).sd(9, stop_below=0.5)
    assert emitted(decode(decoder, requests)) == expected


@pytest.mark.parametrize("batch_size", [1, 2, 7])
@pytest.mark.parametrize("lookahead", [1, 6])
def test_ngram_equals_ar(models, requests, expected, batch_size, lookahead):
    log = decode(Pair(models, batch_size, max_context=512).ngram(lookahead), requests)
    assert emitted(log) == expected
    assert sum(r.accepted for rounds in log.values() for r in rounds) > 0


@pytest.mark.parametrize("batch_size", [1, 2, 7])
@pytest.mark.parametrize(
    "options",
    [{"nodes": 8, "depth": 4, "branching": 2}, {"nodes": 5, "depth": 9}, {"shape": [4, 2, 2, 1]}],
    ids=str,
)
def test_tree_equals_ar(models, requests, expected, batch_size, options):
    pair = Pair(models, batch_size, max_context=512)
    log = decode(pair.tree(**options), requests)
    assert emitted(log) == expected
    accepted = [r.accepted for rounds in log.values() for r in rounds if r.drafted]
    assert min(accepted) == 0 < max(accepted)


@pytest.mark.parametrize(
    ("batch_size", "passes", "options"),
    [
        (1, None, {"lookahead": 4, "budget": 8, "fan_out": "confidence", "fallback": "adaptive"}),
        (1, 2, {"lookahead": 9, "budget": 40, "fan_out": "uniform"}),
        (2, 0, {"lookahead": 1, "budget": 1, "fan_out": "geometric"}),
        (2, None, {"lookahead": 4, "budget": 40, "fan_out": "adaptive"}),
        (7, 3, {"lookahead": 4, "budget": 8, "fan_out": "confidence", "return_short": True}),
        (7, None, {"lookahead": 9, "budget": 8, "fan_out": "geometric"}),
        (7, 1, {"lookahead": 4, "budget": 0}),
        (2, None, {"lookahead": 4, "budget": 8, "fallback": "fast"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_ssd_equals_ar(models, requests, expected, batch_size, passes, options):
    pair = Pair(models, batch_size, max_context=512)
    with pair.ssd(passes=passes, **options) as decoder:
        assert emitted(decode(decoder, requests)) == expected


@pytest.mark.parametrize(
    ("batch_size", "beside", "options"),
    [
        (1, 3, {"max_verified": 4}),
        (2, 1, {"max_verified": 9}),
        (7, 4, {"max_verified": 2}),
        (7, 0, {"max_verified": 4, "fixed": True}),
    ],
)
def test_amusd_equals_ar(models, requests, expected, batch_size, beside, options):
    pair = Pair(models, batch_size, max_context=512)
    with pair.amusd(beside=beside, **options) as decoder:
        assert emitted(decode(decoder, requests)) == expected


@pytest.mark.parametrize(
    ("batch_size", "beside", "options"),
    [
        (1, 3, {"lookahead": 4}),
        (2, 9, {"lookahead": 1}),
        (7, 0, {"lookahead": 6}),
        (7, 2, {"lookahead": "auto"}),
    ],
)
def test_pearl_equals_ar(models, requests, expected, batch_size, beside, options):
    pair = Pair(models, batch_size, max_context=512)
    with pair.pearl(beside=beside, **options) as decoder:
        assert emitted(decode(decoder, requests)) == expected


def test_hits_misses_and_rejections_occur_in_these_cases(models, requests):
    with Pair(models, 2, max_context=512).ssd(lookahead=4, budget=8) as decoder:
        log = decode(decoder, requests)
    rounds = [r for each in log.values() for r in each]
    outcomes = [r.cache for r in rounds]
    assert outcomes.count(CacheOutcome.HIT) >= 5
    assert outcomes.count(CacheOutcome.MISS) >= 5
    assert 0.2 < sum(r.accepted for r in rounds) / sum(r.drafted for r in rounds) < 0.9
