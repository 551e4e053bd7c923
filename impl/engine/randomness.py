"""Counter-based random numbers: a draw is a function of its key, never of what was drawn before.

Each (seed, request id, role, position, token before it) owns a stream. So a result depends neither
on the batch that a request shared nor on the order of the methods, and the draft's draws are
independent of the verifier's: a token judged by the very number that chose it would be biased.
"""

from __future__ import annotations

from enum import IntEnum
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray


class Role(IntEnum):
    """Who draws."""

    VERIFY = 0  # the target: acceptance, residual and bonus token
    DRAFT = 1  # the draft model
    TEXT = 2  # what a synthetic acceptance makes up


class RandomStream:
    """The random numbers of one request: Philox4x64-10 (Salmon et al., SC 2011), keyed by 128 bits.

    Holds a key and no state. The four counter words are (block, position, role, after), and one
    stream only advances the block, so two streams never overlap.
    """

    __slots__ = ("_key",)

    def __init__(self, seed: int, request_id: str) -> None:
        digest = blake2b(f"{seed}:{request_id}".encode(), digest_size=16).digest()
        self._key = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def uniforms(
        self, role: Role, position: int, count: int, after: int = 0
    ) -> NDArray[np.float64]:
        """The first `count` numbers in [0, 1) of the stream (role, position, after).

        A shorter call returns a prefix of a longer one.

        Args:
            role: who draws.
            position: index in the request's output of the first token that the draws decide.
            count: how many numbers.
            after: the token before that position, where several may stand there: each has a stream.

        Returns:
            float64 [count], multiples of 2^-53.
        """
        counter = np.array([0, position, role, after], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(counter=counter, key=self._key)).random(count)
