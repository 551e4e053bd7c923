"""The process of every method that drafts beside the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.decoder import ChannelName
from harness.errors import DraftProcessError
from impl.engine.device_process import DeviceProcess, WorkerFactory


class DraftProcess(DeviceProcess):
    """A handle on the draft, which is ready when this is built."""

    error = DraftProcessError

    def __init__(
        self,
        factory: WorkerFactory,
        arguments: Sequence[Any],
        cores: Sequence[int],
        channel: ChannelName = "shared",
    ) -> None:
        """See `DeviceProcess`. Raises `DraftProcessError` when the draft cannot start."""
        super().__init__("draft process", factory, arguments, cores, channel)
        self.wait_until_ready()
