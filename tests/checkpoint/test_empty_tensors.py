"""Tensors without elements are stored as torch stores them, and no shape of a wanted tensor is taken for another."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from trackbed.checkpoint import ShardedObject, ShardedTensor, differing_keys, find_damage, load, open_checkpoint
from trackbed.checkpoint.save import save
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import CheckpointError
from trackbed.megatron.checkpoints import serialization
from trackbed.optim import load_sharded_state, sharded_state

SHAPES = [(0,), (0, 4), (4, 0), (2, 0, 3)]


def tensor(shape, **fields):
    return ShardedTensor.from_rank_offsets("w", torch.ones(shape), **fields)


def model_with_empty_tensors():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nn.Sequential(torch.nn.Linear(4, 0), torch.nn.Linear(2, 2))


def without_empty(folder):
    """Makes a checkpoint one as older versions wrote it: tensors without elements are not stored."""
    from trackbed.checkpoint.remove import remove_tensors

    remove_tensors(folder, lambda key: 0 in open_checkpoint(folder)[key].shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint16, torch.bool, torch.float8_e4m3fn])
def test_a_tensor_without_elements_is_stored_and_loaded(shape, dtype, tmp_path):
    folder = tmp_path / "step"
    entry = ShardedTensor.from_rank_offsets("w", torch.empty(shape, dtype=dtype))
    save({"w": entry, "v": ShardedTensor.from_rank_offsets("v", torch.ones(3))}, folder, group=SOLO)
    opened = open_checkpoint(folder)
    assert (opened["w"].shape, opened["w"].dtype, opened["w"][...].shape) == (shape, dtype, torch.Size(shape))
    loaded = load({"w": entry}, folder, group=SOLO)["w"]
    assert (loaded.shape, loaded.dtype) == (torch.Size(shape), dtype)
    assert list(find_damage(folder)) == []


def test_a_checkpoint_of_empty_tensors_alone_is_stored(tmp_path):
    save({"w": tensor((0, 3))}, tmp_path / "step", group=SOLO)
    assert open_checkpoint(tmp_path / "step")["w"].shape == (0, 3)


@pytest.mark.parametrize(
    "make", [lambda: torch.nn.Linear(4, 0), lambda: torch.nn.Embedding(0, 3), lambda: torch.nn.Linear(0, 2)]
)
def test_torch_loads_a_model_with_tensors_without_elements(make, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, again = make(), make()
        save(sharded_state(module), tmp_path / "ours", group=SOLO)
        dcp.load({"model": again.state_dict()}, checkpoint_id=str(tmp_path / "ours"), no_dist=True)
        dcp.save({"model": module.state_dict()}, checkpoint_id=str(tmp_path / "torch"), no_dist=True)
    for folder in ("ours", "torch"):
        assert load_sharded_state(tmp_path / folder, again) == {}
        assert all(torch.equal(again.state_dict()[name], value) for name, value in module.state_dict().items())
    ours, theirs = (dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("ours", "torch"))
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for key, stored in theirs.state_dict_metadata.items():
        assert ours.state_dict_metadata[key].size == stored.size
        assert ours.state_dict_metadata[key].properties.dtype == stored.properties.dtype
        assert [chunk.sizes for chunk in ours.state_dict_metadata[key].chunks] == [
            chunk.sizes for chunk in stored.chunks
        ]


def test_older_checkpoints_without_these_tensors_are_loaded(tmp_path):
    module, again = model_with_empty_tensors(), model_with_empty_tensors()
    save(sharded_state(module), tmp_path / "step", group=SOLO)
    without_empty(tmp_path / "step")
    assert set(open_checkpoint(tmp_path / "step")) == {"model.1.weight", "model.1.bias"}
    load_sharded_state(tmp_path / "step", again)
    assert torch.equal(again[1].weight, module[1].weight)
    assert load({"w": tensor((0, 3))}, tmp_path / "step", group=SOLO)["w"].shape == (0, 3)


def test_the_tensor_is_written_by_one_rank_of_several(tmp_path):
    def on(group):
        state = {"w": tensor((0, 4), replica_id=group.rank), "o": ShardedObject("o", group.rank, (3,), (group.rank,))}
        save(state, tmp_path / "step", group=group)
        assert load({"w": tensor((0, 4), replica_id=group.rank)}, tmp_path / "step", group=group)["w"].shape == (0, 4)

    run_ranks(3, on)
    assert open_checkpoint(tmp_path / "step")["w"].shape == (0, 4)
    assert list(find_damage(tmp_path / "step")) == []


def test_a_rank_without_elements_of_a_tensor_writes_none(tmp_path):
    def part(group, value):
        count = 0 if group.rank == 0 else 4
        return ShardedTensor("w", torch.full((count,), value), torch.float32, (count,), (4,), (0,), None)

    def on(group):
        save({"w": part(group, 3.0)}, tmp_path / "step", group=group)
        assert set(load({"w": part(group, 0.0)}, tmp_path / "step", group=group)["w"].tolist()) <= {3.0}

    run_ranks(2, on)
    assert open_checkpoint(tmp_path / "step")["w"][...].tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize(
    "entry",
    [
        ShardedTensor("w", None, torch.float32, (0,), (0,), (0,), None),
        ShardedTensor("w", torch.zeros(0).to_sparse(), torch.float32, (0,), (0,), (0,), None),
        ShardedTensor("w", torch.zeros(0, device="meta"), torch.float32, (0,), (0,), (0,), None),
    ],
)
def test_entries_that_were_left_out_because_they_are_empty_still_are(entry, tmp_path):
    save({"w": entry, "step": 1}, tmp_path / "step", group=SOLO)
    assert list(open_checkpoint(tmp_path / "step")) == []


OTHER = [
    ((3,), (0,)),
    ((3,), (0, 4)),
    ((3,), (3, 0)),
    ((0,), (3,)),
    ((0, 4), (0,)),
    ((0, 4), (0, 5)),
    ((0, 4), (4, 0)),
    ((2, 3), (6,)),
    ((6,), (2, 3)),
    ((), (0,)),
    ((0,), ()),
    ((1,), ()),
]


@pytest.mark.parametrize(("stored", "wanted"), OTHER)
def test_another_shape_than_the_stored_one_is_refused_by_key(stored, wanted, tmp_path):
    save({"w": tensor(stored)}, tmp_path / "step", group=SOLO)
    for strict in ("raise", "log", "ignore"):
        with pytest.raises(CheckpointError, match=r"w: must have the shape .* that is wanted, but is stored as"):
            load({"a": {"b": tensor(wanted)}}, tmp_path / "step", strict=strict, group=SOLO)


def test_a_rank_without_elements_is_refused_as_one_with_them(tmp_path):
    save({"w": tensor((4,))}, tmp_path / "step", group=SOLO)
    none = ShardedTensor("w", torch.zeros(0), torch.float32, (0,), (5,), (0,), None, 1)
    with pytest.raises(CheckpointError, match=r"w: must have the shape \(5,\)"):
        load({"w": none}, tmp_path / "step", allow_parts=True, group=SOLO)


@pytest.mark.parametrize(("stored", "wanted"), [((3,), (0,)), ((0,), (3,)), ((3, 2), (0, 2)), ((2, 2), (3, 2))])
def test_another_shape_is_filled_with_zeros_where_that_is_allowed(stored, wanted, tmp_path):
    save({"w": tensor(stored)}, tmp_path / "step", group=SOLO)
    entry = ShardedTensor.from_rank_offsets("w", torch.full(wanted, 7.0), allow_shape_mismatch=True)
    loaded = load({"w": entry}, tmp_path / "step", group=SOLO)["w"]
    assert loaded.shape == torch.Size(wanted)
    assert set(loaded.flatten().tolist()) <= {0.0, 1.0}


def test_differing_keys_are_those_that_only_one_side_has(tmp_path):
    save({"w": tensor((0, 4)), "step": 1}, tmp_path / "step", group=SOLO)
    assert differing_keys({}, tmp_path / "step", group=SOLO) == ({"w"}, set())
    other = {"v": ShardedTensor.from_rank_offsets("v", torch.ones(0))}
    assert differing_keys(other, tmp_path / "step", group=SOLO).not_stored == set()
    assert load(other, tmp_path / "step", group=SOLO)["v"].shape == (0,)


def test_nothing_changes_under_megatrons_paths(tmp_path):
    serialization.save(
        {"w": tensor((0, 4)), "v": ShardedTensor.from_rank_offsets("v", torch.ones(3))}, tmp_path / "step"
    )
    assert list(open_checkpoint(tmp_path / "step")) == ["v"]
    wanted = {"v": ShardedTensor.from_rank_offsets("v", torch.ones(0))}
    assert serialization.load(wanted, tmp_path / "step")["v"].shape == (0,)
