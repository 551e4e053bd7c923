"""The questions' lines against closed forms, and the figures that show them."""

import xml.etree.ElementTree as ElementTree

import pytest

from harness.cli import cli
from harness.simulation import questions
from harness.simulation.questions import Answer, Line
from impl.ssd.fan_out import geometric
from impl.ssd.theory import Backup, SpeedInputs, expected_tokens, hit_rate, predict
from reports.simulation import write_figures


def best(speed):
    return max(map(speed, questions._LOOKAHEADS))


def sd(rate, cost):
    return best(lambda k: expected_tokens(rate, k) / (1 + k * cost))


def ssd(rate, cost):
    def speed(k):
        tokens = expected_tokens(rate, k)
        hits = hit_rate(rate, questions.EXPONENT, geometric(24, k, rate, questions.EXPONENT))
        return predict(SpeedInputs(hits, tokens, (k + 1) * cost, Backup(tokens, k * cost))).speed

    return best(speed)


def test_where_ssd_stops_paying_is_the_closed_form(monkeypatch):
    monkeypatch.setattr(questions, "ACCEPTANCES", (0.5, 0.8))
    answer = questions.where_ssd_stops_paying()
    for line, rate in zip(answer.lines, (0.5, 0.8), strict=True):
        for cost, ratio in line.points:
            expected = ssd(rate, cost) / max(1.0, sd(rate, cost))
            assert ratio == pytest.approx(expected, rel=0.05), (rate, cost)


def test_a_device_given_to_the_target_shortens_a_pass(monkeypatch):
    monkeypatch.setattr(questions, "_ROUNDS", 300)
    lines = {
        line.label: dict(line.points) for line in questions.what_the_extra_device_costs().lines
    }
    # Five devices are faster in all than four, and less than five quarters as fast.
    assert 4 / 5 < lines["sd, TP 5"][1] / lines["sd, TP 4"][1] < 1
    assert set(lines) == {"ssd 4 + 1", "sd, TP 5", "sd, TP 4"}


def test_more_guesses_never_hurt_where_passes_are_bound_by_memory(monkeypatch):
    monkeypatch.setattr(questions, "_ROUNDS", 300)
    monkeypatch.setattr(questions, "ACCEPTANCES", (0.8,))
    (line,) = questions.what_budget_an_acceptance_needs().lines
    speeds = [y for _, y in line.points]
    assert max(speeds) == 1
    assert speeds[0] < 0.8
    assert speeds[:6] == sorted(speeds[:6])


def test_the_rivals_at_a_draft_that_agrees(monkeypatch):
    monkeypatch.setattr(questions, "_ROUNDS", 300)
    answer = questions.how_rivals_compare(1)
    assert [line.label for line in answer.lines] == ["sd", "tree", "amusd", "pearl", "ssd"]
    for line in answer.lines:
        assert line.points[-1][1] > line.points[0][1] > 0.9


def test_a_fleet_has_room_for_its_requests(monkeypatch):
    monkeypatch.setattr(questions, "_CONCURRENT", (64, 250))
    monkeypatch.setattr(questions, "_FLEET_ROUNDS", 20)
    for line in questions.what_a_fleet_gives().lines:
        (alone, _), (crowded, _) = line.points
        assert alone > crowded
    # Four of 80 GB hold 141.1 GB of weights; a token takes 2 * 80 * 8 * 128 * 2 bytes.
    assert questions._room(4, 512) == int((0.9 * 320e9 - 2 * 70_553_706_496) // (512 * 327_680))
    assert questions._serve("ar", 4, 10**6, 0.8) is None


def test_a_figure_is_whole_and_says_that_it_is_simulated(tmp_path):
    answer = Answer(
        "mine", "Which <one>?", "x", "y", (Line("ar", ((1, 1), (2, 3))), Line("b & c", ((1, 2),))),
        "found: 1 < 2", level=1.0, log_x=True,
    )  # fmt: skip
    (path,) = write_figures([answer], tmp_path / "new")
    root = ElementTree.fromstring(path.read_text())
    texts = "".join(root.itertext())
    assert path.name == "mine.svg"
    assert "SIMULATED" in texts
    assert "Which <one>? (simulated)" in texts
    assert "found: 1 < 2" in texts
    assert "b & c" in texts
    assert "#0a00" not in path.read_text()  # every colour is a variable, and each is defined
    assert "--ink:" in path.read_text()


def test_the_command_writes_a_chart_for_each_answer(tmp_path, monkeypatch, capsys):
    answer = Answer("mine", "Which?", "x", "y", (Line("ar", ((1, 1), (2, 3))),), "this one")
    monkeypatch.setattr(questions, "answers", lambda: [answer])
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", "--figures", str(tmp_path)], prog_name="harness")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{tmp_path}/mine.svg: Which? (simulated)\n  this one\n"
    assert (tmp_path / "mine.svg").exists()
