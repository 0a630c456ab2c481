"""torch's functions for checkpoints, with Trackbed's storage."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import trackbed
from tests.support.processes.launching import run_script
from trackbed.checkpoint import find_damage
from trackbed.checkpoint.dcp import StorageReader, StorageWriter
from trackbed.comm import SOLO
from trackbed.errors import ArgumentError, CheckpointError

RANK = Path(__file__).parent / "dcp_rank.py"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_torchs_functions_save_and_load_through_trackbeds_storage(size, tmp_path):
    found = run_script(RANK, size, tmp_path, limit_seconds=240)
    assert [lines[0] for lines in found] == [
        ["cached", "cached again", "id", "overwritten", "process", "save", "thread"]
    ] * size


def test_a_checkpoint_of_trackbed_is_read_with_its_plain_values(tmp_path):
    state = {"w": trackbed.ShardedTensor.from_rank_offsets("w", torch.arange(6.0)), "list": [1, {"a": torch.ones(2)}]}
    trackbed.save({**state, "step": 3}, tmp_path / "own", group=SOLO)
    request = {"w": torch.zeros(6), "list": [0, {"a": torch.zeros(2)}], "step": 0}
    dcp.load(request, storage_reader=StorageReader(tmp_path / "own"), no_dist=True)
    assert request["w"].tolist() == list(range(6))
    assert (request["step"], request["list"][0], request["list"][1]["a"].tolist()) == (3, 1, [1.0, 1.0])


def test_damage_is_found_by_dcp_load(tmp_path):
    dcp.save({"w": torch.arange(100_000.0)}, storage_writer=StorageWriter(tmp_path / "saved"), no_dist=True)
    (file,) = (tmp_path / "saved").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[200_000] ^= 1
    file.write_bytes(content)
    assert len(list(find_damage(tmp_path / "saved"))) >= 1
    with pytest.raises(dcp.api.CheckpointException, match=r"saved: .*__0_0.distcp: w: the checksum"):
        dcp.load({"w": torch.zeros(100_000)}, storage_reader=StorageReader(tmp_path / "saved"), no_dist=True)


def test_a_folder_with_other_files_and_an_earlier_checkpoint(tmp_path):
    for value in (1.0, 2.0):
        dcp.save({"w": torch.full((3,), value)}, storage_writer=StorageWriter(tmp_path / "saved"), no_dist=True)
    request = {"w": torch.zeros(3)}
    dcp.load(request, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert request["w"].tolist() == [2.0] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("kind", [StorageWriter, StorageReader])
def test_addresses_of_other_kinds_are_refused_and_folders_are_needed(kind):
    with pytest.raises(ArgumentError, match="must have one of the schemes s3, gs, az, found https"):
        kind("https://host/step")
    assert not kind.validate_checkpoint_id("https://host/step")
    assert kind.validate_checkpoint_id("s3://bucket/step")
    assert kind.validate_checkpoint_id("/tmp/x")
    assert not kind.validate_checkpoint_id(3)
    # torch 2.9 hides the error of a reader.
    is_hidden = kind is StorageReader and torch.__version__.startswith("2.9.")
    reason = "metadata is not None" if is_hidden else "must have a folder"
    call, name = (dcp.save, "storage_writer") if kind is StorageWriter else (dcp.load, "storage_reader")
    with pytest.raises(dcp.api.CheckpointException, match=reason):
        call({"w": torch.ones(1)}, **{name: kind()}, no_dist=True)


def test_a_writer_is_pickled_before_it_is_used(tmp_path):
    writer = pickle.loads(pickle.dumps(StorageWriter(tmp_path / "saved", direct=False)))
    dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
    assert torch.equal(trackbed.open_checkpoint(tmp_path / "saved")["w"][:], torch.ones(2))


def test_a_reader_goes_to_another_folder_and_sees_what_is_new(tmp_path):
    trackbed.save({"n": 1, "w": torch.ones(2)}, tmp_path / "a", group=SOLO)
    dcp.save({"n": 2, "w": torch.full((2,), 2.0)}, storage_writer=StorageWriter(tmp_path / "b"), no_dist=True)
    reader = StorageReader()
    for name, value in (("a", 1), ("b", 2), ("a", 1)):
        request = {"n": 0, "w": torch.zeros(2)}
        dcp.load(request, checkpoint_id=tmp_path / name, storage_reader=reader, no_dist=True)
        assert (request["n"], request["w"].tolist()) == (value, [value] * 2)
    reader = StorageReader(tmp_path / "b")
    for value in (3, 4):
        dcp.save({"n": value}, storage_writer=StorageWriter(tmp_path / "b"), no_dist=True)
        request = {"n": 0}
        dcp.load(request, storage_reader=reader, no_dist=True)
        assert request["n"] == value


def test_damage_of_a_value_is_an_error_and_a_class_that_is_not_allowed_is_left_out(tmp_path, caplog):
    dcp.save({"n": list(range(99)), "w": torch.ones(2)}, storage_writer=StorageWriter(tmp_path / "a"), no_dist=True)
    dcp.save({"n": 3, "own": Path("x"), "odd": Odd()}, storage_writer=StorageWriter(tmp_path / "b"), no_dist=True)
    found = trackbed.load(tmp_path / "b", group=SOLO)
    assert (found["n"], "odd" in found) == (3, False)
    assert "an object of the checkpoint is left out" in caplog.text
    (file,) = (tmp_path / "a").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[content.index(b"PK") + 60] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        trackbed.load(tmp_path / "a", group=SOLO)


class Odd:
    """A class that is not allowed."""


def test_nothing_and_values_whose_keys_collide(tmp_path):
    dcp.save({}, storage_writer=StorageWriter(tmp_path / "nothing"), no_dist=True)
    dcp.load({}, storage_reader=StorageReader(tmp_path / "nothing"), no_dist=True)
    assert trackbed.load(tmp_path / "nothing", group=SOLO) == {}
    trackbed.save({"x": {"a.b": 1, "a": {"b": 2}}, "step": 3}, tmp_path / "own", group=SOLO)
    request = {"step": 0}
    dcp.load(request, storage_reader=StorageReader(tmp_path / "own"), no_dist=True)
    assert request["step"] == 3


def test_a_member_of_an_archive_that_is_marked_as_a_folder_is_damage(tmp_path):
    """torch's reader would take memory that nothing has written."""
    dcp.save({"w": torch.full((8,), 7.0)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    (file,) = (tmp_path / "saved").glob("*.distcp")
    content = bytearray(file.read_bytes())
    place = content.rindex(b"PK\1\2", 0, content.rindex(b"archive/data/0"))
    content[place + 38] ^= 0x10
    file.write_bytes(content)
    assert "members must be files, but archive/data/0 is a folder" in next(find_damage(tmp_path / "saved"))
    with pytest.raises(CheckpointError, match="archive/data/0 is a folder"):
        trackbed.open_checkpoint(tmp_path / "saved")["w"][:]
    for share in ((1, 1), (0, 0), (-1, 2)):
        with pytest.raises(ArgumentError, match="share: must be a number from 0 and a larger one"):
            next(find_damage(tmp_path / "saved", share=share))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_types_and_keys_that_no_reader_takes_are_refused_before_anything_is_written(tmp_path):
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    for state, words in (
        ({"q": quantised}, "q: must be of a type that can"),
        ({"a\ud800": torch.ones(1)}, "must be text"),
    ):
        with pytest.raises(dcp.api.CheckpointException, match=words):
            dcp.save({**state, "w": torch.ones(3)}, storage_writer=StorageWriter(tmp_path / "saved"), no_dist=True)
    assert not list(tmp_path.iterdir())


AFTER_FORK = """
import atexit, os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from trackbed.checkpoint.dcp import StorageWriter
folder = sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
writer = StorageWriter()
saves = [dcp.async_save({"w": torch.full((500_000,), one)}, checkpoint_id=f"{folder}/{one:g}", storage_writer=writer)
         for one in (1.0, 2.0, 3.0)]
while not any("partial" in name for name in os.listdir(folder)) and not saves[0].done():
    pass
if os.fork() == 0:
    state = writer.stage({"w": torch.full((500_000,), -1.0)})  # not in the memory of the parent
    atexit._run_exitfuncs()  # as a process that ends does, but for threads of torch's that are not there
    os._exit(0)
os.wait()
for save in saves:
    save.result()
last = dcp.async_save({"w": torch.ones(3)}, storage_writer=StorageWriter(f"{folder}/last"))
"""


def test_saves_in_flight_have_their_own_values_beside_forked_processes_and_at_the_end_of_the_program(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", AFTER_FORK, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads of OpenMP do not outlive a fork
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert found.returncode == 0, found.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "store") == ["1", "2", "3", "last"]
    for name in ("1", "2", "3"):
        assert not list(find_damage(tmp_path / name))
        assert trackbed.open_checkpoint(tmp_path / name)["w"][:].unique().tolist() == [float(name)]
    assert trackbed.open_checkpoint(tmp_path / "last")["w"][:].tolist() == [1.0] * 3
