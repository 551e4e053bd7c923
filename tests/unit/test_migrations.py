"""Run directories of older schemas. `tests/data/run-schema-1` was written by revision ad1749e."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from harness.errors import StoreError
from harness.fingerprint import identity
from harness.store import RunStore, read_manifest, read_run
from harness.summary import placement_convention, summarise

OLD = Path(__file__).parents[1] / "data" / "run-schema-1"


@pytest.fixture
def old(tmp_path):
    return Path(shutil.copytree(OLD, tmp_path / "old"))


def test_the_old_run_really_is_of_the_old_form():
    assert json.loads((OLD / "manifest.json").read_text())["schema"] == 1
    assert not {"hit_chance", "rank"} & set(pq.read_schema(OLD / "rounds.parquet").names)


def test_a_run_of_schema_1_reads_as_one_of_today(old):
    run = read_run(old)
    assert run.manifest["schema"] == 2
    assert run.rounds["rank"].isna().all()
    assert run.rounds["hit_chance"].dtype == "float64"
    assert run.rounds["emitted"].sum() == run.requests["output_tokens"].sum() == 4 * 2 * 16
    assert placement_convention(run.manifest) == "equal-target"
    where = identity(run.manifest["fingerprint"])
    assert where["placement.target_devices"] == ["cpu"]
    assert where["placement.draft_device"] == "cpu"
    speeds = {cell["method"]: cell["tokens_per_s"] for cell in summarise(run)["cells"]}
    assert speeds.keys() == {"ar", "sd", "ssd"}
    assert all(speed > 0 for speed in speeds.values())


def test_reading_changes_nothing_on_disk(old):
    before = {path: path.read_bytes() for path in old.iterdir()}
    read_run(old)
    assert {path: path.read_bytes() for path in old.iterdir()} == before


def test_an_old_run_that_is_written_again_stays_readable(old):
    """`harness verify` adds a certificate: the manifest is of today then, the tables are not."""
    RunStore.open(old).update(certificate={"verdicts": []})
    assert json.loads((old / "manifest.json").read_text())["schema"] == 2
    assert read_run(old).rounds["rank"].isna().all()


def test_a_manifest_without_a_placement_is_read(old):
    manifest = json.loads((old / "manifest.json").read_text())
    del manifest["fingerprint"]
    (old / "manifest.json").write_text(json.dumps(manifest))
    assert read_manifest(old)["fingerprint"] == {}


def test_a_column_that_every_schema_has_may_not_be_absent(old):
    path = old / "rounds.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["emitted"]), path)
    with pytest.raises(StoreError, match=r"rounds\.parquet: .* it has no column emitted"):
        read_run(old)
