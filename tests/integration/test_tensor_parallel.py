"""A target on two ranks, real processes over gloo: the same logits and token ids as on one.

In float32 on the `tiny` pair, where the order of a sum changes a logit's last bits only.
"""

import os
import signal
import time
from datetime import timedelta
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
import torch
from click.testing import CliRunner
from fixed_logits import Pair, decode, emitted

from baselines.ar import AutoregressiveDecoder
from harness import registry
from harness.cli import cli
from harness.decoder import Request, Round
from harness.errors import ModelError, TargetRankError
from harness.store import read_run
from impl.engine.models import Models, ModelSpec, RankPlace
from impl.engine.process_group import join_group
from impl.engine.tensor_parallel.messages import Forward
from impl.engine.tensor_parallel.model import TensorParallelModel
from impl.engine.token_batch import Segment, TokenBatch
from impl.engine.token_tree import TokenTree

TINY = Path(__file__).parents[2] / "harness" / "tiny"
WHOLE = ModelSpec(TINY / "target", "float32")
SHARED = ModelSpec(TINY / "target", "float32", other_ranks=(RankPlace("cpu", (0,)),))
DRAFT = ModelSpec(TINY / "draft", "float32")
SOON_S = 10.0
REQUESTS = [
    Request(f"r{i}", tuple(range(3 + i, 8 + 7 * i)), 4 + 3 * (i % 3)) for i in range(5)
]  # prompts of 5 to 29 tokens; slots free up at different times


@pytest.fixture(scope="module")
def whole():
    return WHOLE.load()


@pytest.fixture(scope="module")
def models():
    models = Models(SHARED, DRAFT)
    yield models
    models.target().close()


@pytest.fixture(scope="module")
def shared(models) -> TensorParallelModel:
    return models.target()


@pytest.fixture(scope="module")
def expected():
    """What AR emits on one rank, each request alone."""
    return emitted(decode(Pair(Models(WHOLE, DRAFT), max_context=128).ar(), REQUESTS))


def assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert logits.shape == expected.shape
    assert float((logits - expected).abs().max()) < 1e-4


# --- passes --------------------------------------------------------------------------------------


def test_logits_of_prompts_steps_and_chosen_rows(whole, shared):
    ours, theirs = shared.new_cache(3, 64), whole.new_cache(3, 64)
    shared.prefill(ours, 2, range(10, 30))
    whole.prefill(theirs, 2, range(10, 30))
    batch = TokenBatch.causal([(2, 20, [5, 6, 7]), (0, 0, [9, 8])])
    for rows in (slice(None), torch.tensor([1, 4]), slice(2, 3)):
        assert_same(shared.forward(batch, ours, rows), whole.forward(batch, theirs, rows))


def test_a_branch_of_a_tree_goes_on_after_the_others_are_dropped(whole, shared):
    """Nodes 0 - 1 - 3 and 0 - 2 - 4; cells 2 and 4 are settled behind node 0, then one more."""
    steps = []
    for model in (shared, whole):
        cache = model.new_cache(2, 64)
        model.prefill(cache, 1, range(40, 50))
        tree = TokenTree(10, 8)
        for token, parent in [(1, -1), (2, 0), (3, 0), (4, 1), (5, 2)]:
            tree.add(token, parent)
        segment = Segment(1, 10, 5, tree.mask(0))
        batch = TokenBatch.pack(tree.tokens, tree.positions(0), [segment])
        scored = model.forward(batch, cache)
        cache.truncate(1, 11)
        cache.gather(1, [12, 14])
        step = model.forward(TokenBatch.causal([(1, 13, [6])]), cache)
        steps.append((scored, step))
    for ours, theirs in zip(*steps, strict=True):
        assert_same(ours, theirs)


def test_what_a_model_says_of_itself_is_said_of_the_whole(whole, shared):
    for name in ("vocabulary", "max_position", "dtype", "device", "weight_bytes"):
        assert getattr(shared, name) == getattr(whole, name)
    assert not shared.batch_invariant


def test_the_other_ranks_forget_a_cache_with_the_leader(shared):
    other, batch = psutil.Process(shared.pids[0]), TokenBatch.causal([(0, 0, [1])])
    size = shared.new_cache(16, 4096).bytes
    before = other.memory_info().rss
    for _ in range(6):
        shared.forward(batch, shared.new_cache(16, 4096))
    assert other.memory_info().rss - before < 3 * size


# --- methods -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "batch_size"),
    [
        *((method, size) for method in ("ar", "sd", "tree", "ssd") for size in (1, 3)),
        *((method, 3) for method in ("ngram", "amusd", "pearl")),
    ],
)
def test_every_method_emits_what_it_does_on_one_rank(models, expected, method, batch_size):
    with Pair(models, batch_size, max_context=128).open(method, 4) as decoder:
        assert emitted(decode(decoder, REQUESTS)) == expected


