"""Synthetic acceptance against closed forms, with decoders in this process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from fixed_logits import Counting, FixedLogits, FixedLogitSpec, Log, Pair, decode, emitted

from harness.decoder import CacheOutcome, Request, SamplingParams
from impl.engine.kv_cache import KVCache
from impl.engine.models import Models
from impl.engine.synthetic_model import GUESSES, Coin, SyntheticModel, Text, ranks
from impl.engine.token_batch import TokenBatch

VOCAB, RATE, LOOKAHEAD, TOKENS, REQUESTS = 24, 0.8, 4, 100, 16
COIN = Coin(RATE, 1.0, 7, range(VOCAB), "target")
METHODS = ("sd", "ssd", "tree", "amusd", "pearl")
SIGMAS = 4.0  # of a seeded count: 6e-5 of right programs would fail


class Blank(FixedLogits):
    """Says nothing and looks at nothing, which is quick."""

    def prefill(self, cache: KVCache, slot: int, tokens: Sequence[int]) -> None:
        cache.truncate(slot, len(tokens))

    def forward(
        self, batch: TokenBatch, cache: KVCache, rows: torch.Tensor | slice = slice(None)
    ) -> torch.Tensor:
        return torch.zeros(len(batch.positions[rows]), self.vocabulary)


@dataclass(frozen=True)
class CoinSpec(FixedLogitSpec):
    """A model whose agreement is a coin's."""

    coin: Coin = COIN
    model: type[FixedLogits] = Blank

    def load(self) -> SyntheticModel:  # type: ignore[override]
        return SyntheticModel(self.model(self.rule, self.vocab, self.head_ids()), self.coin)


def pair(
    coin: Coin = COIN,
    head: tuple[int, ...] = (),
    model: type[FixedLogits] = Blank,
    **settings: Any,
) -> Pair:
    target, draft = Counting(VOCAB), Counting(VOCAB, step=5)  # which by themselves never agree
    models = Models(
        CoinSpec(target, VOCAB, coin=coin, model=model),  # type: ignore[arg-type]
        CoinSpec(draft, VOCAB, head, coin=coin._replace(role="draft"), model=model),  # type: ignore[arg-type]
    )
    return Pair(models, max_context=TOKENS + 16, **settings)


def requests(
    temperature: float = 0.0, count: int = REQUESTS, tokens: int = TOKENS
) -> list[Request]:
    sampling = SamplingParams(temperature, seed=3)
    return [Request(f"r{i}", (1, i, 2), tokens, sampling) for i in range(count)]


def run(
    method: str, asked: list[Request] | None = None, lookahead: int = LOOKAHEAD, **settings: Any
) -> Log:
    with pair(**settings).open(method, lookahead) as decoder:
        return decode(decoder, asked or requests())


def within(successes: float, trials: int, chance: float) -> bool:
    """Whether a binomial count is within its interval."""
    return abs(successes - trials * chance) <= SIGMAS * math.sqrt(trials * chance * (1 - chance))


def judged(log: Log) -> dict[tuple[str, int], bool]:
    """Whether the token drafted for (request, output position) was accepted, where one was."""
    found = {}
    for name, rounds in log.items():
        position = 0
        for round_ in rounds:
            for i in range(min(round_.accepted + 1, round_.drafted)):
                found[name, position + i] = i < round_.accepted
            position += len(round_.tokens)
    return found


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_ranks_follow_the_power_law(exponent):
    found = ranks((np.arange(100_000) + 0.5) / 100_000, exponent)  # an even grid: no chance in it
    for guesses in (0, 1, 2, 7, GUESSES):
        share = (found > guesses).mean()
        assert share == pytest.approx((1 + guesses) ** -exponent, abs=2e-5)


def test_an_exponent_of_zero_puts_every_rank_beyond():
    assert ranks(np.array([0.0, 0.5, 0.999]), 0.0).tolist() == [GUESSES + 1] * 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_a_round_are_those_of_the_closed_form(temperature):
    log = run("sd", requests(temperature))
    full = [r.accepted for rounds in log.values() for r in rounds if r.drafted == LOOKAHEAD]
    emitted_chances = [RATE**k * (1 - RATE) for k in range(LOOKAHEAD)] + [RATE**LOOKAHEAD]
    mean = (1 - RATE ** (LOOKAHEAD + 1)) / (1 - RATE)
    square = sum(p * (k + 1) ** 2 for k, p in enumerate(emitted_chances))
    error = math.sqrt((square - mean**2) / len(full))
    assert len(full) > 300
    assert np.mean(full) + 1 == pytest.approx(mean, abs=SIGMAS * error)
    decided = judged(log)
    assert within(sum(decided.values()), len(decided), RATE)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_coin_of_one_side(rate):
    log = run("sd", requests(count=1), coin=COIN._replace(rate=rate))
    assert {r.accepted == r.drafted * rate for rounds in log.values() for r in rounds} == {True}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_method_sees_the_same_text(method, batch_size, temperature):
    asked = requests(temperature, count=4, tokens=30)
    plain = emitted(run("ar", asked, model=FixedLogits))  # which checks every cell that it sees
    assert emitted(run(method, asked, batch_size=batch_size, model=FixedLogits)) == plain
    assert len(set(plain.values())) == 4
    assert {len(text) for text in plain.values()} == {30}


