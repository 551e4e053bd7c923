import errno
import json
import shutil

import pandas as pd
import pytest
from fake_decoding import decode, one_token_rounds
from full_disk import full_beyond

from harness import parts
from harness.errors import StoreError
from harness.plan import Cell
from harness.store import RunStore, finished_items, read_run, to_json

AR = Cell("ar", "mini", 0.0, 1)


def item(block=0, **decoder):
    name = f"mini/{block}/r0"
    return decode(AR, {name: one_token_rounds(name, block, 9)}, block=block, **decoder)


ITEMS = ["ar/mini/t0/b1/r0/k0", "ar/mini/t0/b1/r0/k1"]


@pytest.fixture
def running(tmp_path):
    run = RunStore.create(tmp_path / "run", {"command": ["harness", "run"]})
    run.append_item(item(0))
    run.append_item(item(1))
    return run


def outputs(directory):
    run = read_run(directory)
    assert sorted(run.rounds["item"]) == sorted([*run.requests["item"]] * 2)  # two rounds each
    return dict(zip(run.requests["item"], run.requests["output_ids"], strict=True))


BOTH = {ITEMS[0]: [0, 9], ITEMS[1]: [1, 9]}


def test_a_run_reads_the_same_before_and_after_the_merge(running):
    assert outputs(running.directory) == BOTH
    assert finished_items(running.directory) == set(ITEMS)
    running.finalise("finished")
    assert outputs(running.directory) == BOTH
    assert finished_items(running.directory) == set(ITEMS)
    names = {path.name for path in running.directory.iterdir()}
    assert names == {"manifest.json", "requests.parquet", "rounds.parquet"}
    manifest = read_run(running.directory).manifest
    assert (manifest["schema"], manifest["status"]) == (3, "finished")
    assert manifest["command"] == ["harness", "run"]
    assert manifest["created"] <= manifest["ended"]


def test_parts_are_folders_named_by_their_item(running):
    part = running.directory / "parts" / "ar/mini/t0/b1/r0/k1"
    assert {path.name for path in part.iterdir()} == {"requests.parquet", "rounds.parquet"}


def test_columns_keep_their_types_when_they_are_empty(tmp_path):
    run = RunStore.create(tmp_path / "run", {})
    empty = read_run(run.directory)
    run.append_item(item(0))
    full = read_run(run.directory)
    for table in ("requests", "rounds"):
        before, after = getattr(empty, table), getattr(full, table)
        assert len(before) == 0
        assert list(before.columns) == list(after.columns)
    integers = ["prompt_index", "output_tokens", "prefill_ns", "ttft_ns", "decode_ns", "repeat"]
    assert all(empty.requests[name].dtype == "int64" for name in integers)
    assert empty.requests["tpot_ns"].dtype == "float64"
    assert empty.requests["control"].dtype == "bool"
    assert full.rounds["guesses"].dtype == "float64"  # no cache: every value is null
    assert full.rounds["cache"].isna().all()


def test_create_refuses_a_directory_that_holds_something(running, tmp_path):
    with pytest.raises(StoreError, match="is not an empty directory; choose another --out"):
        RunStore.create(running.directory, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="is not an empty directory"):
        RunStore.create(tmp_path / "file", {})
    (tmp_path / "empty").mkdir()
    RunStore.create(tmp_path / "empty", {})


def test_killed_between_the_merge_and_its_commit(running, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "update", killed)
        with pytest.raises(KeyboardInterrupt):
            running.finalise("finished")
    assert (running.directory / "rounds.parquet").exists()
    assert outputs(running.directory) == BOTH
    RunStore.open(running.directory).finalise("finished")
    assert outputs(running.directory) == BOTH


def test_killed_before_the_commit_of_a_second_merge(running, monkeypatch):
    running.finalise("interrupted")
    resumed = RunStore.open(running.directory)
    resumed.append_item(item(2))
    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "update", killed)
        with pytest.raises(KeyboardInterrupt):
            resumed.finalise("finished")
    # the third item is now in the merged tables, uncommitted, and still a part: read once
    assert outputs(running.directory) == BOTH | {"ar/mini/t0/b1/r0/k2": [2, 9]}
    assert len(read_run(running.directory).requests) == 3


def test_killed_between_the_two_tables(running, monkeypatch):
    real = parts.write_table
    with monkeypatch.context() as patch:
        patch.setattr(
            parts, "write_table", lambda t, p: killed() if "rounds" in p.name else real(t, p)
        )
        with pytest.raises(KeyboardInterrupt):
            running.finalise("finished")
    assert outputs(running.directory) == BOTH


def test_killed_while_the_merged_parts_are_removed(running, monkeypatch):
    def half(path):
        for table in (path / ITEMS[0]).glob("requests.parquet"):
            table.unlink()
        killed()

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", half)
        with pytest.raises(KeyboardInterrupt):
            running.finalise("finished")
    assert not (running.directory / "parts" / ITEMS[0] / "requests.parquet").exists()
    assert outputs(running.directory) == BOTH
    assert read_run(running.directory).problems == ()


def test_killed_while_an_item_is_written(running, monkeypatch):
    real = parts.write_table
    with monkeypatch.context() as patch:
        patch.setattr(
            parts, "write_table", lambda t, p: killed() if "rounds" in p.name else real(t, p)
        )
        with pytest.raises(KeyboardInterrupt):
            running.append_item(item(2))
    assert outputs(running.directory) == BOTH
    assert finished_items(running.directory) == set(ITEMS)
    resumed = RunStore.open(running.directory)
    (running.directory / ".partial-manifest.json").write_text("{")
    with resumed.locked():
        assert not list(running.directory.rglob(".partial-*"))
        resumed.append_item(item(2))
        resumed.finalise("finished")
    assert outputs(running.directory) == BOTH | {"ar/mini/t0/b1/r0/k2": [2, 9]}


