"""Which cells a run names as disturbed, from conditions written by hand."""

import pytest
from click.testing import CliRunner
from fake_decoding import decode, one_token_rounds

from harness.checks import Status, run_checks
from harness.cli import cli
from harness.conditions import Conditions, GpuConditions
from harness.counters import CpuTimes
from harness.metrics import split_cells
from harness.noise import cell_noise, disturbances
from harness.plan import Cell
from harness.store import RunStore, read_run

AR, SD = "ar/mini/t0/b1", "sd/mini/t0/b1"


def conditions(cell, block=0, *, seconds=10.0, busy=10.0, steal=0.0, own=10.0, **fields):
    """On two cores of a machine that has four; by default nobody else did anything."""
    told = {"quota_s": None, "throttles": None, "frequency_mhz": None} | fields
    machine = CpuTimes(told.pop("machine_busy", busy), steal, 4)
    cores = CpuTimes(busy, steal, 2)
    return Conditions(f"{cell}/r0/k{block}", seconds, cores, machine, own, **told)


def named(*items):
    return {found.told: (found.worst, found.cells) for found in disturbances(cell_noise(items))}


def test_a_quiet_machine_has_nothing_to_say():
    assert named(conditions(AR), conditions(SD, busy=10.3, steal=0.1)) == {}


def test_steal_names_its_cells_the_worst_first():
    # of 20 core-seconds: 0.3 and 1; a cell of two items is judged as a whole
    items = (
        conditions(AR, steal=0.3),
        conditions("tree/mini/t0/b1", 0, steal=0.3),
        conditions("tree/mini/t0/b1", 1),
        conditions(SD, steal=1.0),
    )
    told = "a hypervisor took CPU time from the run's cores (steal)"
    assert named(*items) == {told: ("5.0%", (SD, AR))}


def test_a_sentence_names_the_worst_cells_and_counts_the_rest():
    items = [conditions(f"m{at}/mini/t0/b1", steal=3.0 - 0.1 * at) for at in range(12)]
    (found,) = disturbances(cell_noise(items))
    assert found.sentence.endswith("m6/mini/t0/b1, m7/mini/t0/b1 and 4 more")


def test_other_programs_on_the_runs_cores():
    # 11 of 20 core-seconds were busy, 10 with the run's own work
    told = "other programs ran on the run's cores"
    assert named(conditions(AR), conditions(SD, busy=11.0)) == {told: ("5.0%", (SD,))}
    assert named(conditions(AR, busy=10.5)) == {}  # 2.5%


def test_other_programs_on_other_cores():
    # 16 core-seconds of 40 were busy, 10 of them with the run; its own cores had nothing else
    found = named(conditions(AR, machine_busy=16.0))
    assert found == {"other programs loaded the machine": ("15.0% of all cores", (AR,))}


@pytest.mark.parametrize("item", [{"steal": 0.06}, {"busy": 0.07, "own": 0.01}])
def test_a_few_ticks_in_a_short_cell_are_no_noise(item):
    assert named(conditions(AR, **{"seconds": 0.1, "busy": 0.1, "own": 0.1} | item)) == {}


def test_a_container_at_its_quota():
    told = "the container's CPU quota held the run back"
    assert named(conditions(AR, quota_s=0.5)) == {told: ("2.5%", (AR,))}


def test_heat():
    assert named(conditions(AR, throttles=0), conditions(SD, throttles=3)) == {
        "cores were slowed for heat": ("3 times", (SD,))
    }


def test_a_lower_clock_than_in_the_rest_of_the_run():
    cores = [conditions(AR, k, frequency_mhz=mhz) for k, mhz in enumerate([3000.0, 2980.0])]
    slow = conditions(SD, frequency_mhz=2384.0)
    told = "clocks were lower than in the rest of the run"
    assert named(*cores, slow) == {told: ("80% of the median clock", (SD,))}
    gpus = [conditions(c, gpus=(GpuConditions(m, ()),)) for c, m in ((AR, 1000), (SD, 1020))]
    assert named(*gpus) == {}


def test_slowed_gpus():
    hot = GpuConditions(1980, ("thermal limit",))
    assert named(conditions(SD, gpus=(hot, hot))) == {"GPUs were slowed": ("thermal limit", (SD,))}


def test_what_is_not_known_is_no_noise():
    silent = Conditions(f"{AR}/r0/k0", 10.0, None, None, None, None, None, None)
    assert named(silent) == {}
    assert named(silent, conditions(AR, 1, steal=9.0)) == {}  # a share of what?


def stored(tmp_path, *lines):
    name, cell = "mini/0/r0", Cell("ar", "mini", 0.0, 1)
    store = RunStore.create(tmp_path / "run", {})
    store.append_item(decode(cell, {name: one_token_rounds(name, 1, 2)}))
    for line in lines:
        store.record_conditions(line)
    store.finalise("finished")
    return store.directory


def check_of(directory):
    run = read_run(directory)
    checks = run_checks(run, split_cells(run.requests, run.rounds))
    return next(check for check in checks if check.name == "quiet_machine")


def test_a_disturbed_run_says_so_at_its_end(tmp_path):
    directory = stored(tmp_path, conditions(AR, steal=2.0))
    shown = CliRunner().invoke(cli, ["show", str(directory)]).output
    assert f"(steal), up to 10.0%: {AR}" in shown
    assert check_of(directory).status is Status.FAIL
    assert "1 of 1 cells were disturbed" in check_of(directory).detail


def test_a_quiet_run_says_how_quiet(tmp_path):
    found = check_of(stored(tmp_path, conditions(AR, busy=10.4, steal=0.1)))
    assert found.status is Status.PASS
    assert found.detail == (
        "1 cells undisturbed; of the run's cores at most steal 0.5% and other programs 2.0%"
    )


def test_a_run_without_conditions_does_not_claim_to_be_quiet(tmp_path):
    assert check_of(stored(tmp_path)).status is Status.SKIP


def test_the_last_line_of_an_item_counts_and_a_torn_one_does_not(tmp_path):
    directory = stored(tmp_path, conditions(AR, steal=2.0), conditions(AR, steal=0.5))
    assert [each.run_cores.steal_s for each in read_run(directory).conditions] == [0.5]
    with (directory / "conditions.jsonl").open("a") as file:
        file.write('\n{"item": "ar/mini/t0')  # killed here
    RunStore.open(directory).record_conditions(conditions(AR, steal=0.25))
    assert [each.run_cores.steal_s for each in read_run(directory).conditions] == [0.25]


def test_conditions_of_items_that_were_never_stored_are_left_out(tmp_path):
    assert read_run(stored(tmp_path, conditions(SD, steal=2.0))).conditions == ()
