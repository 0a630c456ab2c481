"""Checkpoints under Megatron Core's module paths: saved and loaded by Trackbed and by Megatron Core."""

from pathlib import Path

import pytest

from tests.support.processes.launching import run_script
from trackbed.checkpoint.copy_checkpoint import copy_checkpoint
from trackbed.checkpoint.io.stored_folder import StoredFolder
from trackbed.checkpoint.ranks import meet
from trackbed.comm import SOLO

HERE = Path(__file__).parent
SHIM = str(HERE / "megatron_lm")
LIMIT_SECONDS = 300


def run(program, action, layout, folder):
    """Runs the ranks of a layout, as many as the product of its numbers. Returns what all of them find."""
    tensor_parallel, pipeline_parallel = map(int, layout.split("x"))
    size = tensor_parallel * pipeline_parallel
    script = HERE / "checkpoint_rank.py"
    found = run_script(script, size, program, action, layout, folder, limit_seconds=LIMIT_SECONDS, PYTHONPATH=SHIM)
    assert found == [found[0]] * size
    return found[0][0]


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded"), [("2x1", "2x2"), ("1x1", "2x1"), ("1x4", "1x1"), ("2x2", "4x1")])
def test_trackbed_loads_what_it_saves_in_another_layout(tmp_path, saved, loaded):
    run("trackbed", "save", saved, tmp_path)
    run("trackbed", "load", loaded, tmp_path)


@pytest.mark.parametrize(
    ("saver", "saved", "loaded"),
    [
        ("trackbed", "2x2", "1x2"),
        pytest.param("megatron", "1x2", "2x2", marks=pytest.mark.slow),
        *(
            pytest.param(saver, *layouts, marks=pytest.mark.slow)
            for saver in ("trackbed", "megatron")
            for layouts in [("2x1", "4x1"), ("1x4", "2x1"), ("4x1", "1x1"), ("1x1", "1x4"), ("2x2", "2x2")]
        ),
    ],
)
def test_both_programs_load_and_list_alike_what_one_of_them_saves(tmp_path, saver, saved, loaded):
    """Fields and calls of requests and distributions are in the same order, too."""
    run(saver, "save", saved, tmp_path)
    assert run("trackbed", "load", loaded, tmp_path) == run("megatron", "load", loaded, tmp_path)


@pytest.mark.slow
def test_megatron_loads_what_was_downloaded_from_a_bucket(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr("trackbed.checkpoint.copy_checkpoint.OBJECT_BYTES", 64)  # tensors are cut
    (tmp_path / "saved").mkdir()
    (tmp_path / "downloaded").mkdir()
    run("trackbed", "save", "2x1", tmp_path / "saved")
    for folder in (tmp_path / "saved").iterdir():
        stored = StoredFolder(bucket.text(folder.name))
        with meet("copy", SOLO) as meeting:
            copy_checkpoint(folder, stored, meeting, lambda save, described: save.commit(described))
        save_id = stored.opened().save_id
        (tmp_path / "downloaded" / folder.name).mkdir()
        for key in list(bucket.keys()):
            if key.startswith(f"{folder.name}/{save_id}/"):
                (tmp_path / "downloaded" / folder.name / key.rpartition("/")[2]).write_bytes(bucket.get(key))
    assert run("megatron", "load", "1x2", tmp_path / "downloaded")
