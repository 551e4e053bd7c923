"""A run directory as a record: every figure from one pass over its two tables."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from harness.checks import verified
from harness.fingerprint import identity
from harness.metrics import CELL_COLUMNS, cell_of
from harness.plan import BASELINE, Cell
from harness.statistics import Estimate
from harness.summary import BASELINES
from reports import intervals, provenance
from reports.dashboard.records import Group, Observation, Record

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from harness.store import RunData

_FOLLOWED = ("finished", "failed")  # a run that is still measured is listed, not followed
# Settings of a run file beside the prompts that make its figures incomparable with another's.
_WORKLOAD = ("max_new_tokens", "max_context", "top_k", "top_p", "raw", "system")
_MS, _S = 1e6, 1e9  # nanoseconds


class _Totals(NamedTuple):
    """What each prompt of a cell cost, its repeats added up: arrays of shape (prompts,)."""

    seconds: NDArray[np.float64]
    tokens: NDArray[np.float64]
    rounds: NDArray[np.float64]
    hits: NDArray[np.float64]
    looked: NDArray[np.float64]


_COLUMNS = ("share_ns", "output_tokens", "rounds", "hits", "looked")  # of `_Totals`
_UNITS = np.array([[_S], [1.0], [1.0], [1.0], [1.0]])


@dataclass(frozen=True)
class _Costs:
    """The requests of a cell.

    Attributes:
        items, requests: ids, shape (requests,).
        prompts: prompt indices, shape (requests,).
        amounts: `_COLUMNS` of each, shape (5, requests).
        tpot_ms: of those that have one.
    """

    items: NDArray[np.object_]
    requests: NDArray[np.object_]
    prompts: NDArray[np.int64]
    amounts: NDArray[np.float64]
    tpot_ms: NDArray[np.float64]

    @classmethod
    def of(cls, table: pd.DataFrame) -> _Costs:
        """From rows of requests.parquet joined with the totals of their rounds."""
        amounts = np.stack([table[name].to_numpy(np.float64) for name in _COLUMNS]) / _UNITS
        tpot = table["tpot_ns"].to_numpy(np.float64) / _MS
        return cls(
            items=table["item"].to_numpy(object),
            requests=table["request_id"].to_numpy(object),
            prompts=table["prompt_index"].to_numpy(np.int64),
            amounts=amounts,
            tpot_ms=tpot[~np.isnan(tpot)],
        )

    def by_prompt(self, only: Collection[str] | None = None) -> _Totals:
        """Totals by prompt index, of all requests or of those named."""
        kept = np.array([only is None or name in only for name in self.requests], dtype=bool)
        prompts, place = np.unique(self.prompts[kept], return_inverse=True)
        totals = np.zeros((len(_COLUMNS), len(prompts)))
        np.add.at(totals.T, place, self.amounts[:, kept].T)
        return _Totals(*totals)


def run_record(run: RunData, key: str, source: str) -> Record:
    """The record of a run as read back."""
    manifest = run.manifest
    git = manifest.get("git") or {}
    cells = {cell: costs for cell, costs in _cells(run) if _complete(manifest, cell, costs)}
    followed = manifest.get("status") in _FOLLOWED
    shown = [cell for cell in cells if not cell.control and not _degraded(manifest, cell)]
    return Record(
        key=key,
        source=source,
        kind="run",
        created=str(manifest.get("created") or ""),
        status=str(manifest.get("status")),
        revision=str(git["revision"]) if git.get("revision") else None,
        dirty=bool(git.get("dirty")),
        group=_group(manifest),
        methods=tuple(sorted({cell.method for cell in cells})),
        lossless=_lossless(manifest, shown),
        failures=len(manifest.get("failures") or ()),
        observations=tuple(
            observation
            for cell in (shown if followed else ())
            for observation in _observations(cell, cells, manifest)
        ),
    )


def group_key(fields: Mapping[str, Any]) -> str:
    """A digest of the fields that comparable sources have in common."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


def _group(manifest: Mapping[str, Any]) -> Group:
    pair = manifest.get("pair") or {}
    weights = {
        f"{role}.{field}": (pair.get(role) or {}).get(field)
        for role in ("target", "draft")
        for field in ("sha256", "dtype", "operators")
    }
    rest = {field: pair.get(field) for field in ("engine", "draft_vocab", "draft_quantization")}
    name = provenance.pair_name(manifest)
    fields = {**identity(manifest.get("fingerprint") or {}), "pair": name, **weights, **rest}
    return Group(group_key(fields), provenance.machine_name(manifest), name, fields)


