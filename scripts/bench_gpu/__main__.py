"""How near the engine is to what a GPU can do: `make bench-gpu` (docs/gpu.md).

Passes of a 1B and an 8B shape over the time that reading their weights takes; host time between
rounds; SSD beside SD on one card, whose draft shares it. Weights are random and a coin decides
which drafted tokens are accepted: these are times of this hardware, and no result of a method.

Needs PyTorch, numpy and transformers, and no installation: `PYTHONPATH=. python scripts/bench_gpu`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parents[1])]
sys.path.append(str(_HERE / "stand_ins"))  # behind all else: only for what is not installed

import torch  # noqa: E402
from passes import PassTime, read_bandwidth, time_passes  # noqa: E402
from rounds import RoundTimes, run_rounds, summarise  # noqa: E402
from shapes import Pair, make_pair  # noqa: E402

from baselines.ar import AutoregressiveDecoder  # noqa: E402
from baselines.sd import SpeculativeDecoder  # noqa: E402
from harness.decoder import Placement  # noqa: E402
from impl.engine.device import wait_for  # noqa: E402
from impl.engine.models import Models  # noqa: E402
from impl.ssd.decoder import SaguaroDecoder  # noqa: E402

LOOKAHEAD = 4
ACCEPTANCE = 0.8
GOAL_OVER_FLOOR, GOAL_GAP = 1.25, 0.03  # of decoding at batch size 1; of a verification


def main() -> None:
    options = _options()
    device = torch.device(options.device)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), device, tiny=options.tiny, rounds=options.rounds)
    found["seconds"] = round(time.perf_counter() - started, 1)
    say(f"took {found['seconds']:.0f} s")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


def measure(folder: Path, device: torch.device, *, tiny: bool, rounds: int) -> dict[str, Any]:
    """Measures, prints as it goes, and gives it all as JSON values."""
    pair = make_pair(folder, str(device), tiny=tiny, acceptance=ACCEPTANCE)
    bandwidth = read_bandwidth(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    operators = pair.target.execution().operators
    say(f"{name}, torch {torch.__version__}, {operators}; reads {bandwidth / 1e9:.0f} GB/s")
    say("random weights, synthetic acceptance: times of this hardware, no result of a method\n")
    models = Models(pair.target, pair.draft)
    passes = _passes(pair, models, bandwidth)
    timed = _rounds(pair, models, device, rounds)
    return {
        "device": name,
        "torch": torch.__version__,
        "operators": operators,
        "synthetic_acceptance": ACCEPTANCE,
        "lookahead": LOOKAHEAD,
        "read_gb_s": bandwidth / 1e9,
        "passes": [asdict(one) | {"over_floor": one.over_floor} for one in passes],
        "rounds": [asdict(one) | {"gap": one.gap} for one in timed],
    }


def _passes(pair: Pair, models: Models, bandwidth: float) -> list[PassTime]:
    say("model    tokens  floor ms  queued ms  waited ms  waited/floor")
    found: list[PassTime] = []
    for name, load in zip(pair.names, (models.target, models.draft), strict=True):
        started = time.perf_counter()
        model = load()
        wait_for(model.device)
        loaded = time.perf_counter() - started
        for one in time_passes(name, model, bandwidth):
            say(f"{one.model:8} {one.tokens:6} {one.floor_ms:9.3f} {one.queued_ms:10.3f} "
                f"{one.waited_ms:10.3f} {one.over_floor:13.2f}")  # fmt: skip
            found.append(one)
        say(f"{name}: {model.weight_bytes / 1e9:.2f} GB read by a pass, loaded in {loaded:.0f} s")
    say(f"{found[0].model} decodes at {found[0].over_floor:.2f}x of the floor "
        f"(goal {GOAL_OVER_FLOOR}x)\n")  # fmt: skip
    return found


def _rounds(pair: Pair, models: Models, device: torch.device, rounds: int) -> list[RoundTimes]:
    where = Placement(target_devices=(str(device),), draft_device=str(device))
    say(f"{pair.names[0]} with {pair.names[1]} on one device, acceptance {ACCEPTANCE}, "
        f"K = {LOOKAHEAD}; medians in ms")  # fmt: skip
    say("method kind  rounds tokens   round  verify   draft    wait    host  gap/verify")
    runs = (
        ("ar", AutoregressiveDecoder, {}),
        ("sd", SpeculativeDecoder, {"lookahead": LOOKAHEAD}),
        ("ssd", SaguaroDecoder, {"lookahead": LOOKAHEAD}),
    )
    found: dict[str, list[RoundTimes]] = {}
    for name, decoder, options in runs:
        timed = run_rounds(name, decoder, models, where, rounds=rounds, **options)
        found[name] = summarise(name, timed)
        for one in found[name]:
            say(f"{name:6} {one.kind:5} {one.rounds:6} {one.tokens:6.2f} {one.round_ms:7.3f} "
                f"{one.verify_ms:7.3f} {one.draft_ms:7.3f} {one.wait_ms:7.3f} "
                f"{one.host_ms:7.3f} {one.gap:10.1%}")  # fmt: skip
    _conclude(found)
    return [one for own in found.values() for one in own]


def _conclude(found: dict[str, list[RoundTimes]]) -> None:
    sd, ssd = (found[name][0] for name in ("sd", "ssd"))
    speedup = (ssd.tokens / ssd.round_ms) / (sd.tokens / sd.round_ms)
    say(f"ssd over sd, synthetic, draft sharing the device: {speedup:.2f}")
    for hit in (one for one in found["ssd"] if one.kind == "hit"):
        say(f"between two verifications on a hit: {hit.gap:.1%} of one (goal {GOAL_GAP:.0%}), "
            f"{hit.host_share:.0%} of it host time, the rest waiting for the draft")  # fmt: skip


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench_gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu to try the program")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes instead of 1B and 8B")
    parser.add_argument("--rounds", type=int, default=150, help="of each method")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(
            f"--device {options.device}: PyTorch sees no GPU; --device cpu --tiny tries it"
        )
    return options


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - a program's output


if __name__ == "__main__":
    main()
