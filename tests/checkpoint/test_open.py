"""Parts of a checkpoint, and checks of all of it."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.testing._internal.distributed.fake_pg as fake_pg
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from trackbed.checkpoint import ShardedObject, ShardedTensor, find_damage, open_checkpoint, save
from trackbed.comm import run_ranks
from trackbed.errors import ArgumentError, CheckpointError

NUMBERS = torch.arange(2 * 6 * 5, dtype=torch.int32).view(2, 6, 5)


@pytest.fixture
def checkpoint(tmp_path):
    def work(group):
        half = NUMBERS[:, group.rank * 3 : group.rank * 3 + 3]
        entry = ShardedTensor.from_rank_offsets("w", half, (1, group.rank, 2))
        place = ShardedObject("o", {"rank": group.rank}, (2,), (group.rank,))
        save({"w": entry, "o": place, "step": 4}, tmp_path / "checkpoint", group=group)

    run_ranks(2, work)
    return tmp_path / "checkpoint"


@pytest.mark.parametrize(
    "index",
    [
        ...,
        0,
        -1,
        (1, 2),
        (slice(None), 3),
        (slice(0, 2), slice(2, 5), slice(1, -1)),
        (..., 4),
        (0, ..., slice(3, 3)),
        (1, 5, 4),
    ],
)
def test_a_part_is_read_as_from_a_tensor(checkpoint, index):
    part = open_checkpoint(checkpoint)["w"][index]
    assert part.dtype == torch.int32
    assert torch.equal(part, NUMBERS[index])


def test_a_tensor_is_filled_where_it_lies(checkpoint):
    opened, target = open_checkpoint(checkpoint), torch.zeros(6, 2, 5, dtype=torch.int32).transpose(0, 1)
    opened["w"].fill(target)
    assert torch.equal(target, NUMBERS)
    for wrong, words in (
        (torch.zeros(2, 6, 4, dtype=torch.int32), "must have the shape"),
        (torch.zeros(2, 6, 5, dtype=torch.int8), "is stored in torch.int32, but the tensor to fill is of torch.int8"),
        (torch.zeros(2, 6, 5, dtype=torch.int64), "but the tensor to fill is of torch.int64"),
        (torch.zeros(1, dtype=torch.int32).expand(2, 6, 5), "is expanded"),
        (torch.zeros(2, 6, 5, dtype=torch.int32, device="meta"), "lies on the meta device"),
    ):
        with pytest.raises(CheckpointError, match=f"w: .*{words}"):
            opened["w"].fill(wrong)


def test_the_own_part_of_a_dtensor_is_filled_without_the_other_ranks(checkpoint):
    store = fake_pg.FakeStore()
    for rank in range(2):
        dist.init_process_group("fake", rank=rank, world_size=2, store=store)
        try:
            mesh = init_device_mesh("cpu", (2,))
            target = DTensor.from_local(
                torch.zeros(2, 6, 3 - rank, dtype=torch.int32),
                mesh,
                [Shard(2)],
                run_check=False,
                shape=NUMBERS.shape,
                stride=NUMBERS.stride(),
            )
            open_checkpoint(checkpoint)["w"].fill(target)
            assert torch.equal(target.to_local(), NUMBERS[:, :, :3] if rank == 0 else NUMBERS[:, :, 3:])
        finally:
            dist.destroy_process_group()


def test_what_is_there_is_listed(checkpoint):
    opened = open_checkpoint(checkpoint)
    assert list(opened) == ["w"]
    assert (opened["w"].shape, opened["w"].dtype, len(opened)) == ((2, 6, 5), torch.int32, 1)
    assert opened.object_keys == ["o/shard_0_2", "o/shard_1_2"]
    assert opened.load_object("o/shard_1_2") == {"rank": 1}
    assert opened.load_common() == {"step": 4}
    for missing in (lambda: opened["v"], lambda: opened.load_object("v")):
        with pytest.raises(KeyError, match="v"):
            missing()


@pytest.mark.parametrize(
    ("index", "error"),
    [
        ((slice(None, None, 2),), ArgumentError),
        ((0, 0, 0, 0), ArgumentError),
        ((..., ...), ArgumentError),
        (None, ArgumentError),
        (True, ArgumentError),
        (2, IndexError),
        ((0, -7), IndexError),
    ],
)
def test_other_indices_are_refused(checkpoint, index, error):
    with pytest.raises(error, match=r"^w: "):
        open_checkpoint(checkpoint)["w"][index]


def test_an_intact_checkpoint_has_no_damage(checkpoint):
    read = []
    assert list(find_damage(checkpoint, read.append)) == []
    assert sum(read) == sum(file.stat().st_size for file in checkpoint.iterdir() if file.name != "trackbed.extents")


def test_damage_of_any_byte_is_found_with_the_name_of_the_file(checkpoint):
    for file in sorted(checkpoint.iterdir()):
        content = file.read_bytes()
        for place in range(0, len(content), 13):
            file.write_bytes(content[:place] + bytes([content[place] ^ 0x40]) + content[place + 1 :])
            assert any(file.name in text for text in find_damage(checkpoint))
        file.write_bytes(content[:-1])
        assert any(file.name in text for text in find_damage(checkpoint))
        file.write_bytes(content)
    assert list(find_damage(checkpoint)) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_damage_of_what_torch_saves_is_found(tmp_path):
    path = tmp_path / "torchs"
    numbers = torch.arange(5000.0)
    dcp.save({"w": numbers}, checkpoint_id=str(path), no_dist=True)
    assert list(find_damage(path)) == []
    (file,) = path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    place = content.index(numbers[100:104].numpy().tobytes())
    content[place] ^= 1
    file.write_bytes(content)
    (text,) = find_damage(path)
    assert text.startswith(f"{file.name}: w: the checksum of ")
    with pytest.raises(CheckpointError, match=f"{file.name}: w: the checksum"):
        open_checkpoint(path)["w"][:3]


def test_what_is_no_checkpoint_is_named(tmp_path):
    for path, found in ((tmp_path, ".metadata cannot be read"), (tmp_path / "missing", "there is no such folder")):
        (text,) = find_damage(path)
        assert text.startswith(f"{path}: must be a distributed checkpoint, but {found}")
