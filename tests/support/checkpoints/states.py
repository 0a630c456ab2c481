"""Generated states: global tensors, and how ranks share them."""

import itertools
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from trackbed.checkpoint.state.factory import ShardedTensorFactory
from trackbed.checkpoint.state.sharded_object import LocalNonpersistentObject, ShardedObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@dataclass(frozen=True)
class World:
    """Global tensors, by key."""

    tensors: dict[str, torch.Tensor]
    stacked: tuple[str, ...]
    """Keys of tensors whose first axis is that of layers, each a tensor of its own."""
    factories: tuple[str, ...]
    """Keys of tensors that a factory stores as two halves of their first axis."""


@dataclass(frozen=True)
class Sharding:
    """Boxes of each tensor, and the ranks that have them, the main replica first."""

    num_ranks: int
    boxes: dict[str, list[tuple[tuple[slice, ...], list[int]]]]


def numbers(key, shape, dtype):
    """A tensor that differs from others in every element."""
    count = torch.Size(shape).numel()
    seed = sum(map(ord, key))
    return ((torch.arange(count) * 7 + seed) % 251 % (2 if dtype == torch.bool else 251)).to(dtype).view(shape)


@st.composite
def worlds(draw):
    tensors = {}
    stacked, factories = [], []
    for number in range(draw(st.integers(1, 4))):
        key = f"layer/{number}.weight"
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        tensors[key] = numbers(key, shape, draw(st.sampled_from(DTYPES)))
        kind = draw(st.sampled_from(["plain", "plain", "stacked", "factory"]))
        if kind == "stacked" and shape:
            stacked.append(key)
        if kind == "factory" and shape and shape[0] % 2 == 0:
            factories.append(key)
    return World(tensors, tuple(stacked), tuple(factories))


@st.composite
def shardings(draw, world, num_ranks):
    boxes = {}
    for key, tensor in world.tensors.items():
        cuts = []
        for axis, size in enumerate(tensor.shape):
            # An edge that is drawn twice makes boxes without elements, at the offset of another.
            edges = [0, size, *draw(st.lists(st.integers(0, size), max_size=2))]
            if axis == 0 and key in world.stacked:
                edges = [*range(size + 1)] or [0, 0]
            if key in world.factories:
                edges = [0, size]  # factories have whole tensors
            cuts.append([slice(low, high) for low, high in itertools.pairwise(sorted(edges))] or [slice(0, 0)])
        boxes[key] = [
            (box, draw(st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=num_ranks, unique=True)))
            for box in itertools.product(*cuts)
        ]
    return Sharding(num_ranks, boxes)


def state_of(world, sharding, rank, *, is_empty=False):
    """State dictionary of a rank.

    Args:
        is_empty: True for one to be loaded into: some tensors have other numbers, the others none.
    """
    model = {}
    for key, boxes in sharding.boxes.items():
        entries = []
        for box, ranks in boxes:
            if rank not in ranks:
                continue
            data = world.tensors[key][box].clone()
            if is_empty:
                data = torch.zeros_like(data)
            offset = tuple(part.start for part in box)
            shape = tuple(world.tensors[key].shape)
            replica = ranks.index(rank)
            prepended = int(key in world.stacked)
            if prepended:
                if not len(data):
                    continue  # no layer
                data = data[0]
            if key in world.factories:
                entries.append(factory_of(key, data, replica))
                continue
            entry = ShardedTensor(
                key, data, data.dtype, tuple(data.shape), shape, offset, None, replica, prepend_axis_num=prepended
            )
            entries.append(entry if not is_empty or len(entries) % 2 else entry.without_data())
        model[key] = entries
    objects = {
        str(place): ShardedObject("rng", None if is_empty else {"place": place}, (3,), (place,), rank * is_empty)
        for place in range(3)
        if is_empty or place % sharding.num_ranks == rank
    }
    return {"model": model, "objects": objects, "step": 7, "local": LocalNonpersistentObject(rank)}


def factory_of(key, data, replica):
    def build(key, data, replica_id, flattened_range):
        half = len(data) // 2
        return {
            name: ShardedTensor.from_rank_offsets(f"{key}.{name}", part, replica_id=replica_id)
            for name, part in zip(("low", "high"), (data[:half], data[half:]), strict=True)
        }

    return ShardedTensorFactory(key, data, build, lambda found: torch.cat([found["low"], found["high"]]), replica)


def wanted_of(world, sharding, rank):
    """The tensors that a rank must get, in the order of its entries."""
    return {
        key: [
            world.tensors[key][box][0] if key in world.stacked else world.tensors[key][box]
            for box, ranks in boxes
            if rank in ranks and not (key in world.stacked and not len(world.tensors[key][box]))
        ]
        for key, boxes in sharding.boxes.items()
    }


def check_loaded(world, sharding, rank, request, loaded, *, in_place=True):
    """Compares what a rank has loaded with what it must get; `request` is its state before."""
    for key, wanted in wanted_of(world, sharding, rank).items():
        found = loaded.get("model", {}).get(key, [])
        assert len(found) == len(wanted), (key, found, wanted)
        for entry, one, other in zip(request["model"][key], found, wanted, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(one, other), (key, one, other)
            if in_place and isinstance(entry, ShardedTensor) and entry.data is not None:
                assert one is entry.data
    assert loaded["objects"] == {str(place): {"place": place} for place in range(3)}
    assert (loaded["step"], loaded["local"]) == (7, rank)