def test_a_finished_run_can_be_continued(running):
    running.finalise("interrupted")
    resumed = RunStore.open(running.directory)
    resumed.append_item(item(2))
    assert len(outputs(running.directory)) == 3
    resumed.finalise("finished")
    assert len(outputs(running.directory)) == 3
    assert read_run(running.directory).manifest["status"] == "finished"


def test_a_damaged_part_is_named_and_the_others_stay_readable(running):
    damaged = running.directory / "parts" / ITEMS[0] / "rounds.parquet"
    damaged.write_bytes(damaged.read_bytes()[:50])
    run = read_run(running.directory)
    assert list(run.requests["item"]) == list(run.rounds["item"].unique()) == [ITEMS[1]]
    (problem,) = run.problems
    assert problem.startswith(f"{damaged}: cannot be read")
    assert "\n" not in problem
    assert finished_items(running.directory) == {ITEMS[1]}
    running.finalise("finished")
    assert damaged.exists()  # evidence is kept, readable parts are merged
    resumed = RunStore.open(running.directory)
    resumed.append_item(item(0))  # measured again
    resumed.finalise("finished")
    assert outputs(running.directory) == BOTH


def test_damaged_tables_and_manifests_are_errors_that_name_the_file(running):
    running.finalise("finished")
    (running.directory / "rounds.parquet").write_bytes(b"no parquet")
    with pytest.raises(StoreError, match=r"rounds\.parquet: cannot be read"):
        read_run(running.directory)
    for text in ("{", "[]", "{}"):
        (running.directory / "manifest.json").write_text(text)
        with pytest.raises(StoreError, match=r"manifest\.json: is damaged"):
            read_run(running.directory)


def test_a_newer_schema_and_a_foreign_folder_are_refused(running, tmp_path):
    running.update(schema=4)
    told = "has schema 4, this program reads up to 3; update the program"
    with pytest.raises(StoreError, match=told):
        read_run(running.directory)
    running.update(schema="1")
    with pytest.raises(StoreError, match="has schema '1', which never was; the file is damaged"):
        read_run(running.directory)
    with pytest.raises(StoreError, match="is no run directory"):
        read_run(tmp_path)


def test_a_full_disk_is_one_line_that_names_the_place(running, monkeypatch):
    def full(table, path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(parts, "write_table", full)
    with pytest.raises(StoreError, match=r"requests\.parquet: No space left on device"):
        running.append_item(item(2))
    assert outputs(running.directory) == BOTH


@pytest.mark.parametrize("size", [0, 100, 1000])
def test_a_disk_that_fills_while_something_is_written_takes_nothing_with_it(running, size):
    folder = running.directory
    writes = [lambda: running.append_item(item(2)), lambda: running.finalise("finished")]
    if size < (folder / "manifest.json").stat().st_size:
        writes.append(lambda: running.update(status="failed"))
    for write in writes:
        with full_beyond(size), pytest.raises(StoreError) as told:
            write()
        assert str(told.value) == f"{folder}: File too large"
        assert outputs(folder) == BOTH
        assert finished_items(folder) == set(ITEMS)
        assert not list(folder.rglob(".partial-*"))  # it needs the room
    running.append_item(item(2))
    running.finalise("finished")
    assert outputs(folder) == BOTH | {"ar/mini/t0/b1/r0/k2": [2, 9]}


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file.*: Not a directory"):
        RunStore.create(tmp_path / "file" / "run", {})


def test_skipped_requests_are_listed_once_and_their_item_counts_as_finished(tmp_path):
    run = RunStore.create(tmp_path / "run", {})
    run.append_item(item(0, refuses=["mini/0/r0"]))
    run.append_item(item(1))
    sd = Cell("sd", "mini", 0.0, 1)
    run.append_item(decode(sd, {"mini/0/r0": []}, refuses=["mini/0/r0"]))
    run.finalise("finished")
    reason = "prompt of mini/0/r0 is longer than the context"
    expected = [{"request_id": "mini/0/r0", "dataset": "mini", "reason": reason}]
    assert read_run(run.directory).manifest["skipped_requests"] == expected
    assert finished_items(run.directory) == {*ITEMS, "sd/mini/t0/b1/r0/k0"}


def test_json_is_strict(tmp_path):
    run = RunStore.create(
        tmp_path / "run", {"decoders": {"x": {"rate": float("nan"), "ids": (1,)}}}
    )
    text = (run.directory / "manifest.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["decoders"] == {
        "x": {"rate": None, "ids": [1]}
    }
    assert json.loads(to_json([float("inf"), 1.5])) == [None, 1.5]


def test_the_tables_can_be_read_with_pandas_alone(running):
    running.finalise("finished")
    rounds = pd.read_parquet(running.directory / "rounds.parquet")
    assert rounds.groupby("item")["emitted"].sum().to_dict() == dict.fromkeys(ITEMS, 2)


def killed(*_args, **_fields):
    raise KeyboardInterrupt


def at_rounds(write):
    """`write`, killed when it comes to the table of rounds."""
    return lambda table, path: killed() if "rounds" in path.name else write(table, path)
