"""Models that agree as often as a coin says (`--acceptance synthetic:RATE`).

Every pass really runs; then the logits of a few tokens are raised above all others, so that the
target's next token, and its place in the draft's ranking, are those of a made-up text:

    at output position n the text goes on with letter x_n
    the target   has x_n on top
    the draft    has x_n on top where the coin of n shows heads (chance `rate`): it is accepted
                 else has another letter on top, which is rejected, and x_n behind it, at rank j
                 among the guesses that are left: P(j > F) = (1 + F)^-exponent

Letters, coins and ranks are a function of (seed, prompt, n) alone, so all methods, and target and
draft in their two processes, see the same luck at the same position. Nothing else is replaced:
drafting, trees, caches, messages and verification run as they are, at any temperature.

The raised logits lie so far apart that at temperature 1 a draw is the top one but for 6e-6. So a
draft's confidence tells nothing of what will be accepted, as if every token were as hard.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from impl.engine.device import upload
from impl.engine.kv_cache import KVCache
from impl.engine.language_model import LanguageModel
from impl.engine.model_wrapper import ModelWrapper
from impl.engine.randomness import RandomStream, Role
from impl.engine.token_batch import TokenBatch

GUESSES = 64  # ranks of a draft's guesses that are raised; a text's letter beyond is nowhere
_TOP, _STEP = 1e4, 12.0  # logits: far above what any model says, and between two ranks
_BLOCK = 256  # output positions that are drawn at once


class Coin(NamedTuple):
    """What decides which tokens agree.

    Attributes:
        rate: chance that a drafted token is accepted, given those before it were.
        exponent: r of the rank of a token that was not drafted (`impl.ssd.fan_out`).
        seed: of the run.
        letters: target ids that texts are made of, all of them in the draft's head too.
        role: whose logits are raised.
    """

    rate: float
    exponent: float
    seed: int
    letters: Sequence[int]
    role: Literal["target", "draft"]


class Text:
    """A made-up output and its luck.

    Attributes:
        start: tokens of the prompt.
        letters: int64 [n], index into `Coin.letters` of each output position drawn so far.
        ranks: int64 [n], the letter's place in the draft's ranking, from 0: the coin's heads.
    """

    def __init__(self, coin: Coin, cached: Sequence[int]) -> None:
        """Args: `cached` is the prompt but for its last token, as it is prefilled."""
        name = blake2b(np.array(cached, dtype=np.int64).tobytes(), digest_size=16).hexdigest()
        self.start = len(cached) + 1
        self.letters = np.zeros(0, dtype=np.int64)
        self.ranks = np.zeros(0, dtype=np.int64)
        self._coin = coin
        self._stream = RandomStream(coin.seed, f"text/{name}")

    def reach(self, length: int) -> None:
        """Draws letters and ranks up to `length` output positions at least."""
        while len(self.letters) < length:
            drawn = self._stream.uniforms(Role.TEXT, len(self.letters), 3 * _BLOCK)
            letter, coin, rank = drawn.reshape(3, _BLOCK)
            size = len(self._coin.letters)
            self.letters = np.append(self.letters, (letter * size).astype(np.int64))
            behind = np.where(coin < self._coin.rate, 0, ranks(rank, self._coin.exponent))
            self.ranks = np.append(self.ranks, behind)


def ranks(uniforms: NDArray[np.float64], exponent: float) -> NDArray[np.int64]:
    """1-based ranks j with P(j > F) = (1 + F)^-exponent; those beyond `GUESSES` are equal.

    Args:
        uniforms: in [0, 1).
        exponent: r; 0 puts every rank beyond.
    """
    with np.errstate(divide="ignore", over="ignore"):
        found = np.floor(uniforms ** np.divide(-1.0, exponent))
    return np.asarray(np.minimum(found, GUESSES + 1), dtype=np.int64)


class SyntheticModel(ModelWrapper):
    """See the module docstring."""

    def __init__(self, model: LanguageModel, coin: Coin) -> None:
        super().__init__(model)
        self._coin = coin
        self._texts: WeakKeyDictionary[KVCache, dict[int, Text]] = WeakKeyDictionary()  # by slot
        ids = torch.tensor(coin.letters, dtype=torch.int64)
        columns = ids if model.head_ids is None else torch.searchsorted(model.head_ids.cpu(), ids)
        self._columns = columns.numpy()  # where the letters' logits are
        raised = 1 if coin.role == "target" else min(GUESSES, len(ids) - 1)
        self._places = np.arange(raised)
        self._values = (_TOP - _STEP * torch.arange(raised)).to(model.device)

    def prefill(self, cache: KVCache, slot: int, tokens: Sequence[int]) -> None:
        """See `LanguageModel`; begins the text of this prompt."""
        self.model.prefill(cache, slot, tokens)
        self._texts.setdefault(cache, {})[slot] = Text(self._coin, tokens)

    @torch.inference_mode()
    def forward(
        self, batch: TokenBatch, cache: KVCache, rows: torch.Tensor | slice = slice(None)
    ) -> torch.Tensor:
        """See `LanguageModel`; logits behind slots without a prompt are the model's own."""
        columns = self._raised(batch, cache)[rows]
        logits = self.model.forward(batch, cache, rows)
        known = (columns[:, 0] >= 0).nonzero()
        where = upload(known, self.device), upload(columns[known[:, 0]], self.device)
        return logits.index_put_(where, self._values.to(logits.dtype))

    def _raised(self, batch: TokenBatch, cache: KVCache) -> torch.Tensor:
        """Columns of each row's raised logits, best first: int64 [N, raised]; -1: none."""
        texts = self._texts.get(cache, {})
        positions = batch.positions.numpy()
        columns = np.full((len(positions), len(self._places)), -1)
        first = 0
        for segment in batch.segments:
            own = slice(first, first + segment.count)
            if (text := texts.get(segment.slot)) is not None:
                columns[own] = self._ranking(text, positions[own] + 1 - text.start)
            first += segment.count
        return torch.from_numpy(columns)

    def _ranking(self, text: Text, output: NDArray[np.int64]) -> NDArray[np.int64]:
        """Columns of the tokens at these output positions, best first: int64 [n, raised].

        The guesses beside a letter are those that follow it in the alphabet.
        """
        output = np.maximum(output, 0)  # rows within the prompt, whose logits nobody reads
        text.reach(int(output.max()) + 1)
        place = text.ranks[output][:, None] if self._coin.role == "draft" else 0
        before = self._places + 1
        ahead = np.where(self._places < place, before, before - 1)
        letters = np.where(self._places == place, 0, ahead) + text.letters[output][:, None]
        return np.asarray(self._columns[letters % len(self._columns)])
