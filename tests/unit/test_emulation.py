"""Emulated devices: passes that last as long as a profile says, labelled wherever they show."""

from pathlib import Path

import numpy as np
import pytest
import torch

from harness.config import load
from harness.errors import UsageError
from harness.fingerprint import differences
from harness.labels import emulated_devices
from harness.preparation import check_methods, identity
from harness.simulation.emulation import CONTEXT, device_count, latencies
from harness.simulation.profile import load_profile
from harness.summary import _machine_warnings
from harness.tuning.search import tune
from impl.engine import emulated_model
from impl.engine.emulated_model import EmulatedModel, Latency
from impl.engine.models import ModelSpec
from impl.engine.token_batch import TokenBatch

TINY = Path(__file__).parents[2] / "harness" / "tiny"
LLAMA = "emulated:h100x4+1-llama-3.1-70b"


class Clock:
    """Time that passes in sleeps, in reads of it (a microsecond each) and in `work`."""

    def __init__(self):
        self.now = self.slept = 0.0

    def perf_counter(self):
        self.now += 1e-6
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept += seconds


class Working:
    """A model whose pass takes so long."""

    head_ids, device, dtype = None, torch.device("cpu"), torch.float32

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def forward(self, batch, cache, rows=slice(None)):
        self.clock.now += self.seconds
        return batch.tokens[rows]


def test_a_latency_is_linear_between_and_constant_outside():
    latency = Latency((2, 4), (0.1, 0.3))
    assert [latency.of(n) for n in (1, 2, 3, 4, 9)] == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.3])


@pytest.mark.parametrize(("works", "lasts"), [(0.002, 0.02), (0.0199, 0.02), (0.05, 0.05)])
def test_a_pass_lasts_as_long_as_it_is_told_or_as_it_takes(monkeypatch, works, lasts):
    clock = Clock()
    monkeypatch.setattr(emulated_model, "time", clock)
    model = EmulatedModel(Working(clock, works), Latency((1, 3), (0.01, 0.02)))
    batch = TokenBatch.causal([(0, 0, [5, 6, 7])])
    rows = model.forward(batch, None, slice(1, None))
    assert rows.tolist() == [6, 7]
    assert clock.now == pytest.approx(lasts, abs=1e-5)
    assert clock.slept == pytest.approx(max(0.0, lasts - works - 2e-4), abs=1e-5)


def test_an_emulated_model_has_the_small_ones_logits():
    plain = ModelSpec(TINY / "draft", "float32").load()
    slow = ModelSpec(TINY / "draft", "float32", latency=Latency((1,), (0.001,))).load()
    batch = TokenBatch.causal([(0, 0, [1, 2, 3])])
    logits = [model.forward(batch, model.new_cache(1, 8)) for model in (plain, slow)]
    assert torch.equal(*logits)
    assert isinstance(slow, EmulatedModel)
    for name in ("vocabulary", "max_position", "batch_invariant", "weight_bytes", "dtype"):
        assert getattr(slow, name) == getattr(plain, name)


def test_latencies_are_the_profiles_on_the_device():
    found, profile = latencies(LLAMA, 4), load_profile(LLAMA.partition(":")[2])
    for tokens in (1, 24, 300):
        for latency, model in (
            (found.target, profile.verify_idle),
            (found.draft, profile.draft_idle),
        ):
            expected = (
                model.seconds(np.array([tokens]), 4, CONTEXT)[0] - 300e-6
            )  # the host has those
            assert latency.of(tokens) == pytest.approx(expected, rel=0.01)


def test_devices_are_those_of_the_profile():
    assert device_count(LLAMA, drafts=0) == 4
    assert device_count(LLAMA, drafts=1) == 5
    assert device_count(LLAMA, drafts=2) == 6


def test_tuned_parameters_of_the_real_machine_are_not_taken():
    assert load(None, {"devices": LLAMA}).tuned is False
    assert load(None, {"devices": LLAMA, "tuned": True}).tuned is True
    assert load(None, {}).tuned is True


def test_nothing_is_tuned_on_emulated_devices(tmp_path):
    with pytest.raises(UsageError, match="drop --devices"):
        tune(load(None, {"devices": LLAMA, "pair": "tiny"}), 100, tmp_path / "out", lambda: None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("devices", ["h100", "emulated:", "emulated:h100x5"])
def test_devices_that_are_not_known_are_named_before_a_download(devices):
    with pytest.raises(UsageError, match=r"devices|profile"):
        check_methods(load(None, {"devices": devices, "methods": ["ar"]}))


def test_an_emulated_run_says_so_and_is_no_equal_of_a_measured_one():
    emulated, real = (
        identity(load(None, changes))["fingerprint"] for changes in ({"devices": LLAMA}, {})
    )
    assert "emulated" not in real
    assert any("emulated" in line for line in differences(real, emulated))
    assert emulated_devices({"fingerprint": real}) is None
    assert emulated_devices({"fingerprint": emulated}) == "h100x4+1-llama-3.1-70b"
    assert any("EMULATED" in line for line in _machine_warnings({"fingerprint": emulated}))
