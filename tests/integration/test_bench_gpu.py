"""`make bench-gpu` on the CPU with tiny shapes: the program, not the numbers."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from harness.decoder import CacheOutcome, Round, Span, SpanKind

FOLDER = Path(__file__).parents[2] / "scripts" / "bench_gpu"


def bench(*options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, FOLDER, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


@pytest.fixture(scope="module")
def rounds() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_gpu_rounds", FOLDER / "rounds.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["bench_gpu_rounds"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_part_is_measured_and_said_to_be_synthetic(tmp_path):
    done = bench("--device", "cpu", "--tiny", "--rounds", "60", "--out", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    assert "random weights, synthetic acceptance" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert [(one["model"], one["tokens"]) for one in found["passes"]] == [
        (model, tokens) for model in ("tiny 2", "tiny 1") for tokens in (1, 5, 8)
    ]
    assert all(0 < one["floor_ms"] < one["waited_ms"] for one in found["passes"])
    whole = {one["method"]: one for one in found["rounds"] if one["kind"] == "all"}
    assert whole["ar"]["tokens"] == 1
    # K = 4 at a = 0.8: (1 - 0.8^5) / 0.2 = 3.36 tokens a round, deviation 1.55; 59 rounds, 4 sigma
    assert whole["sd"]["tokens"] == pytest.approx(3.36, abs=0.81)
    kinds = [one["rounds"] for one in found["rounds"] if one["method"] == "ssd"]
    assert kinds[0] == sum(kinds[1:]) == 59


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_line():
    done = bench("--device", "cuda:7")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(
        "error: --device cuda:7: PyTorch sees no GPU; --device cpu --tiny tries it"
    )


def test_what_a_round_spends(rounds):
    def timed(start_ms: int, cache: CacheOutcome, *spans: tuple[SpanKind, int, int]) -> object:
        own = tuple(Span(kind, int(a * 1e6), int(b * 1e6)) for kind, a, b in spans)
        emitted = Round("a", (1, 2), drafted=1, accepted=1, spans=own, cache=cache)
        return rounds.TimedRound(emitted, int(start_ms * 1e6), int((start_ms + 9) * 1e6))

    hit, miss = CacheOutcome.HIT, CacheOutcome.MISS
    steps = [
        timed(0, hit, (SpanKind.WAIT, -5, 1), (SpanKind.VERIFY, 1, 8)),  # waited before it began
        timed(
            10,
            miss,
            (SpanKind.DRAFT, 10, 12),
            (SpanKind.TRANSFER, 12, 13),
            (SpanKind.VERIFY, 13, 19),
            (SpanKind.TRANSFER, 19, 20),  # tells the draft the outcome: the host's
        ),
        timed(20, hit),  # the last: its end is not known
    ]
    whole, hits, misses = rounds.summarise("ssd", steps)
    assert (whole.kind, whole.rounds, hits.kind, misses.kind) == ("all", 2, "hit", "miss")
    # 0 to 10 ms: 1 waiting, 7 verifying, so 2 of the host; 10 to 20 ms: 2 drafting, 1 on the way
    assert (hits.round_ms, hits.wait_ms, hits.verify_ms, hits.host_ms) == (10, 1, 7, 2)
    assert (misses.draft_ms, misses.wait_ms, misses.verify_ms, misses.host_ms) == (2, 1, 6, 1)
    assert hits.gap == pytest.approx(3 / 7)
    assert hits.host_share == pytest.approx(2 / 3)
