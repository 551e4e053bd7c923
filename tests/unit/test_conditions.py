"""The counters around an item, read from a machine that is a folder; 100 ticks are a second."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from fake_machine import IDLE, OWN, STEAL, SYSTEM, USER, FakeMachine

from harness.conditions import Conditions, ConditionsWatch
from harness.counters import CounterReader, CpuTimes
from harness.nvml import GpuSettings, GpuState, gpu_settings, open_gpus


@pytest.fixture(autouse=True)
def _hundred_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_CLK_TCK": 100}.__getitem__)


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def reader(machine: FakeMachine, *cores: int, clock=lambda: 0, gpus=()) -> CounterReader:
    return CounterReader(cores, gpus, pid=OWN, root=machine.root, clock=clock)


def test_busy_and_stolen_time_of_the_runs_cores_and_of_all(machine: FakeMachine) -> None:
    machine.cores(
        {USER: 100, 1: 20, SYSTEM: 3, IDLE: 999, 4: 999, 5: 4, 6: 5, STEAL: 50, 8: 70, 9: 80},
        {USER: 10},
        {USER: 1000, STEAL: 7},
    )
    found = reader(machine, 0, 1).read()
    # user, nice, system, irq, softirq; neither idle nor waiting for a disk; guests are in user
    assert found.run_cores == CpuTimes(busy_s=1.42, steal_s=0.5, cores=2)
    assert found.machine == CpuTimes(pytest.approx(11.42), pytest.approx(0.57), 3)


def test_own_time_is_that_of_the_whole_tree(machine: FakeMachine) -> None:
    machine.cores({})
    machine.process(OWN, 10, 1, children=[7, 8])
    machine.process(7, 200, 20, children=[9])
    machine.process(8, 3000, 0)
    machine.process(9, 4, 0)
    machine.process(50, 77777, 0)  # somebody else's
    assert reader(machine, 0).read().own_s == pytest.approx(32.35)


def test_what_a_child_took_stays_when_it_has_ended(machine: FakeMachine) -> None:
    machine.cores({})
    machine.process(OWN, 10, 0, children=[7])
    machine.process(7, 200, 20)
    before = reader(machine, 0).read()
    machine.process(OWN, 10, 0, 205, 21)  # waited for
    assert reader(machine, 0).read().own_s - before.own_s == pytest.approx(0.06)


def test_children_of_every_thread_count(machine: FakeMachine) -> None:
    machine.cores({})
    machine.process(OWN, 1)
    machine.process(7, 30)
    machine.write(f"proc/{OWN}/task/101/children", "7 12345")  # 12345 has just ended
    assert reader(machine, 0).read().own_s == pytest.approx(0.31)


def test_own_time_is_unknown_where_the_kernel_lists_no_children(machine: FakeMachine) -> None:
    machine.cores({})
    machine.process(OWN, 1)
    (machine.root / f"proc/{OWN}/task/{OWN}/children").unlink()
    assert reader(machine, 0).read().own_s is None


def test_heat_clocks_and_quota(machine: FakeMachine) -> None:
    machine.cores({}, {}, {})
    for core, (throttles, khz) in enumerate([(3, 3_000_000), (5, 2_000_000), (90, 1_000_000)]):
        folder = f"sys/devices/system/cpu/cpu{core}"
        machine.write(f"{folder}/thermal_throttle/core_throttle_count", f"{throttles}\n")
        machine.write(f"{folder}/thermal_throttle/package_throttle_count", "1\n")
        machine.write(f"{folder}/cpufreq/scaling_cur_freq", f"{khz}\n")
    machine.write(
        "sys/fs/cgroup/cpu.stat", "usage_usec 5\nnr_throttled 2\nthrottled_usec 1500000\n"
    )
    found = reader(machine, 0, 1).read()
    assert (found.throttles, found.frequency_mhz, found.quota_s) == (10, 2500.0, 1.5)


def test_a_machine_that_tells_nothing(machine: FakeMachine) -> None:
    found = reader(machine, 0).read()
    assert (found.run_cores, found.machine, found.throttles) == (None, None, None)
    assert (found.frequency_mhz, found.quota_s) == (None, None)
    watch = ConditionsWatch(reader(machine, 0))
    watch.begin()
    assert watch.end("i").run_cores is None  # type: ignore[union-attr]


def test_conditions_are_what_happened_between_two_readings(machine: FakeMachine) -> None:
    now = iter([0, 5_000_000_000, 7_500_000_000])
    gpu = SimpleNamespace(state=lambda: GpuState(1980, ("power cap",), 3.0))
    watch = ConditionsWatch(reader(machine, 1, clock=lambda: next(now), gpus=[gpu]))
    assert watch.end("never begun") is None
    machine.cores({USER: 400}, {USER: 100, STEAL: 5})
    machine.process(OWN, 50)
    watch.begin()
    machine.cores({USER: 500}, {USER: 320, STEAL: 30})
    machine.process(OWN, 250)
    found = watch.end("ar/mini/t0/b1/r0/k0")
    assert found is not None
    assert (found.item, found.seconds) == ("ar/mini/t0/b1/r0/k0", 2.5)
    assert found.run_cores == CpuTimes(pytest.approx(2.2), pytest.approx(0.25), 1)
    assert found.machine == CpuTimes(pytest.approx(3.2), pytest.approx(0.25), 2)
    assert found.own_s == pytest.approx(2.0)
    assert [(each.sm_mhz, each.throttled) for each in found.gpus] == [(1980, ("power cap",))]


def test_this_machine_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    found = CounterReader((0,)).read()
    assert found.machine is not None
    assert found.machine.cores == os.cpu_count()
    assert found.own_s is None or 0 < found.own_s <= found.machine.busy_s


class FakeNvml(ModuleType):
    """One GPU that is slowed by its power cap while idle; it does not tell its energy."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return {("GPU-1", 1): 1410}[handle, kind]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x04 | 0x01 | 0x40  # software power cap, idle, hardware thermal slowdown

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        raise self.NVMLError("not supported")


