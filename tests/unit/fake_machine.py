"""A folder that looks like /proc and /sys of a machine whose counters the test writes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

OWN = 100  # the run's first process
USER, SYSTEM, IDLE, STEAL = 0, 2, 3, 7  # fields of a cpu line


class FakeMachine:
    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def cores(self, *cores: Mapping[int, int]) -> None:
        """Of each core, field -> ticks; every field that is not named is 0."""
        lines = ["cpu  1 2 3 4 5 6 7 8 9 10"]  # the sum of all, which nobody reads
        for number, ticks in enumerate(cores):
            fields = [str(ticks.get(field, 0)) for field in range(10)]
            lines.append(f"cpu{number} {' '.join(fields)}")
        self.write("proc/stat", "\n".join([*lines, "intr 9 9 9", "ctxt 5"]) + "\n")

    def process(self, pid: int, *times: int, children: Sequence[int] = ()) -> None:
        """With utime, stime, cutime and cstime in ticks."""
        before = " ".join(["0"] * 10)
        self.write(f"proc/{pid}/stat", f"{pid} (a (strange) name) R {before} {_four(times)} 20 0\n")
        self.write(f"proc/{pid}/task/{pid}/children", " ".join(map(str, children)))

    def energy(self, zone: str, name: str, microjoules: int, most: int = 262_143_328_850) -> None:
        """A RAPL zone, such as `intel-rapl:0` or `intel-rapl:0/intel-rapl:0:1`."""
        folder = f"sys/class/powercap/{zone}"
        self.write(f"{folder}/name", f"{name}\n")
        self.write(f"{folder}/energy_uj", f"{microjoules}\n")
        self.write(f"{folder}/max_energy_range_uj", f"{most}\n")


def _four(times: Sequence[int]) -> str:
    return " ".join(map(str, [*times, 0, 0, 0, 0][:4]))
