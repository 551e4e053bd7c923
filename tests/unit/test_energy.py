"""Joules from RAPL zones that are files and from GPUs that are written down, to joules a token."""

import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from fake_decoding import decode, one_token_rounds
from fake_machine import FakeMachine

from harness.cli import cli
from harness.conditions import Conditions, ConditionsWatch
from harness.counters import CounterReader
from harness.energy import EMULATED, UNKNOWN, Energy, cell_energy
from harness.metrics import split_cells
from harness.nvml import GpuState
from harness.plan import Cell
from harness.store import RunStore, read_run
from reports.page import render

PACKAGE, MEMORY = "intel-rapl:0", "intel-rapl:0/intel-rapl:0:1"


@pytest.fixture
def machine(tmp_path):
    found = FakeMachine(tmp_path / "root")
    found.energy(PACKAGE, "package-0", 1_000_000)
    found.energy("intel-rapl:0/intel-rapl:0:0", "core", 700_000)  # in the package's already
    found.energy(MEMORY, "dram", 500_000)
    found.energy("intel-rapl:1", "psys", 99_000_000)  # all of it once more
    found.energy("intel-rapl-mmio:0", "package-0", 1_000_000)  # the same package once more
    return found


def used(machine, change, gpus=()):
    watch = ConditionsWatch(CounterReader((0,), gpus, root=machine.root))
    watch.begin()
    change()
    return watch.end("item").energy_j


def test_packages_and_their_memory_are_counted_once(machine):
    def change():
        machine.energy(PACKAGE, "package-0", 3_500_000)
        machine.energy(MEMORY, "dram", 900_000)

    assert used(machine, change) == {"package-0": 2.5, "package-0 dram": 0.4}


def test_a_counter_that_starts_from_zero_again(machine):
    machine.energy(PACKAGE, "package-0", 262_000_000_000, most=262_143_328_850)

    def change():
        machine.energy(PACKAGE, "package-0", 1_000_000, most=262_143_328_850)

    # to its end 143.32885 J, and 1 J from there
    assert used(machine, change)["package-0"] == pytest.approx(144.32885)


def test_counters_that_may_not_be_read_are_absent(machine):
    (machine.root / "sys/class/powercap" / PACKAGE / "energy_uj").unlink()
    assert used(machine, lambda: None) == {"package-0 dram": 0.0}


def test_gpus_are_counted_beside_the_packages(machine):
    joules = iter([100.0, 350.5])
    gpu = SimpleNamespace(state=lambda: GpuState(1980, (), next(joules)))
    silent = SimpleNamespace(state=lambda: GpuState(None, (), None))
    found = used(machine, lambda: None, [silent, gpu])
    assert found == {"package-0": 0.0, "package-0 dram": 0.0, "gpu 1": 250.5}


def conditions(block, seconds=2.0, **joules):
    item = f"ar/mini/t0/b1/r0/k{block}"
    return Conditions(item, seconds, None, None, None, None, None, None, energy_j=joules)


@pytest.fixture
def stored(tmp_path):
    """Two items of three and one token; with conditions of those that are given."""

    def store(*lines):
        run = RunStore.create(tmp_path / "run", {})
        for block, ids in enumerate([(1, 2, 3), (4,)]):
            name = f"mini/{block}/r0"
            cell = Cell("ar", "mini", 0.0, 1)
            run.append_item(decode(cell, {name: one_token_rounds(name, *ids)}, block=block))
        for line in lines:
            run.record_conditions(line)
        run.finalise("finished")
        return read_run(run.directory)

    return store


def energy_of(run):
    (data,) = split_cells(run.requests, run.rounds)
    return cell_energy(data, run.conditions)


def test_joules_a_token_are_of_all_sources_and_items(stored):
    # 10 + 2 + 6 + 2 J for 4 tokens in 5 s
    run = stored(conditions(0, cpu=10.0, gpu=2.0), conditions(1, seconds=3.0, cpu=6.0, gpu=2.0))
    assert energy_of(run) == Energy(5.0, 4.0, ("cpu", "gpu"))


@pytest.mark.parametrize(
    "lines",
    [
        (conditions(0, cpu=10.0),),  # nothing is known of the other item
        (conditions(0, cpu=10.0, gpu=2.0), conditions(1, cpu=10.0)),
        (conditions(0), conditions(1)),
        (),
    ],
)
def test_energy_that_is_known_in_part_is_not_known(stored, lines):
    assert energy_of(stored(*lines)) is None


def test_energy_is_shown_and_reported(stored, tmp_path):
    run = stored(conditions(0, cpu=16.0), conditions(1, cpu=4.0))
    shown = CliRunner().invoke(cli, ["show", str(tmp_path / "run")]).output
    assert "ar: 5 J/token, 5.0 W" in shown
    assert "energy of cpu, idle power and prefill included" in shown
    assert UNKNOWN not in shown
    assert "5.00" in render([run])


def test_a_machine_that_tells_no_energy_says_so_once(stored, tmp_path):
    run = stored(conditions(0), conditions(1))
    shown = CliRunner().invoke(cli, ["show", str(tmp_path / "run")]).output
    assert shown.count(UNKNOWN) == 1
    assert render([run]).count(UNKNOWN) == 1


def test_an_emulated_run_tells_no_energy(stored, tmp_path):
    manifest = tmp_path / "run" / "manifest.json"
    stored(conditions(0, cpu=16.0), conditions(1, cpu=4.0))
    told = json.loads(manifest.read_text()) | {"fingerprint": {"emulated": "emulated:h100x4+1"}}
    manifest.write_text(json.dumps(told))
    shown = CliRunner().invoke(cli, ["show", str(tmp_path / "run")]).output
    assert EMULATED in shown
    assert "J/token" not in shown
    page = render([read_run(tmp_path / "run")])
    assert EMULATED.replace("'", "&#39;") in page or EMULATED in page
