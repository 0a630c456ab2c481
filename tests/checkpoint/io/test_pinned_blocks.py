"""Copies between a GPU and files, through blocks that are used again. The GPU is pretended, and its copies end late."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trackbed.checkpoint import ShardedTensor, load, save
from trackbed.checkpoint.io import boxes, file_writer, pinned_blocks
from trackbed.checkpoint.io.file_writer import bytes_of
from trackbed.checkpoint.io.pinned_blocks import UploadLane, blocks_of
from trackbed.errors import CollectiveError

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.complex64, torch.int64, torch.float8_e4m3fn]


class LateCopies:
    """Copies of which each is made when it is asked for the third time whether it is over."""

    def __init__(self, *_, **__):
        self.running = []
        self.num_blocks = 0

    def new_block(self, num_bytes):
        self.num_blocks += 1
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)

    def begin(self, target, source):
        assert target.is_contiguous()
        assert source.is_contiguous()
        for other in self.running:
            assert not any(overlap(one, another) for one in (target, source) for another in other)
        copy = (target, source)
        self.running.append(copy)
        turns = itertools.count(1)

        def is_over():
            if copy not in self.running:
                return True
            if next(turns) < 3:
                return False
            target.copy_(source)
            del self.running[[other is copy for other in self.running].index(True)]
            return True

        return is_over

    def mark(self):
        turns = itertools.count(1)
        return lambda: next(turns) >= 3

    def contiguous(self, part):
        return part.resolve_conj().resolve_neg().contiguous().clone()


def overlap(one, other):
    return (
        one.numel()
        and other.numel()
        and (one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes)
    )


@st.composite
def tensors(draw):
    """Tensors of any type and strides, with at least one element."""
    shape = draw(st.lists(st.integers(1, 7), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    numbers = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 100, [2 * size for size in shape])
    tensor = torch.from_numpy(np.array(numbers)).to(dtype)
    tensor = tensor[tuple(slice(None, None, 2) if draw(st.booleans()) else slice(size) for size in shape)]
    if shape and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    if dtype == torch.complex64 and draw(st.booleans()):
        tensor = tensor.conj()
    if draw(st.booleans()):
        tensor = tensor[:1].expand(5, *tensor.shape[1:]) if shape else tensor
    return tensor


@given(tensor=tensors(), num_bytes=st.sampled_from([8, 16, 40, 1 << 20]))
def test_the_blocks_of_a_tensor_have_its_bytes_and_are_used_again_after_their_copies(tensor, num_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned_blocks, "BLOCK_BYTES", num_bytes)
        copies, polls = LateCopies(), []
        found = b"".join(block.tobytes() for block in blocks_of(tensor, copies, lambda: polls.append(1)))
    assert found == bytes_of(tensor).tobytes()
    assert copies.num_blocks == 3
    assert not copies.running
    assert polls


def test_a_failure_ends_a_wait_for_a_copy():
    def fail():
        raise CollectiveError("rank 3 failed")

    with pytest.raises(CollectiveError, match="rank 3 failed"):
        list(blocks_of(torch.ones(100), LateCopies(), fail))


def test_a_block_of_a_lane_is_filled_again_after_its_copy_only():
    copies = LateCopies()
    lane = UploadLane(copies)
    targets = [torch.zeros(3, 4) for _ in range(5)]
    for number, target in enumerate(targets):
        block = lane.take(48, lambda: None)
        assert not any(overlap(block, source) for _, source in copies.running)
        block.view(torch.float32)[:] = number
        lane.upload(target, block.view(torch.float32).view(3, 4), (slice(None), slice(None)))
    assert copies.num_blocks == 2
    assert [target.unique().tolist() for target in targets[:3]] == [[0.0], [1.0], [2.0]]


@pytest.fixture
def pretends(monkeypatch):
    """Every tensor counts as one on a GPU. What is made of an upload on the GPU is made at once."""
    for module in (pinned_blocks, file_writer, boxes):
        monkeypatch.setattr(module, "is_on_gpu", lambda device: True)
    monkeypatch.setattr(file_writer, "StreamCopies", LateCopies)

    class Uploads(LateCopies):
        def begin(self, target, source):
            is_over = super().begin(target, source)
            while not is_over():
                pass
            return is_over

    monkeypatch.setattr(boxes, "StreamCopies", Uploads)
    monkeypatch.setattr(pinned_blocks, "BLOCK_BYTES", 3 << 16)


def sharded(tensors):
    return {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}


def test_files_and_loaded_tensors_are_those_of_the_host(pretends, monkeypatch, tmp_path):
    generator = torch.Generator().manual_seed(0)
    state = {
        "large": torch.randn(700, 1000, generator=generator),
        "transposed": torch.randn(300, 500, generator=generator).t(),
        "strided": torch.randn(400, 500, generator=generator)[:, ::2],
        "expanded": torch.randn(1, 500, generator=generator).expand(200, 500),
        "conjugate": torch.randn(200, 300, dtype=torch.complex64, generator=generator).conj(),
        "halves": torch.randn(300, 500, generator=generator).bfloat16(),
        "small": torch.randn(3, generator=generator),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
    }
    save(sharded(state), tmp_path / "gpu")
    with monkeypatch.context() as patch:
        for module in (pinned_blocks, file_writer, boxes):
            patch.setattr(module, "is_on_gpu", lambda device: False)
        save(sharded(state), tmp_path / "host")
        for name in ("__0_0.distcp", "common.pt"):
            assert (tmp_path / "gpu" / name).read_bytes() == (tmp_path / "host" / name).read_bytes()
    targets = {name: torch.full_like(tensor.resolve_conj().contiguous(), 7) for name, tensor in state.items()}
    targets["transposed"] = torch.zeros(300, 500).t()
    targets["strided"] = torch.zeros(400, 1000)[:, ::4]
    targets["halves"] = torch.zeros(300, 500, dtype=torch.float64)
    targets["large"] = torch.zeros(1000, 700).t()[:, :]
    loaded = load(sharded(targets), tmp_path / "gpu")
    for name, tensor in state.items():
        assert loaded[name].data_ptr() == targets[name].data_ptr()
        assert torch.equal(loaded[name], tensor.to(targets[name].dtype)), name
