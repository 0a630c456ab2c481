"""Plain tensors are written with the elements that a state uses; what shares memory still does."""

import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trackbed import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.checkpoint import ShardedObject, load
from trackbed.checkpoint.format.safe_pickle import load_torch_item, torch_bytes
from trackbed.checkpoint.save import save
from trackbed.checkpoint.values.storages import copy_of, has_plain_storage, own_memory
from trackbed.comm import SOLO
from trackbed.megatron.checkpoints import serialization

MOST_BYTES = 20_000
"""Of a pickle of few elements."""


def matrix():
    return torch.arange(1e6).view(1000, 1000)


SMALL_PARTS = {
    "a slice": lambda big: [big[:2]],
    "an element": lambda big: [big[3, 4]],
    "a column": lambda big: [big[:, 0]],
    "two columns": lambda big: [big[:, 0], big[:, 1]],
    "every thousandth": lambda big: [big.view(-1)[::1000]],
    "both ends": lambda big: [big[0], big[-1]],
    "rows of the transposed": lambda big: [big.t()[:2]],
    "a part of a part": lambda big: [big[3], big[3, 5:7]],
    "the same twice": lambda big: [big[3], big[3].detach()],
    "the same column twice": lambda big: [big[:, 3], big[:, 3].detach(), big[10:20, 3]],
    "a parameter": lambda big: [torch.nn.Parameter(big[1])],
    "a tensor with a gradient": lambda big: [big[1].clone().requires_grad_()[:5].detach().requires_grad_()],
    "an expanded one": lambda big: [big[0, 0].expand(100_000)],
    "an expanded part": lambda big: [big[:2, None, :5].expand(2, 1000, 5)],
    "windows": lambda big: [big[0].unfold(0, 3, 1)],
    "nothing": lambda big: [big[5:5], big[0]],
    "other types apart": lambda big: [big[0].view(torch.int32), big[1]],
    "bytes": lambda big: [big[0].view(torch.uint8)[4:8]],
    "conjugates": lambda big: [torch.complex(big[:2], big[2:4])[:1].conj()],
    "negated": lambda big: [torch._neg_view(big[0])],
    "a sparse one": lambda big: [torch.sparse_coo_tensor([[1, 2]], big[5, :2], (4,)), big[5, 1:3]],
    "rows of a sparse one": lambda big: [
        torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), big[6, 4:6])
    ],
    "one of several tensors": lambda big: [torch.nested.nested_tensor([big[0], big[1]]), big[2]],
    "imaginary parts": lambda big: [torch.complex(big[:1], big[1:2]).conj().imag],
}


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:Validating sparse", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kind", SMALL_PARTS)
def test_the_elements_that_are_used_are_written(kind):
    parts = SMALL_PARTS[kind](matrix())
    content = torch_bytes({"x": parts, "y": {"again": parts[0]}}, "common.pt")
    assert len(content) < MOST_BYTES
    assert_same(parts, load_torch_item(content, "common.pt")["x"])


def assert_same(parts, loaded):
    """Same values and classes, and what is changed in one is changed in those that share its memory."""
    for part, found in zip(parts, loaded, strict=True):
        assert (type(part), part.dtype, part.requires_grad) == (type(found), found.dtype, found.requires_grad)
        assert torch.equal(dense(part), dense(found))
    if (
        has_plain_storage(parts[0])
        and parts[0].numel()
        and parts[0]._base is not None
        and not any(map(is_repeated, parts))
    ):
        parts[0].data.copy_(torch.ones_like(parts[0]) * 7)
        loaded[0].data.copy_(torch.ones_like(loaded[0]) * 7)
        assert all(torch.equal(part, found) for part, found in zip(parts, loaded, strict=True))


def dense(tensor):
    if tensor.is_nested:
        return torch.cat(list(tensor.unbind()))
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def is_repeated(tensor):
    return 0 in tensor.stride() or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()


@st.composite
def views(draw):
    """A view of a tensor of 24 elements, made of a few steps."""
    steps = []
    for _ in range(draw(st.integers(0, 3))):
        steps.append(draw(st.sampled_from(["slice", "step", "transpose", "select", "expand", "flatten"])))
    return [(step, draw(st.integers(0, 3)), draw(st.integers(1, 3))) for step in steps]


