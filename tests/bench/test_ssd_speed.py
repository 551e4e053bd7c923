"""SSD beside SD and AR (`make bench-ssd`).

Ratios come from one interleaved `harness run` of configs/bench-ssd.yaml; the table at the end has
all of them, also where a target is missed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import geometric_mean

import pytest

from harness.config import load
from harness.errors import DatasetError
from harness.prompts import load_prompts
from harness.store import read_run
from harness.summary import summarise

CONFIG = Path(__file__).parents[2] / "configs" / "bench-ssd.yaml"
OVER_SD, OVER_AR, NEVER_BELOW_SD = 1.08, 1.8, 0.97
EFFICIENCY, WAIT_ON_HIT = 0.95, 0.02


@pytest.fixture(autouse=True)
def one_core():
    """In place of the one for the engine: here target and draft have a core each."""


@pytest.mark.slow  # an hour
def test_ssd_beside_sd_and_ar(benchmark, note, tmp_path):
    """Targets hold at temperature 0; temperature 1 is told beside it."""
    datasets, out = at_hand(note), tmp_path / "run"
    words = ["run", "--config", str(CONFIG), "--datasets", ",".join(datasets), "--out", str(out)]
    command = [sys.executable, "-c", "from harness.cli import main; main()", *words]
    benchmark.pedantic(lambda: subprocess.run(command, check=True), rounds=1)
    cells = [cell for cell in summarise(read_run(out))["cells"] if not cell["control"]]
    for cell in cells:
        note(describe(cell))
    for temperature in sorted({cell["temperature"] for cell in cells}):
        over_sd, over_ar = (over(cells, name, temperature) for name in ("sd", "ar"))
        note(
            f"temperature {temperature:g}, geometric means over {len(over_sd)} datasets: SSD is "
            f"{geometric_mean(over_sd):.3f}x SD, {geometric_mean(over_ar):.3f}x AR"
        )
    check([c for c in cells if (c["method"], c["temperature"]) == ("ssd", 0)])


def over(cells, baseline, temperature) -> list[float]:
    """SSD's speedups, one a dataset."""
    own = (c for c in cells if (c["method"], c["temperature"]) == ("ssd", temperature))
    return [cell["speedup"][baseline]["value"] for cell in own]


def check(cells):
    """The targets, all looked at before any fails."""
    over_sd, over_ar = (over(cells, name, 0) for name in ("sd", "ar"))
    figures = [cell["prediction"] for cell in cells]
    held = {
        f"geometric mean over SD at least {OVER_SD}": geometric_mean(over_sd) >= OVER_SD,
        f"geometric mean over AR at least {OVER_AR}": geometric_mean(over_ar) >= OVER_AR,
        f"no dataset below {NEVER_BELOW_SD} of SD": min(over_sd) >= NEVER_BELOW_SD,
        f"efficiency at least {EFFICIENCY}": min(f["efficiency"] for f in figures) >= EFFICIENCY,
        f"waits on hits at most {WAIT_ON_HIT:.0%} of a verification": max(
            f["wait_on_hit"] or 0.0 for f in figures
        )
        <= WAIT_ON_HIT,
    }
    missed = [target for target, reached in held.items() if not reached]
    assert not missed, "; ".join(missed)


def describe(cell) -> str:
    """Such as `humaneval, temperature 0, ssd: 18.5 tok/s, over ar 1.98 [1.90, 2.05], ...`."""
    facts = [f"{cell['tokens_per_s']:.1f} tok/s"]
    for baseline, ratio in cell["speedup"].items():
        interval = "" if ratio["low"] is None else f" [{ratio['low']:.2f}, {ratio['high']:.2f}]"
        facts.append(f"over {baseline} {ratio['value']:.2f}{interval}")
    if found := cell["prediction"]:
        facts.append(f"hit rate {found['hit_rate']:.2f}, efficiency {found['efficiency']:.3f}")
        facts.append(f"hits waited {found['wait_on_hit'] or 0.0:.1%} of a verification")
    where = f"{cell['dataset']}, temperature {cell['temperature']:g}, {cell['method']}"
    return f"{where}: {', '.join(facts)}"


def at_hand(note) -> list[str]:
    """The run file's datasets that are on this machine; the others are told."""
    folder = os.environ.get("HARNESS_DATA_DIR")
    found = []
    for name in load(CONFIG, {}).datasets:
        try:
            load_prompts(name, data_dir=Path(folder) if folder else None, offline=True)
        except DatasetError as error:
            note(f"{name} is left out, set HARNESS_DATA_DIR: {error}")
        else:
            found.append(name)
    return found
