"""Measures a profile on this machine: SSD's own calibration of both models, and a message's way.

The decoder comes from the pool that measures runs, so models, placement and warm-up are a run's.
Passes are timed as SSD times them (`impl.ssd.calibration`): the quickest of a few, over sizes that
verification and drafting have, each model alone and beside the other.
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

from harness.config import RunConfig
from harness.decoder import Placement
from harness.decoder_pool import DecoderPool
from harness.errors import UsageError
from harness.fingerprint import fingerprint
from harness.preparation import check_methods, prepare, resolve_methods
from harness.progress import Progress
from harness.simulation.profile import MeasuredFile, Table

if TYPE_CHECKING:
    from impl.engine.channel import Channel
    from impl.engine.draft_process import DraftProcess
    from impl.ssd.budgeting import Costs, PassTimes

_METHOD = "ssd"
_MESSAGES = 200


def measure_profile(config: RunConfig, progress: Progress) -> MeasuredFile:
    """Loads the config's pair, times its passes and closes everything.

    Args:
        config: pair, placement, dtype and one batch size; its methods and datasets do not matter.
        progress: told what happens.

    Raises:
        UsageError: several batch sizes, or a pair without a draft.
        HarnessError: models that cannot be had, or a draft process that fails.
    """
    if len(config.batch_sizes) != 1:
        raise UsageError("batch_sizes: a profile has one; give one size")
    settings = {
        "methods": (_METHOD,), "options": {}, "datasets": ("mini",), "prompts": 1,
        "temperatures": config.temperatures[:1], "control": False, "tuned": False,
        "deterministic": False, "placement": config.placement.with_one_draft(),
    }  # fmt: skip
    config = config.model_copy(update=settings)
    check_methods(config)
    costs = _costs(config, progress)
    return MeasuredFile(
        kind="measured",
        pair=config.pair or f"{config.target} + {config.draft}",
        machine=_machine(config),
        target_devices=len(config.placement.target_devices),
        draft_devices=1,
        transfer_us=1e6 * transfer_seconds(config.placement),
        context=_context(),
        verify_idle=_table(costs.verify_idle),
        verify_loaded=_table(costs.verify_loaded),
        draft_idle=_table(costs.draft_idle),
        draft_loaded=_table(costs.draft_loaded),
    )


def _costs(config: RunConfig, progress: Progress) -> Costs:
    """What the decoder of a run would calibrate itself with."""
    from impl.engine import placement
    from impl.ssd.decoder import SaguaroDecoder

    prepared = prepare(config, progress)
    config = prepared.config
    with placement.applied(config.placement.rank_cores(0)):
        workload = prepared.workload()
        methods = resolve_methods(config)
        pool = DecoderPool(methods, prepared.models(), workload, config, placement.apply)
        try:
            decoder = pool.get(workload.cells[0])
            if not isinstance(decoder, SaguaroDecoder) or decoder.costs is None:
                raise UsageError(f"methods: {_METHOD} of this installation calibrates no passes")
            return decoder.costs
        finally:
            pool.close()


class Echo:
    """A worker that sends every message back; needs no model."""

    def serve(self, channel: Channel) -> None:
        """See `impl.engine.device_process.Worker`."""
        from impl.engine.device_process import Close

        while not isinstance(message := channel.receive(), Close):
            channel.send(message)


def transfer_seconds(where: Placement) -> float:
    """Median time of a small message to the draft's process and back."""
    from impl.engine.draft_process import DraftProcess

    process = DraftProcess(Echo, (), where.draft_cores, where.channel)
    try:
        return median(_round_trip(process) for _ in range(_MESSAGES))
    finally:
        process.close()


def _round_trip(process: DraftProcess) -> float:
    begin = time.perf_counter()
    process.send(("token", 1))
    process.receive()
    return time.perf_counter() - begin


def _table(times: PassTimes) -> Table:
    return Table(tokens=times.tokens, seconds=times.seconds)


def _context() -> int:
    from impl.ssd.calibration import CONTEXT

    return CONTEXT


def _machine(config: RunConfig) -> str:
    found = fingerprint(config.placement)
    cores = found["placement"]
    where = f"target cores {cores['target_cores']}, draft cores {cores['draft_cores']}"
    return f"{found['cpu']['model']}, {where}, load average {found['load_average']}"
