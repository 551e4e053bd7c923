"""The parts of a round, one by one: what a slower round is searched for with.

`pytest tests/bench/test_kernels_bench.py --benchmark-json FILE` keeps the times; `extra_info` says
what was timed. On SmolLM2-135M where its weights are on this machine, else on the tiny pair.
"""

from __future__ import annotations

import os

import pytest
import torch

from harness.decoder import SamplingParams
from harness.errors import HarnessError
from harness.pairs import find_pair, resolve
from impl.engine.channel import Channel, share
from impl.engine.models import ModelSpec
from impl.engine.sampling import Draft, verify
from impl.engine.token_batch import TokenBatch
from impl.ssd.fan_out import AdaptiveFanOut, geometric
from impl.ssd.speculation_cache import Outcome, SpeculationCache, guesses

CONTEXT = 200
LOOKAHEAD = 4
BUDGET = 24
VOCAB = {"smollm2": 49_152, "qwen2.5": 151_936}


@pytest.fixture(scope="module")
def model(cache_dir):
    for name in ("smollm2-135m", "tiny"):
        try:
            folder = resolve(find_pair(name), cache_dir, offline=True).target.folder
        except HarnessError:
            continue
        return name, ModelSpec(folder, kernel_dir=cache_dir / "kernels").load()
    pytest.fail("the tiny pair comes with the program")


def prefilled(model, tokens: int):
    """A cache with the context in it and room for `tokens` more."""
    cache = model.new_cache(1, CONTEXT + tokens)
    model.prefill(cache, 0, [i % 100 for i in range(CONTEXT)])
    return cache


@pytest.mark.parametrize("tokens", [1, 8, 24])
def test_forward(benchmark, model, tokens):
    name, loaded = model
    cache = prefilled(loaded, tokens)
    batch = TokenBatch.causal([(0, CONTEXT, range(tokens))])
    benchmark.extra_info.update(
        model=name, tokens=tokens, context=CONTEXT, weight_bytes=loaded.weight_bytes
    )
    with torch.inference_mode():
        logits = benchmark(loaded.forward, batch, cache)
    assert logits.shape[0] == tokens


def drafted(vocab: int, temperature: float):
    """Target logits of K + 1 rows and a draft that was drawn from its own q."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(LOOKAHEAD + 1, vocab, generator=generator)
    if temperature == 0:
        return logits, Draft(logits[:LOOKAHEAD].argmax(-1))
    noise = torch.randn(LOOKAHEAD, vocab, generator=generator)
    q = torch.softmax(logits[:LOOKAHEAD] + 0.1 * noise, -1)
    return logits, Draft(torch.multinomial(q, 1, generator=generator)[:, 0], q)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", VOCAB)
def test_verification(benchmark, vocab, temperature):
    logits, draft = drafted(VOCAB[vocab], temperature)
    sampling = SamplingParams(temperature=temperature)
    benchmark.extra_info.update(vocab=VOCAB[vocab], temperature=temperature, drafted=LOOKAHEAD)
    outcome = benchmark(verify, logits, draft, sampling, [0.5] * (LOOKAHEAD + 1))
    assert 0 <= outcome.accepted <= LOOKAHEAD


def test_fan_out_closed_form(benchmark):
    benchmark.extra_info.update(budget=BUDGET, lookahead=LOOKAHEAD)
    assert sum(benchmark(geometric, BUDGET, LOOKAHEAD, 0.8, 1.0)) == BUDGET


def test_fan_out_adaptive(benchmark):
    """An observation and the allocation after it: what SSD does in every round."""
    fan_out = AdaptiveFanOut()
    benchmark.extra_info.update(budget=BUDGET, lookahead=LOOKAHEAD)

    def one_round():
        fan_out.observe(None, 2, LOOKAHEAD, 3)
        return fan_out.allocate(None, BUDGET, LOOKAHEAD)

    assert sum(benchmark(one_round)) == BUDGET


@pytest.mark.parametrize("vocab", VOCAB)
def test_guesses(benchmark, vocab):
    logits, draft = drafted(VOCAB[vocab], 0.0)
    fan_out = geometric(BUDGET, LOOKAHEAD, 0.8, 1.0)
    benchmark.extra_info.update(vocab=VOCAB[vocab], budget=BUDGET)
    assert len(benchmark(guesses, logits, draft.tokens.tolist(), fan_out)) == BUDGET


def test_cache_lookup(benchmark):
    cache = SpeculationCache[int](BUDGET)
    for rank in range(BUDGET):
        cache.insert(Outcome(rank % (LOOKAHEAD + 1), rank), rank)
    benchmark.extra_info.update(outcomes=BUDGET)

    def hit_and_miss():
        return cache.lookup(Outcome(3, 8)), cache.lookup(Outcome(3, 9))

    assert benchmark(hit_and_miss) == (8, None)


def _echo(connection, core: int) -> None:
    """The other process: answers until its peer is gone."""
    os.sched_setaffinity(0, {core})
    channel = Channel(connection)
    while (message := channel.receive()) is not None:
        channel.send(message)


@pytest.mark.parametrize("floats", [0, 8 * 16_384])
def test_channel_round_trip(benchmark, one_core, floats):
    """A message to another process and back; with `floats` written to shared memory before it."""
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    shared, values = share(max(floats, 1)), torch.randn(max(floats, 1))
    process = context.Process(target=_echo, args=(theirs, min(one_core)), daemon=True)
    process.start()
    theirs.close()
    channel = Channel(ours, process.sentinel)
    benchmark.extra_info.update(floats=floats)

    def round_trip():
        if floats:
            shared.copy_(values)
        channel.send(Outcome(2, 7))
        return channel.receive(60)

    assert round_trip() == Outcome(2, 7)  # the other process is up
    benchmark(round_trip)
    channel.send(None)
    process.join(10)
    channel.close()


@pytest.mark.parametrize("tokens", [1, 5])
def test_kv_gather(benchmark, model, tokens):
    """A hit: the chosen branch's cells behind the trunk; tokens lie BUDGET cells apart."""
    name, loaded = model
    cache = prefilled(loaded, tokens * BUDGET + 1)
    cells = [CONTEXT + 1 + BUDGET * i for i in range(tokens)]
    benchmark.extra_info.update(model=name, tokens=tokens, cache_bytes=cache.bytes)

    def gather():
        cache.truncate(0, CONTEXT)
        cache.gather(0, cells)

    benchmark(gather)
    assert cache.lengths == [CONTEXT + tokens]