def test_every_method_has_the_same_luck_at_the_same_position():
    asked = requests(count=2)
    logs = [run(method, asked) for method in ("sd", "ssd", "amusd", "pearl")]
    first, *others = [judged(log) for log in (*logs, run("sd", asked, lookahead=2))]
    for other in others:
        common = first.keys() & other.keys()
        assert len(common) > 50
        assert all(first[at] == other[at] for at in common)


def test_hits_are_those_of_the_stated_ranks():
    # K = 2, two guesses for each of three outcomes. Behind a rejected token one of two ranks is a
    # hit with 1 - 1/3; the bonus token is the draft's first choice when its coin says so, else its
    # second with 1 - 1/2.
    with pair().ssd(lookahead=2, budget=6, fan_out="uniform") as decoder:
        log = decode(decoder, requests(count=10))
    looked = [
        after.cache is CacheOutcome.HIT
        for rounds in log.values()
        for before, after in pairwise(rounds)
        if before.drafted == 2
    ]
    whole = RATE**2
    chance = (1 - whole) * (2 / 3) + whole * (RATE + (1 - RATE) / 2)
    assert len(looked) > 250
    assert within(sum(looked), len(looked), chance)


def test_a_trees_sibling_is_the_next_rank():
    decoder = pair().tree(shape=(2,))
    log = decode(decoder, requests())
    rounds = [r for own in log.values() for r in own if r.drafted == 2]
    assert within(sum(r.accepted for r in rounds), len(rounds), RATE + (1 - RATE) / 2)


def test_a_trimmed_head_has_every_letter():
    head = tuple(range(1, VOCAB, 2))
    log = run("sd", coin=COIN._replace(letters=head), head=head)
    decided = judged(log)
    assert within(sum(decided.values()), len(decided), RATE)
    assert {token for text in emitted(log).values() for token in text} <= set(head)


def test_a_text_is_its_prompts_and_its_seeds():
    def letters(prompt: list[int], coin: Coin = COIN) -> list[int]:
        text = Text(coin, prompt)
        text.reach(300)
        return text.letters[:300].tolist()

    assert letters([1, 2]) == letters([1, 2])
    assert letters([1, 2]) != letters([1, 3])
    assert letters([1, 2]) != letters([1, 2], COIN._replace(seed=8))
    text = Text(COIN, [1, 2])
    text.reach(1)  # block by block or at once
    text.reach(300)
    assert text.letters[:300].tolist() == letters([1, 2])


def test_slots_without_a_prompt_keep_the_models_own_logits():
    model = CoinSpec(Counting(VOCAB), VOCAB, model=FixedLogits).load()
    cache = model.new_cache(2, 8)
    model.prefill(cache, 1, [3])
    batch = TokenBatch.causal([(0, 0, [3]), (1, 1, [4])])
    own, raised = model.forward(batch, cache)
    assert own.tolist() == model.model.forward(batch, cache)[0].tolist()
    assert raised.max() == 1e4


def test_raised_logits_are_ranked_apart():
    coin = COIN._replace(role="draft", rate=0.0, exponent=1.0)
    model = SyntheticModel(FixedLogitSpec(Counting(VOCAB), VOCAB).load(), coin)
    cache = model.new_cache(1, 64)
    model.prefill(cache, 0, [3])
    text = Text(coin, [3])
    text.reach(40)
    batch = TokenBatch.causal([(0, 1, [4] * 40)])
    for position, row in enumerate(model.forward(batch, cache)):
        order = row.argsort(descending=True).tolist()
        assert len(set(row.tolist())) == VOCAB
        wanted, rank = int(text.letters[position]), int(text.ranks[position])
        assert order[0] != wanted
        if rank < VOCAB - 1:
            assert order.index(wanted) == rank
