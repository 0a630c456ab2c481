"""`trackbed export packed-parquet`: where the file is, what it says, and what it refuses."""

import json

import pyarrow.parquet as pq
import pytest

from tests.support.files.blends import EOD, write_pair

BLEND = """\
version = 1
sequence_length = 16
order = "packed"
split = "8,2"
size = {train = 40, valid = 5}
tokenizer = {eod = 100, vocab_size = 101}
options = {pack_multiple = 2}
[[dataset]]
path = "pair"
weight = 1
"""


@pytest.fixture
def blend(tmp_path):
    write_pair(tmp_path / "pair", [length % 14 + 2 for length in range(400)])
    (tmp_path / "blend.toml").write_text(BLEND)
    return tmp_path / "blend.toml"


def test_a_split_is_written_into_a_folder_under_the_name_of_megatron_bridge(run, blend, tmp_path):
    found = run("export", "packed-parquet", "blend.toml", "--output", "packs")
    assert found.exit_code == 0
    path = tmp_path / "packs" / "training_16.idx.parquet"
    assert found.stdout.startswith("packs/training_16.idx.parquet: 40 packs of ")
    assert f"{path.stat().st_size:,} bytes" in found.stdout
    rows = pq.read_table(path).to_pylist()
    assert len(rows) == 40
    assert {row["input_ids"][-1] for row in rows} == {EOD}
    assert json.loads((path.parent / "training_16.metadata.json").read_text())[0]["pack_size"] == 16
    assert run("export", "packed-parquet", "blend.toml", "--output", "packs", "--split", "valid").exit_code == 0
    assert pq.read_metadata(path.parent / "validation_16.idx.parquet").num_rows == 5


def test_some_samples_are_written_into_a_file(run, blend, tmp_path):
    assert run("export", "packed-parquet", "blend.toml", "--output", "a.idx.parquet", "--samples", 3).exit_code == 0
    assert pq.read_metadata(tmp_path / "a.idx.parquet").num_rows == 3


def test_labels_that_megatron_bridge_leaves_out_are_a_warning(run, blend):
    """Documents that end in another token than the stated one, which they have inside."""
    found = run("export", "packed-parquet", "blend.toml", "--output", "packs", "--eos-id", 7)
    assert "warning: Megatron-Bridge leaves" in found.stderr
    assert "documents that do not end in one end token" in found.stderr
    assert "warning" not in run("export", "packed-parquet", "blend.toml", "--output", "others").stderr


def test_what_cannot_be_exported_is_refused(run, blend, tmp_path):
    export = ("export", "packed-parquet", "blend.toml", "--output")
    found = run(*export, "a.parquet")
    assert (found.exit_code, "must be a folder or end in .idx.parquet" in found.stderr) == (2, True)
    found = run(*export, "packs", "--samples", 41)
    assert (found.exit_code, "--samples must be at most 40, the samples of train, found" in found.stderr) == (
        1,
        True,
    )
    (tmp_path / "training.idx.parquet").write_text("mine")
    found = run(*export, "training.idx.parquet")
    assert (found.exit_code, "training.idx.parquet: the file must not exist yet" in found.stderr) == (1, True)
    assert (tmp_path / "training.idx.parquet").read_text() == "mine"
    blend.write_text(BLEND.replace('"packed"', '"instant"').replace("options = {pack_multiple = 2}\n", ""))
    found = run(*export, "packs")
    assert (found.exit_code, "order must be 'packed' to export packs, found 'instant'" in found.stderr) == (1, True)
    assert not (tmp_path / "packs").exists()