# --- failure -------------------------------------------------------------------------------------


def test_a_rank_that_was_killed_ends_the_call_and_the_next_cell_has_a_new_one(models, expected):
    pair, target = Pair(models, 2, max_context=128), models.target()
    broken, intact = pair.sd(), pair.tree()
    broken.start(REQUESTS[:2])
    broken.step()
    (first,) = target.pids
    os.kill(first, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(TargetRankError, match=rf"^target rank 1 {first}: died .*SIGKILL"):
        broken.step()
    assert time.monotonic() - start < 3 * SOON_S  # a new rank has been started meanwhile
    assert target.pids != [first]
    with pytest.raises(TargetRankError, match="cache was lost with a rank"):
        broken.step()
    assert emitted(decode(intact, REQUESTS)) == expected


def test_a_rank_that_fails_says_why(models, capfd):
    target = models.target()
    cache = target.new_cache(1, 8)
    beyond = TokenBatch.causal([(0, 6, [1, 2, 3])])  # on the other rank alone
    target._others[0].send(Forward.of(target._state(cache), beyond, slice(None)))
    with pytest.raises(TargetRankError, match=r"^target rank 1 \d+: RuntimeError: .*size"):
        target.prefill(cache, 0, [1, 2])


def test_a_rank_that_hangs_is_told_after_a_while_and_close_ends_every_rank(monkeypatch):
    monkeypatch.setattr(join_group, "__defaults__", ("cpu", timedelta(seconds=1)))
    model = TensorParallelModel(SHARED)
    monkeypatch.undo()
    (hanging,) = model.pids
    os.kill(hanging, signal.SIGSTOP)
    with pytest.raises(TargetRankError, match="one hangs"):
        model.prefill(model.new_cache(1, 8), 0, [1, 2])
    (successor,) = model.pids
    assert successor != hanging
    model.close()
    assert not any(map(psutil.pid_exists, (hanging, successor)))


def test_a_model_that_cannot_be_shared_out_starts_nothing():
    children = psutil.Process().children()
    spec = ModelSpec(TINY / "target", "float32", other_ranks=(RankPlace("cpu", (0,)),) * 2)
    with pytest.raises(ModelError, match="target_devices: 3 devices cannot share"):
        spec.execution()
    assert psutil.Process().children() == children


# --- a run ---------------------------------------------------------------------------------------


class Severed(AutoregressiveDecoder):
    """Loses a rank in the first step that is measured."""

    name: ClassVar[str] = "severed"

    def step(self) -> list[Round]:
        target = self.verifier.target
        if not self.slots.live()[0].request.request_id.startswith("warm-up"):
            os.kill(target.pids[0], signal.SIGKILL)
        return super().step()


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs `ar`, `sd` and others in this process; cores and threads are as before behind it."""
    found = registry.entry_points(group=registry.GROUP)
    severed = EntryPoint("severed", f"{__name__}:Severed", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda **_: EntryPoints([*found, severed]))
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()

    def command(*arguments):
        out = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        fixed = ("run", "--no-isolate", "--no-verify", "--no-control", "--pair", "tiny")
        small = ("--dtype", "float32", "--prompts", "2", "--max-new-tokens", "8")
        result = CliRunner().invoke(cli, [*fixed, *small, *arguments, "--out", str(out)])
        return result, read_run(out)

    yield command
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


def test_a_run_on_two_devices_goes_on_when_a_rank_was_killed(run):
    if (os.cpu_count() or 1) < 2:
        pytest.skip("this machine has one core")
    grid = ("--methods", "ar,sd,severed", "--block-size", "1")
    result, stored = run(*grid, "--target-devices", "cpu,cpu")
    assert result.exit_code == 1, result.output
    (failure,) = stored.manifest["failures"]
    assert failure["item"] == "severed/mini/t0/b1/r0/k0"
    assert failure["error"] == "TargetRankError"
    assert failure["message"].startswith("target rank 1 ")
    assert "killed by SIGKILL" in failure["message"]
    assert stored.manifest["decoders"]["ar/mini/t0/b1"]["devices"] == 2
    _, alone = run("--methods", "ar")
    texts = {row.prompt_index: list(row.output_ids) for row in alone.requests.itertuples()}
    assert sorted(
        (row.method, row.prompt_index, list(row.output_ids)) for row in stored.requests.itertuples()
    ) == sorted((method, index, ids) for method in ("ar", "sd") for index, ids in texts.items())