def test_gpus_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("pynvml"))
    (gpu,) = open_gpus(["GPU-1"])
    assert gpu.state() == GpuState(1410, ("power cap", "hardware thermal slowdown"), None)
    assert open_gpus(["GPU-9"]) == ()
    assert open_gpus([]) == ()


def test_settings_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three, of which the first two are joined by two links."""

    class Wired(FakeNvml):
        NVML_NVLINK_MAX_LINKS = 18
        NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

        def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
            return uuid

        def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
            return 1980

        def nvmlDeviceGetApplicationsClock(self, handle: str, kind: int) -> int:
            raise self.NVMLError("not supported")

        def nvmlDeviceGetPowerManagementLimit(self, handle: str) -> int:
            return 699_500

        def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
            if handle == "GPU-c":
                raise self.NVMLError("not supported")
            return int(link < 2)

        def nvmlDeviceGetP2PStatus(self, handle: str, other: str, kind: int) -> int:
            return 0 if {handle, other} == {"GPU-a", "GPU-b"} else 5

    monkeypatch.setitem(sys.modules, "pynvml", Wired("pynvml"))
    assert gpu_settings(["GPU-a", "GPU-b", "GPU-c"]) == [
        GpuSettings(1980, None, 699.5, 2, [1]),
        GpuSettings(1980, None, 699.5, 2, [0]),
        GpuSettings(1980, None, 699.5, 0, []),
    ]


def test_no_gpus_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_gpus(["GPU-1"]) == ()
    assert gpu_settings(["GPU-1"]) == [GpuSettings()]


def test_a_line_is_read_back(machine: FakeMachine) -> None:
    from dataclasses import asdict
    from json import dumps

    told = Conditions("i", 1.5, CpuTimes(1.0, 0.0, 2), None, 0.5, None, 3, 2400.0)
    assert Conditions.from_json(dumps(asdict(told) | {"of_a_later_version": 1})) == told
    with pytest.raises(ValueError, match="valid"):
        Conditions.from_json(dumps(asdict(told))[:-10])


def test_work_of_a_process_that_is_not_ours_is_not_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is a sleeping child here, and this process the other program."""
    monkeypatch.undo()
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    with subprocess.Popen(sleep, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # it has started up
        watch = ConditionsWatch(CounterReader(os.sched_getaffinity(0), pid=child.pid))
        watch.begin()
        begin = time.process_time()
        while time.process_time() - begin < 0.3:
            pass
        found = watch.end("i")
        child.kill()
    assert found is not None
    assert found.run_cores is not None
    assert found.own_s in (0.0, None)
    assert found.run_cores.busy_s >= 0.2
