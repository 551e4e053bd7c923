"""What measuring a work item leaves behind: rows of two tables. Knows no clock and no file."""

from __future__ import annotations

from dataclasses import dataclass

from harness.plan import WorkItem


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A row of requests.parquet; the columns are explained in docs/run-directory.md."""

    item: str
    method: str
    dataset: str
    category: str
    control: bool
    temperature: float
    batch_size: int
    repeat: int
    block: int
    request_id: str
    prompt_index: int
    prompt_tokens: int
    output_tokens: int
    output_ids: tuple[int, ...]
    finish: str
    prefill_ns: int
    ttft_ns: int
    decode_ns: int
    tpot_ns: float | None


@dataclass(frozen=True, slots=True)
class SpanRow:
    """A span, relative to the item's first step."""

    kind: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class RoundRow:
    """A row of rounds.parquet; the columns are explained in docs/run-directory.md."""

    item: str
    request_id: str
    step: int
    round: int
    start_ns: int
    end_ns: int
    live: int
    emitted: int
    drafted: int
    accepted: int
    cache: str | None
    backup: str | None
    guesses: int | None
    hit_chance: float | None
    rank: int | None
    draft_ns: int
    verify_ns: int
    wait_ns: int
    transfer_ns: int
    speculate_ns: int
    spans: tuple[SpanRow, ...]


@dataclass(frozen=True, slots=True)
class SkippedRequest:
    """A request that the decoder refused, with its reason."""

    request_id: str
    dataset: str
    reason: str


@dataclass(frozen=True, slots=True)
class ItemResult:
    """Everything measured in one work item."""

    item: WorkItem
    requests: tuple[RequestRow, ...]
    rounds: tuple[RoundRow, ...]
    skipped: tuple[SkippedRequest, ...]

    @property
    def tokens(self) -> int:
        """Tokens emitted in the item."""
        return sum(row.emitted for row in self.rounds)

    @property
    def decode_ns(self) -> int:
        """Total duration of the item's steps, each counted once however many sequences it had."""
        return sum({row.step: row.end_ns - row.start_ns for row in self.rounds}.values())