def viewed(tensor, steps):
    for step, place, length in steps:
        axis = place % max(tensor.ndim, 1)
        if step == "slice" and tensor.ndim:
            tensor = tensor.narrow(
                axis, min(place, tensor.shape[axis]), min(length, max(0, tensor.shape[axis] - place))
            )
        elif step == "step" and tensor.ndim:
            tensor = tensor[(slice(None),) * axis + (slice(None, None, length),)]
        elif step == "transpose" and tensor.ndim > 1:
            tensor = tensor.transpose(0, axis)
        elif step == "select" and tensor.ndim and place < tensor.shape[axis]:
            tensor = tensor.select(axis, place)
        elif step == "expand":
            tensor = tensor[None].expand(length, *tensor.shape)
        elif step == "flatten" and tensor.is_contiguous():
            tensor = tensor.reshape(-1)
    return tensor


@given(st.lists(views(), min_size=1, max_size=4))
def test_any_views_of_a_tensor_have_their_values_and_common_memory_again(all_steps):
    big = torch.arange(24).view(2, 3, 4)
    parts = [viewed(big, steps) for steps in all_steps]
    copies = own_memory(parts, [])
    loaded = [part if (copy := copy_of(part, copies)) is None else copy for part in parts]
    used = {int(number) for part in parts for number in part.flatten()}
    in_memory = {found.untyped_storage()._cdata: found.untyped_storage().nbytes() // 8 for found in loaded}
    assert len(used) <= sum(in_memory.values()) <= 24 * len(parts)
    if len(parts) == 1:
        assert sum(in_memory.values()) == len(used)
    for part, found in zip(parts, loaded, strict=True):
        assert torch.equal(part, found)
    # Each element is one place in memory, in every view that has it.
    place_of = {}
    for part, found in zip(parts, loaded, strict=True):
        for index in itertools.product(*map(range, part.shape)):
            offset = found.storage_offset() + sum(map(int.__mul__, index, found.stride()))
            place = found.untyped_storage()._cdata, offset
            assert place_of.setdefault(int(part[index]), place) == place


def test_what_uses_all_of_its_storage_is_left_alone():
    big = matrix()
    for parts in ([big], [big, big[3]], [big.t()], [big[:500], big[400:]], [torch.ones(1).expand(5)], [torch.ones(0)]):
        assert own_memory(parts, []) == {}
    assert own_memory([big[:2]], [big.untyped_storage()]) == {}
    assert own_memory([torch.ones(2, device="meta")[:1]], []) == {}


def test_a_part_of_a_sharded_model_is_as_large_as_itself(tmp_path):
    module = torch.nn.Linear(300, 300)
    DistributedDataParallel(module, DistributedDataParallelConfig(use_distributed_optimizer=True))
    bias = module.bias.detach()
    save({"bias": bias, "o": ShardedObject("o", bias, (1,), (0,))}, tmp_path / "step", group=SOLO)
    assert all(path.stat().st_size < MOST_BYTES for path in (tmp_path / "step").iterdir())
    assert torch.equal(load(tmp_path / "step", group=SOLO)["bias"], bias)


def test_attributes_and_places_in_objects_are_found(tmp_path):
    big = matrix()
    part = big[0].clone()
    part.more = [big[1]]
    content = torch_bytes(({"x": part}, {"y": big[1, :3]}), "common.pt")
    loaded = load_torch_item(content, "common.pt")
    assert len(content) < MOST_BYTES
    loaded[1]["y"].fill_(5)
    assert loaded[0]["x"].more[0][:4].tolist() == [5, 5, 5, 1003]


def test_the_tensors_of_the_program_are_left_as_they_are():
    big = matrix()
    part = big[:2]
    before = part.untyped_storage().data_ptr(), part.storage_offset(), part.stride()
    torch_bytes({"x": part}, "common.pt")
    assert (part.untyped_storage().data_ptr(), part.storage_offset(), part.stride()) == before


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_default_device_of_torch_makes_no_difference(device):
    big = matrix()
    with torch.device(device):
        content = torch_bytes({"x": big[:, 0]}, "common.pt")
    assert torch.equal(load_torch_item(content, "common.pt")["x"], big[:, 0])


def test_storages_are_written_whole_under_megatrons_paths(tmp_path):
    big = torch.ones(100, 100)
    state = {"x": big[:2], "o": ShardedObject("o", big[:2], (1,), (0,))}
    serialization.save(state, tmp_path / "step")
    assert (tmp_path / "step" / "common.pt").stat().st_size > big.nbytes
    assert pickle.dumps(big[:2])  # as it was
