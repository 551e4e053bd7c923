"""Run directories of older schemas, `tests/data/run-schema-N`.

Schema 1 was written by revision ad1749e, schema 2 by 482ed79.
"""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from harness.errors import StoreError
from harness.fingerprint import identity
from harness.invariants import span_faults
from harness.schemas import rounds_schema
from harness.store import RunStore, read_manifest, read_run
from harness.summary import placement_convention, summarise
from reports.page import build

DATA = Path(__file__).parents[1] / "data"
LACKING = {1: {"hit_chance", "rank", "transfer_ns"}, 2: {"transfer_ns"}}  # of rounds.parquet


@pytest.fixture
def old(tmp_path):
    return Path(shutil.copytree(DATA / "run-schema-1", tmp_path / "old"))


@pytest.mark.parametrize("schema", LACKING)
def test_the_old_run_really_is_of_the_old_form(schema):
    stored = DATA / f"run-schema-{schema}"
    assert json.loads((stored / "manifest.json").read_text())["schema"] == schema
    assert (
        set(rounds_schema().names) - set(pq.read_schema(stored / "rounds.parquet").names)
        == LACKING[schema]
    )


@pytest.mark.parametrize("schema", LACKING)
def test_the_spans_of_an_old_run_add_up_and_its_report_says_what_they_lack(schema, tmp_path):
    stored = DATA / f"run-schema-{schema}"
    run = read_run(stored)
    assert run.manifest["schema"] == 3
    assert run.rounds["transfer_ns"].isna().all()
    assert list(span_faults(run.rounds)) == []
    (ssd,) = (cell for cell in summarise(run)["cells"] if cell["method"] == "ssd")
    assert ssd["transfer_ms"] is None
    assert ssd["verify_ms"] > 0
    assert ssd["prediction"]["wait_on_hit"] > 0
    page = build([stored], tmp_path / "report.html").read_text()
    assert "this run is from before it was told apart, and has it in wait" in page


def test_a_run_of_schema_1_reads_as_one_of_today(old):
    run = read_run(old)
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
    assert json.loads((old / "manifest.json").read_text())["schema"] == 3
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