def _lossless(manifest: Mapping[str, Any], cells: list[Cell]) -> dict[str, int]:
    names = {True: "passed", False: "failed", None: "unverified"}
    found = [names[verified(manifest, cell)] for cell in cells]
    return {name: found.count(name) for name in names.values()}


def _degraded(manifest: Mapping[str, Any], cell: Cell) -> bool:
    decoder = (manifest.get("decoders") or {}).get(cell.id, {})
    return bool((decoder.get("diagnostics") or {}).get("degraded"))


def _complete(manifest: Mapping[str, Any], cell: Cell, costs: _Costs) -> bool:
    """Whether every planned item of the cell is stored: others are on fewer prompts."""
    planned = {item for item in manifest.get("plan") or () if item.startswith(f"{cell.id}/")}
    return planned <= set(costs.items)


def _cells(run: RunData) -> Iterator[tuple[Cell, _Costs]]:
    rounds = run.rounds
    per_request = (
        rounds[["item", "request_id"]]
        .assign(
            share_ns=(rounds["end_ns"] - rounds["start_ns"]) / rounds["live"],
            rounds=1,
            hits=rounds["cache"] == "hit",
            looked=rounds["cache"].notna(),
        )
        .groupby(["item", "request_id"])
        .sum()
    )
    table = run.requests.join(per_request, on=["item", "request_id"])
    for _, own in table.groupby(CELL_COLUMNS):
        yield cell_of(own), _Costs.of(own)


def _observations(
    cell: Cell, cells: Mapping[Cell, _Costs], manifest: Mapping[str, Any]
) -> Iterator[Observation]:
    setting, noise = _setting(cell, cells[cell], manifest), _noise(cell, cells)
    for metric, estimate in _estimates(cell, cells).items():
        if estimate is not None and estimate.value is not None:
            yield Observation(setting, cell.method, metric, estimate, noise)


def _estimates(cell: Cell, cells: Mapping[Cell, _Costs]) -> dict[str, Estimate | None]:
    own, ratio = cells[cell].by_prompt(), intervals.product_of_ratios
    drafts, looked = cell.method != BASELINE, bool(own.looked.sum())
    return {
        "tokens_per_s": ratio([own.tokens], [own.seconds]),
        **{f"over_{name}": _over(cell, name, cells) for name in BASELINES if name != cell.method},
        "tpot_ms": intervals.median(cells[cell].tpot_ms),
        "acceptance_length": ratio([own.tokens], [own.rounds]) if drafts else None,
        "hit_rate": ratio([own.hits], [own.looked]) if looked else None,
    }


def _over(cell: Cell, baseline: str, cells: Mapping[Cell, _Costs]) -> Estimate | None:
    """The speedup over a baseline on the requests that both finished."""
    other = cells.get(Cell(baseline, cell.dataset, cell.temperature, cell.batch_size))
    if other is None:
        return None
    common = set(cells[cell].requests) & set(other.requests)
    ours, theirs = (costs.by_prompt(common) for costs in (cells[cell], other))
    return intervals.product_of_ratios([theirs.seconds, ours.tokens], [theirs.tokens, ours.seconds])


def _noise(cell: Cell, cells: Mapping[Cell, _Costs]) -> float | None:
    """How far from 1 the interval of the A/A control reaches; None without one."""
    control = Cell(BASELINE, cell.dataset, cell.temperature, cell.batch_size, control=True)
    found = _over(control, BASELINE, cells) if control in cells else None
    if found is None or found.low is None or found.high is None:
        return None
    return max(abs(1 - found.low), abs(found.high - 1))


def _setting(cell: Cell, costs: _Costs, manifest: Mapping[str, Any]) -> str:
    """In words, with a digest of everything else that decides how much work the cell is."""
    config = manifest.get("config") or {}
    dataset = (manifest.get("datasets") or {}).get(cell.dataset) or {}
    indices = sorted(set(costs.prompts.tolist()))
    workload = {
        "prompts": dataset.get("ids_sha256") or dataset.get("sha256"),
        "indices": indices,
        **{field: config.get(field) for field in _WORKLOAD},
    }
    limit = config.get("max_new_tokens")
    words = [
        cell.dataset,
        f"temperature {cell.temperature:g}",
        f"batch size {cell.batch_size}",
        f"{len(indices)} prompts",
        *([f"up to {limit} tokens"] if limit else []),
        f"workload {group_key(workload)[:6]}",
    ]
    return ", ".join(words)
