"""SSD/Saguaro (arXiv 2603.03251): the draft speculates for the outcomes of the verification.

A round of the target, for all live sequences together:

    receive the speculations for the last outcomes      (a hit is there already; a miss is drafted)
    verify them in one pass
    report the outcomes, so that the draft looks them up while the round is written down
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import replace

import torch

from harness.decoder import DecoderSetup, Round, Span, SpanKind
from impl.engine.asynchronous_decoder import AsynchronousDecoder
from impl.engine.draft_process import DraftProcess
from impl.engine.engine_decoder import settle
from impl.engine.sampling import Draft
from impl.engine.sequence import Sequence
from impl.ssd.budgeting import Costs
from impl.ssd.calibration import measure_costs
from impl.ssd.client import Received, SpeculationClient
from impl.ssd.messages import Speculation, TakeCosts
from impl.ssd.options import SaguaroOptions
from impl.ssd.replicas import Replica, ReplicatedClient
from impl.ssd.speculator import Speculator


class SaguaroDecoder(AsynchronousDecoder):
    """The target's half; the draft's half is `Speculator`, in a process on its own cores.

    On several devices of the draft there is a `Replica` each (`impl.ssd.replicas`).
    """

    name = "ssd"
    replicates_draft = True
    Options = SaguaroOptions
    options: SaguaroOptions
    draft: SpeculationClient

    def __init__(self, setup: DecoderSetup, options: SaguaroOptions) -> None:
        super().__init__(setup, options, rows=options.max_lookahead)
        self.processes: list[DraftProcess] = []
        try:
            for number in range(len(setup.placement.draft_devices)):
                self.processes.append(self._start_draft(number))
        except BaseException:  # also Ctrl-C: leave no process behind
            for process in self.processes:
                process.close()
            raise
        several = len(self.processes) > 1
        self.draft = (ReplicatedClient if several else SpeculationClient)(*self.processes)
        self.costs: Costs | None = None
        self._verified_s = self._as_timed_s = 0.0  # measured, and by the costs beside the draft
        timed = "auto" in (options.lookahead, options.budget) or options.build == "likeliest"
        if timed and not setup.deterministic:
            self.costs = self._calibrate()

    @classmethod
    def create(cls, setup: DecoderSetup) -> SaguaroDecoder:
        """See `Decoder.create`."""
        return cls(setup, SaguaroOptions.model_validate(setup.options.model_dump()))

    def step(self) -> list[Round]:
        """One round of every live sequence; see the module docstring."""
        live = self.slots.live()
        speculations, waiting = self.ask_draft(self.draft.receive, live) or _nothing(live)
        drafts = [self._draft_of(*pair) for pair in zip(live, speculations, strict=True)]
        outcomes, verifying = self.verifier.verify(live, drafts)
        self._compare(verifying, sum(len(draft.tokens) + 1 for draft in drafts))
        settled = [settle(*case) for case in zip(live, drafts, outcomes, strict=True)]
        self.ask_draft(self.draft.report, live, outcomes)  # first: the draft can go on
        reporting = Span(SpanKind.TRANSFER, verifying.end_ns, time.perf_counter_ns())
        return [
            replace(
                done,
                spans=(*waiting, verifying, reporting),
                cache=speculation.cache,
                backup=speculation.backup,
                guesses=speculation.guesses,
                hit_chance=speculation.hit_chance,
                rank=speculation.rank,
            )
            for done, speculation in zip(settled, speculations, strict=True)
        ]

    def diagnostics(self) -> Mapping[str, float | int | str]:
        """What this cell ran with: the plan and what passes cost, beside what every draft says."""
        facts = {**super().diagnostics(), "drafts": len(self.processes)}
        if (latest := self.draft.latest) is not None:
            facts["lookahead"], facts["budget"] = latest.lookahead, latest.budget
            facts["critical_batch_size"] = latest.critical_batch_size
        if self.costs is not None:
            size = self.setup.batch_size
            verified = ((latest.lookahead if latest else 4) + 1) * size
            facts["verify_idle_ms"] = 1e3 * self.costs.verify_idle.at(verified)
            facts["verify_loaded_ms"] = 1e3 * self.costs.verify_loaded.at(verified)
            facts["draft_pass_ms"] = 1e3 * self.costs.draft_idle.at(size)
        if self._as_timed_s:
            facts["verify_over_timed"] = self._verified_s / self._as_timed_s
        return facts

    def _compare(self, verifying: Span, tokens: int) -> None:
        if self.costs is not None:
            self._verified_s += (verifying.end_ns - verifying.start_ns) / 1e9
            self._as_timed_s += self.costs.verify_loaded.at(tokens)

    def _start_draft(self, number: int) -> DraftProcess:
        setup, devices = self.setup, self.setup.placement.draft_devices
        rest = (self.options, self.q_rows(number), setup.max_context, setup.deterministic)
        if len(devices) == 1:
            return self.start_process(Speculator, (self.draft_spec, *rest))
        spec = replace(self.draft_spec, device=devices[number])
        return self.start_process(Replica, (spec, *rest, number, len(devices)))

    def _calibrate(self) -> Costs:
        try:
            costs = measure_costs(
                self.verifier.target, self.verifier.cache, self.processes, self.setup.batch_size
            )
            for process in self.processes:
                process.send(TakeCosts(costs, self.setup.batch_size))
        except BaseException:  # also Ctrl-C: leave no process behind
            self.draft.close()
            raise
        return costs

    def _draft_of(self, sequence: Sequence, speculation: Speculation) -> Draft:
        tokens = speculation.tokens
        point_mass = sequence.request.sampling.temperature == 0 or speculation.backup == "fast"
        if point_mass or not tokens:
            return Draft(torch.tensor(tokens, dtype=torch.int64))
        return self.drawn(sequence, tokens, range(len(tokens)), speculation.replica)


def _nothing(live: List[Sequence]) -> Received:
    """What a draft that is gone contributes."""
    empty = [Speculation(s.request.request_id, (), None, None, 0, None, None) for s in live]
    return Received(empty, [])
