"""Folders that are another checkpoint than was opened or described, and files of another format, are named as such."""

import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat

import trackbed
from trackbed.checkpoint import ShardedObject, ShardedTensor, find_damage, latest_checkpoint, load, open_checkpoint
from trackbed.checkpoint.save import save
from trackbed.comm import SOLO
from trackbed.errors import CheckpointError
from trackbed.megatron.checkpoints import serialization


def state(value=1.0, shape=(4,)):
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full(shape, value)),
        "o": ShardedObject("o", {"value": value}, (1,), (0,)),
        "step": int(value),
    }


def saved_by_torch(value, folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": value}, storage_writer=dcp.FileSystemWriter(str(folder), **options), no_dist=True)


READS = {
    "a tensor": lambda opened: opened["w"][...],
    "a part of a tensor": lambda opened: opened["w"][1:2],
    "an object": lambda opened: opened.load_object("o/shard_0_1"),
    "plain values": lambda opened: opened.load_common(),
}


@pytest.mark.parametrize("shape", [(4,), (400,)])
@pytest.mark.parametrize("read", READS)
def test_a_checkpoint_that_was_replaced_while_it_is_open_is_named(read, shape, tmp_path):
    save(state(1.0), tmp_path / "step", group=SOLO)
    opened = open_checkpoint(tmp_path / "step")
    save(state(2.0, shape), tmp_path / "step", group=SOLO)
    with pytest.raises(
        CheckpointError, match=r"that was opened, but has been replaced by another save since: open it again"
    ):
        READS[read](opened)
    assert READS[read](open_checkpoint(tmp_path / "step")) is not None


@pytest.mark.parametrize("read", READS)
def test_a_checkpoint_that_was_removed_while_it_is_open_is_named(read, tmp_path):
    save(state(), tmp_path / "step", group=SOLO)
    opened = open_checkpoint(tmp_path / "step")
    shutil.rmtree(tmp_path / "step")
    with pytest.raises(CheckpointError, match="but has been removed since"):
        READS[read](opened)


def test_a_checkpoint_that_is_damaged_is_still_called_so(tmp_path):
    save(state(), tmp_path / "step", group=SOLO)
    opened = open_checkpoint(tmp_path / "step")
    path = tmp_path / "step" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[64] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="the file is damaged"):
        opened["w"][...]
    (tmp_path / "step" / "trackbed.extents").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="the file is damaged"):
        opened["w"][...]


@pytest.mark.parametrize("size", [4, 400])
def test_a_folder_over_which_torch_has_saved_is_named_and_read_as_advised(size, tmp_path):
    folder = tmp_path / "step-1"
    save(state(), folder, group=SOLO)
    saved_by_torch(torch.full((size,), 7.0), folder)
    wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(size))}
    words = (
        r"another program has saved here since: remove trackbed\.extents, common\.pt, metadata\.json \(from the earlier"
    )
    for call in (
        lambda: open_checkpoint(folder),
        lambda: load(folder, group=SOLO),
        lambda: load(wanted, folder, group=SOLO),
    ):
        with pytest.raises(CheckpointError, match=words):
            call()
    assert latest_checkpoint(tmp_path) is None
    assert any("another program" in str(damage) for damage in find_damage(folder))
    for name in ("trackbed.extents", "common.pt", "metadata.json"):
        (folder / name).unlink()
    assert load(wanted, folder, group=SOLO)["w"].tolist() == [7.0] * size
    assert latest_checkpoint(tmp_path) == folder


def test_files_that_another_program_has_written_anew_are_not_to_be_removed(tmp_path):
    save(state(), tmp_path / "step", group=SOLO)
    saved_by_torch(torch.ones(9), tmp_path / "step")
    (tmp_path / "step" / "common.pt").write_bytes(b"new")
    with pytest.raises(CheckpointError, match=r"remove trackbed\.extents, metadata\.json \(from"):
        open_checkpoint(tmp_path / "step")


@pytest.mark.parametrize("damage", [b"", b"damaged"])
def test_a_description_that_is_damaged_is_not_taken_for_another_save(damage, tmp_path):
    save(state(), tmp_path / "step", group=SOLO)
    (tmp_path / "step" / ".metadata").write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"\.metadata: must have .* bytes, as trackbed\.extents says"):
        open_checkpoint(tmp_path / "step")


def test_a_checkpoint_of_torch_in_the_format_of_safetensors_is_named(tmp_path):
    saved_by_torch(torch.ones(2, 2), tmp_path / "step", serialization_format=SerializationFormat.SAFETENSORS)
    words = r"w: must be written by torch\.save, but the file is in the format of safetensors"
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path / "step")["w"][...]
    with pytest.raises(CheckpointError, match=words):
        load({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2, 2))}, tmp_path / "step", group=SOLO)


def test_a_folder_of_safetensors_is_read(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"w": torch.ones(2)}, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "step")), no_dist=True
        )
    assert open_checkpoint(tmp_path / "step")["w"][...].tolist() == [1.0, 1.0]


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no volume is mounted there")
def test_a_folder_at_which_a_volume_is_mounted_is_refused_before_anything_is_written():
    before = set(Path("/dev/shm").iterdir())
    for function in (
        lambda folder: save(state(), folder, group=SOLO),
        lambda folder: serialization.save(state(), folder),
    ):
        with pytest.raises(
            CheckpointError, match=r"a volume is mounted at /dev/shm: save into a folder below it, such as"
        ):
            function("/dev/shm")
    assert {name for name in set(Path("/dev/shm").iterdir()) - before if "partial" in name.name} == set()


@pytest.mark.parametrize("name", ["x" * 200, "x" * 240, "x" * 255, "é" * 127, "step-" + "0" * 245])
def test_names_of_up_to_255_bytes_are_saved(name, tmp_path):
    save(state(), tmp_path / name, group=SOLO)
    save(state(2.0), tmp_path / name, group=SOLO)
    assert load(tmp_path / name, group=SOLO)["step"] == 2


@pytest.mark.parametrize(("name", "count"), [("x" * 256, 256), ("é" * 128, 256), ("x" * 1000, 1000)])
def test_a_longer_name_is_refused_with_the_longest_that_works(name, count, tmp_path):
    for function in (
        lambda folder: save(state(), folder, group=SOLO),
        lambda folder: serialization.save(state(), folder),
    ):
        with pytest.raises(CheckpointError, match=f"must have at most 255 bytes, but has {count}"):
            function(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_torch_converts_a_checkpoint_to_names_without_levels(tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    trackbed.save(trackbed.sharded_state(module), tmp_path / "step")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(str(tmp_path / "step"), str(tmp_path / "step.pt"))
    flat = torch.load(tmp_path / "step.pt")
    torch.nn.Sequential(torch.nn.Linear(2, 2)).load_state_dict(
        {name.removeprefix("model."): value for name, value in flat.items() if name.startswith("model.")}
    )
    assert Path(tmp_path / "step.pt").exists()
