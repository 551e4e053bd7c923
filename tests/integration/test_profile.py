"""`harness profile` with the tiny pair: both models and the draft process are real."""

import psutil
import pytest

from harness.cli import cli
from harness.decoder import Placement
from harness.simulation.measuring import transfer_seconds
from harness.simulation.profile import load_profile
from impl.ssd.calibration import ROWS, TOKENS


def command(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments, prog_name="harness")
    return ended.value.code, capsys.readouterr()


def test_a_machine_is_measured_and_simulated(tmp_path, capsys):
    path = tmp_path / "new" / "here.yaml"
    code, out = command(
        ["profile", "--pair", "tiny", "--batch-sizes", "2", "--out", str(path)], capsys
    )
    assert code == 0, out.err
    assert not [
        c for c in psutil.Process().children() if "resource_tracker" not in str(c.cmdline())
    ]
    found = load_profile(str(path))
    assert found.verify_idle.times.tokens == tuple(2 * n for n in TOKENS)
    assert found.draft_loaded.times.tokens == tuple(2 * n for n in ROWS)
    for passes in (found.verify_idle, found.verify_loaded, found.draft_idle, found.draft_loaded):
        assert passes.times.seconds[0] > 0
        assert list(passes.times.seconds) == sorted(passes.times.seconds)
    assert 0 < found.transfer_s < 0.1
    code, out = command(["simulate", "--profile", str(path), "--rounds", "50"], capsys)
    assert code == 0
    assert "SIMULATED" in out.out


def test_every_message_comes_back(monkeypatch):
    from impl.engine.draft_process import DraftProcess

    plain = DraftProcess.receive
    received = []

    def noted(process, *timeout):
        message = plain(process, *timeout)
        received.append(message)
        return message

    monkeypatch.setattr(DraftProcess, "receive", noted)
    assert transfer_seconds(Placement(draft_cores=(0,))) > 0
    assert received[1:] == [("token", 1)] * 200  # behind `Ready`; each came back


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--pair", "tiny", "--batch-sizes", "1,2"], "batch_sizes"),
        (["--pair", "smollm2-135m"], "draft"),
    ],
)
def test_what_has_no_profile_is_named(options, named, tmp_path, capsys):
    code, out = command(["profile", *options, "--out", str(tmp_path / "x.yaml")], capsys)
    assert code == 2
    assert named in out.err
    assert not (tmp_path / "x.yaml").exists()
