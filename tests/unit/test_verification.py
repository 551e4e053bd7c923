"""Which cores outputs are verified on."""

import os

import pytest

from harness.decoder import Placement
from harness.verification import verifying_cores


@pytest.mark.parametrize(
    ("own", "expected"), [({0, 1, 2}, (0, 1)), ({0}, (0,)), ({0, 2}, (0,))], ids=str
)
def test_the_drafts_cores_help_where_this_process_has_them(
    monkeypatch: pytest.MonkeyPatch, own: set[int], expected: tuple[int, ...]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: own)
    assert verifying_cores(Placement(target_cores=(0,), draft_cores=(1,))) == expected


def test_shared_cores_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert verifying_cores(Placement(target_cores=(1, 0), draft_cores=(0,))) == (1, 0)
