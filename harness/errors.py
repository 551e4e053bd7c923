"""The error tree of the project: everything a user can cause or must be told about.

The command line prints the message of a `HarnessError` as one line and exits with its `exit_code`;
anything else is a bug and keeps its traceback.
"""

from __future__ import annotations


class HarnessError(Exception):
    """Base class; the message names the field at fault and the fix, in one line."""

    exit_code = 1


class UsageError(HarnessError):
    """The command, an option or a run file is wrong (exit 2)."""

    exit_code = 2


class ModelError(HarnessError):
    """Weights, tokenizer or architecture that cannot be loaded or do not fit together."""


class DatasetError(HarnessError):
    """A dataset that is absent, altered or malformed."""


class HubError(HarnessError):
    """The Hugging Face hub does not serve what is asked: unreachable, absent or gated."""


class RequestError(HarnessError):
    """One request that cannot be decoded (empty prompt, prompt longer than the context)."""


class DraftProcessError(HarnessError):
    """The draft worker died, hung or failed; ends the cell with this reason."""


class TargetRankError(HarnessError):
    """A process of a target on several devices died, hung or failed; ends the cell."""


class EndpointError(HarnessError):
    """A server that refused a request, broke its stream or cannot be counted; ends the cell."""


class WorkerError(HarnessError):
    """A worker process of a run died, hung or failed; ends its cells with this reason."""


class PlacementError(HarnessError):
    """Cores or threads of a process that are not as they were set; ends its cells."""


class NonFiniteLogitsError(HarnessError):
    """A model produced NaN or infinite logits."""


class StoreError(HarnessError):
    """A run directory that cannot be read, written or continued."""
