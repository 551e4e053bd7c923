"""Which backup drafts after a miss: the draft model just in time, or something that costs nothing.

`neural` drafts with the model while the target waits. `fast` continues an n-gram of the sequence's
own text, else repeats its last token: point masses, ready at once, less often accepted. The
adaptive choice follows the predicted speeds; the more sequences share a round, the more often one
of them misses and the dearer a wait becomes, until at b* the fast one wins. It repeats no token:
where the text has no n-gram to continue, and no wait is worth it, nothing is drafted.
"""

from __future__ import annotations

from typing import Literal

from harness.decoder import CacheOutcome
from impl.ssd.theory import Backup, SpeedInputs, critical_batch_size

BackupName = Literal["neural", "fast"]

_SMOOTHING = 0.1  # weight of the newest observation in a running mean


class _Mean:
    """Exponential running mean with a prior."""

    def __init__(self, prior: float) -> None:
        self.value = prior

    def add(self, value: float) -> None:
        self.value += _SMOOTHING * (value - self.value)


class AdaptiveFallback:
    """Chooses the backup by the speed formula, from what the run has measured so far."""

    def __init__(self) -> None:
        self._hit_rate = _Mean(0.7)
        self._tokens_on_hit = _Mean(3.0)
        self._tokens: dict[BackupName, _Mean] = {"neural": _Mean(3.0), "fast": _Mean(1.3)}
        self._neural_time = _Mean(0.5)  # in verifications

    def observe(
        self, after: CacheOutcome | None, backup: BackupName | None, emitted: int, missed: bool
    ) -> None:
        """Learns from one verification.

        Args:
            after: where the verified draft came from.
            backup: what had drafted it after a miss.
            emitted: tokens that its verification emitted.
            missed: whether this verification's own outcome was a miss.
        """
        self._hit_rate.add(0.0 if missed else 1.0)
        if after is CacheOutcome.HIT:
            self._tokens_on_hit.add(emitted)
        elif backup is not None:
            self._tokens[backup].add(emitted)

    def observe_backup_time(self, verifications: float) -> None:
        """Learns how long the neural backup took, in units of one verification."""
        self._neural_time.add(verifications)

    def critical_batch_size(self, found: bool = True) -> float:
        """b*, from which on the fast backup is predicted to be faster.

        Args:
            found: whether it has an n-gram to continue; without one it brings the target's token.
        """
        inputs = SpeedInputs(
            hit_rate=self._hit_rate.value,
            tokens_on_hit=self._tokens_on_hit.value,
            build_time=1.0,
            backup=Backup(self._tokens["neural"].value, self._neural_time.value),
        )
        tokens = self._tokens["fast"].value if found else 1.0
        return critical_batch_size(inputs, Backup(tokens, 0.0))

    def choose(self, batch_size: int, found: bool) -> BackupName:
        """The backup of a sequence that missed, in a round of `batch_size` sequences."""
        return "fast" if batch_size >= self.critical_batch_size(found) else "neural"
