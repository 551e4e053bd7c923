"""Sources of datasets: snapshots of the hub, GitHub files, unpinned files, hostile ones.

The hub and GitHub are stood in for: nothing leaves the machine.
"""

import gzip
import hashlib
import io
import json
import urllib.error
import urllib.request

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from harness import dataset_files, dataset_sources
from harness.dataset_registry import DatasetRegistry, load_registry
from harness.errors import DatasetError
from harness.prompts import load_prompts

COMMIT = "1" * 40
HUB = {"kind": "hub", "repo": "a/b", "path": "data/x.parquet"}
GITHUB = {"kind": "github", "repo": "a/b", "revision": COMMIT, "path": "data/x.jsonl"}


def registry_of(*sources, **more):
    entry = {"description": "d", "licence": "MIT", "category": "math", "sources": list(sources)}
    way = {} if {"turns", "conversation"} & more.keys() else {"prompt": "{q}"}
    return DatasetRegistry.model_validate({"datasets": {"sums": {**entry, **way, **more}}})


def texts(prompts):
    ordered = sorted(prompts.prompts, key=lambda prompt: prompt.index)
    return [prompt.messages[-1].content for prompt in ordered]


def parquet(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(records)), path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub whose cache is empty and that serves `hub.file`; says what it was asked for."""

    class Hub:
        file = tmp_path / "blob.parquet"
        calls: list[tuple[str, ...]] = []  # noqa: RUF012
        failure = None

    def download(repo, path, *, repo_type, revision, local_files_only=False):
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        Hub.calls.append((repo, path, repo_type, revision))
        return str(Hub.file)

    def info(self, repo, *, revision, timeout):
        if Hub.failure:
            raise Hub.failure
        return huggingface_hub.hf_api.DatasetInfo(
            id=repo, sha=revision.replace("main", "c0ffee"), tags=[], private=False,
            downloads=0, likes=0, disabled=False, gated=False,
        )  # fmt: skip

    Hub.calls = []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    return Hub


class TestHub:
    def test_a_file_is_fetched_at_its_commit_checked_and_read_by_datasets(self, tmp_path, hub):
        digest = parquet(hub.file, {"q": "1+1?"}, {"q": "2+2?"}, {"q": "3+3?"})
        source = {**HUB, "revision": COMMIT, "sha256": digest}
        got = load_prompts("sums", registry=registry_of(source, rows=2), cache_dir=tmp_path / "c")
        assert texts(got) == ["1+1?", "2+2?"]
        assert hub.calls == [("a/b", "data/x.parquet", "dataset", COMMIT)]
        assert (got.source, got.pinned) == (f"hub a/b@{COMMIT[:12]}", True)

        bad = registry_of({**source, "sha256": "0" * 64})
        with pytest.raises(DatasetError, match=f"sha256 is {digest}, .* expects {'0' * 64}"):
            load_prompts("sums", registry=bad, cache_dir=tmp_path / "c")

    def test_a_snapshot_under_the_data_dir_needs_no_hub(self, tmp_path, hub):
        hub.failure = AssertionError("asked")
        place = tmp_path / "datasets--a--b" / "snapshots" / COMMIT / "data/x.parquet"
        parquet(place, {"q": "1+1?"})
        pinned = registry_of({**HUB, "revision": COMMIT})
        places = {"data_dir": tmp_path, "cache_dir": tmp_path / "cache"}
        assert texts(load_prompts("sums", registry=pinned, **places)) == ["1+1?"]
        other = registry_of({**HUB, "revision": "2" * 40})
        with pytest.raises(DatasetError, match=r"hub a/b@222222222222: not in the hub"):
            load_prompts("sums", registry=other, offline=True, **places)

    def test_gated_and_unknown_repositories_say_what_to_do(self, tmp_path, hub):
        httpx = huggingface_hub.utils.httpx

        answer = httpx.Response(401, request=httpx.Request("GET", "https://x"))
        registry = registry_of({**HUB, "revision": COMMIT})
        for failure in (
            huggingface_hub.errors.GatedRepoError("gated", response=answer),
            huggingface_hub.errors.RepositoryNotFoundError("401", response=answer),
        ):
            hub.failure = failure
            with pytest.raises(DatasetError, match=r"huggingface\.co/datasets/a/b .*HF_TOKEN"):
                load_prompts("sums", registry=registry, cache_dir=tmp_path)

    def test_damaged_parquet(self, tmp_path, hub):
        hub.file.write_bytes(b"PAR1 nonsense")
        with pytest.raises(DatasetError, match=r"blob\.parquet: is no Parquet file"):
            load_prompts("sums", registry=registry_of({**HUB, "revision": COMMIT}))


class TestGithub:
    def test_a_file_is_fetched_once_at_its_commit(self, tmp_path, monkeypatch):
        asked = []

        def urlopen(url, timeout):
            asked.append(url)
            return io.BytesIO(b'{"q": "1+1?"}\n')

        monkeypatch.setattr(urllib.request, "urlopen", urlopen)
        for _ in range(2):
            got = load_prompts("sums", registry=registry_of(GITHUB), cache_dir=tmp_path)
            assert (texts(got), got.pinned) == (["1+1?"], True)
        assert asked == [f"https://raw.githubusercontent.com/a/b/{COMMIT}/data/x.jsonl"]

    def test_alpaca_is_read_from_eagles_file_by_its_own_names(self, tmp_path, monkeypatch):
        lines = b'{"turns": ["Name a boat."], "category": ""}\n{"turns": ["Why?"]}\n'
        monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(lines))
        with pytest.raises(DatasetError, match="the registry expects 8ad3e5a7fc61b88d"):
            load_prompts("alpaca", cache_dir=tmp_path)
        shipped = load_registry().datasets["alpaca"]
        eagle = shipped.sources[-1].model_copy(update={"sha256": hashlib.sha256(lines).hexdigest()})
        entry = shipped.model_copy(update={"sources": (eagle,)})
        registry = DatasetRegistry(datasets={"alpaca": entry})
        got = load_prompts("alpaca", registry=registry, cache_dir=tmp_path)
        assert texts(got) == ["Name a boat.", "Why?"]
        assert [prompt.category for prompt in got.prompts] == ["chat", "chat"]

    def test_unreachable(self, tmp_path, monkeypatch):
        def urlopen(url, timeout):
            raise urllib.error.URLError("no route")

        monkeypatch.setattr(urllib.request, "urlopen", urlopen)
        with pytest.raises(DatasetError, match=r"github a/b@111111111111: .*no route"):
            load_prompts("sums", registry=registry_of(GITHUB), cache_dir=tmp_path)


class TestUnpinned:
    def test_the_first_use_is_recorded_and_a_later_change_names_both_sums(self, tmp_path):
        registry = registry_of({"kind": "mirror", "path": "sums.jsonl"})
        assert not registry.datasets["sums"].pinned
        places = {"data_dir": tmp_path, "cache_dir": tmp_path / "cache"}
        path = tmp_path / "sums.jsonl"

        def digest():
            return hashlib.sha256(path.read_bytes()).hexdigest()

        path.write_text('{"q": "1+1?"}\n')
        first = digest()
        assert not load_prompts("sums", registry=registry, **places).pinned
        record = tmp_path / "cache" / "first-use.json"
        assert json.loads(record.read_text()) == {"mirror sums.jsonl": first}
        assert texts(load_prompts("sums", registry=registry, **places)) == ["1+1?"]

        path.write_text('{"q": "1+2?"}\n')
        with pytest.raises(DatasetError) as raised:
            load_prompts("sums", registry=registry, **places)
        for named in (first, digest(), str(record)):
            assert named in str(raised.value)
        record.unlink()
        assert texts(load_prompts("sums", registry=registry, **places)) == ["1+2?"]

    def test_a_branch_of_the_hub_is_unpinned(self, tmp_path, hub):
        digest = parquet(hub.file, {"q": "1+1?"})
        got = load_prompts("sums", registry=registry_of(HUB), cache_dir=tmp_path / "c")
        assert not got.pinned
        assert hub.calls == [("a/b", "data/x.parquet", "dataset", "c0ffee")]
        record = json.loads((tmp_path / "c" / "first-use.json").read_text())
        assert record == {"hub a/b@main data/x.parquet": digest}


class TestFiles:
    def load(self, tmp_path, name, content, **more):
        (tmp_path / name).write_bytes(content)
        registry = registry_of({"kind": "mirror", "path": name}, **more)
        return load_prompts("sums", registry=registry, data_dir=tmp_path, cache_dir=tmp_path)

    def test_a_json_list(self, tmp_path):
        assert texts(self.load(tmp_path, "x.json", b'[{"q": "a"}, {"q": "b"}]')) == ["a", "b"]

    @pytest.mark.parametrize(
        ("name", "content", "reason"),
        [
            ("x.json", b'{"q": "a"}', r"x\.json: must be a list"),
            ("x.json", b'[{"q": "a"}, 5]', r"x\.json record 1: must be a JSON object"),
            ("x.json", b"[", r"x\.json: is no JSON"),
            ("x.jsonl.gz", b"plain", r"x\.jsonl\.gz: is no gzip file"),
            (
                "x.jsonl.gz",
                gzip.compress(b'{"q": "a"}', mtime=0)[:-6],
                r"x\.jsonl\.gz: is no gzip file",
            ),
        ],
    )
    def test_malformed_files(self, tmp_path, name, content, reason):
        with pytest.raises(DatasetError, match=reason) as raised:
            self.load(tmp_path, name, content)
        assert "\n" not in str(raised.value)

    def test_a_file_that_grows_beyond_bounds_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(dataset_files, "MOST_BYTES", 1000)
        with pytest.raises(DatasetError, match="grows to more than"):
            self.load(tmp_path, "x.jsonl.gz", gzip.compress(b" " * 100_000))
        with pytest.raises(DatasetError, match="is larger than"):
            self.load(tmp_path, "x.jsonl", b" " * 1001)


class TestShapes:
    def load(self, tmp_path, *records, **more):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / "x.jsonl").write_text(lines)
        registry = registry_of({"kind": "mirror", "path": "x.jsonl"}, **more)
        return load_prompts("sums", registry=registry, data_dir=tmp_path, cache_dir=tmp_path)

    def test_turns_and_renamed_categories(self, tmp_path):
        got = self.load(
            tmp_path,
            {"kind": "writing", "turns": ["a", "b"]},
            {"kind": "rag", "turns": ["c"]},
            turns="turns", category="{kind}", categories={"writing": "conversation"},
        )  # fmt: skip
        found = sorted((p.index, p.category, p.messages[-1].content) for p in got.prompts)
        assert found == [(0, "conversation", "a"), (1, "conversation", "b"), (2, "rag", "c")]

    @pytest.mark.parametrize("place", ["talk.0", "talk.5", "talk.x", "talk.0.x", "other", "q.deep"])
    def test_a_field_of_another_name_is_there_or_is_told(self, tmp_path, place):
        (tmp_path / "x.jsonl").write_text('{"talk": ["a"], "q": {}}\n')
        source = {"kind": "mirror", "path": "x.jsonl", "renamed": {"q": place}}
        places = {"data_dir": tmp_path, "cache_dir": tmp_path}
        if place == "talk.0":
            assert texts(load_prompts("sums", registry=registry_of(source), **places)) == ["a"]
            return
        with pytest.raises(DatasetError, match=r"x\.jsonl:1: field 'q' must be a text"):
            load_prompts("sums", registry=registry_of(source), **places)

    def test_a_stored_conversation_gives_its_opening(self, tmp_path):
        got = self.load(
            tmp_path,
            {"talk": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"},
                      {"from": "human", "value": "c"}]},
            {"talk": [{"from": "gpt", "value": "starts"}, {"from": "human", "value": "d"}]},
            {"talk": [{"role": "system", "content": "s"}, {"role": "user", "content": "e"}]},
            {"talk": []},
            conversation="talk",
        )  # fmt: skip
        ordered = sorted(got.prompts, key=lambda prompt: prompt.index)
        found = [[(m.role, m.content) for m in prompt.messages] for prompt in ordered]
        assert found == [[("user", "a")], [("system", "s"), ("user", "e")]]

    @pytest.mark.parametrize(
        ("record", "more", "reason"),
        [
            ({"turns": "a"}, {"turns": "turns"}, ":1: field 'turns' must be a list of texts"),
            ({"turns": [None]}, {"turns": "turns"}, ":1: field 'turns' must be a list of texts"),
            ({}, {"conversation": "talk"}, ":1: field 'talk' must be a list of messages"),
            ({"talk": [5]}, {"conversation": "talk"}, r":1: talk\.0: must be a role and a text"),
            ({"talk": [{"from": "x", "value": "a"}]}, {"conversation": "talk"}, r":1: talk\.0"),
            ({"q": 5}, {}, ":1: field 'q' must be a text"),
        ],
    )
    def test_malformed_records_name_file_line_and_field(self, tmp_path, record, more, reason):
        with pytest.raises(DatasetError, match=r"x\.jsonl" + reason):
            self.load(tmp_path, record, **more)


def test_places_have_a_cache_of_their_own():
    assert dataset_sources.Places().cache_dir.name == "saguaro-harness"
