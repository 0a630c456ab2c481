"""What is empty in a new model, and extra state, is loaded as it was saved, if the module takes it."""

import collections
import io
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import trackbed
from trackbed import DataParallelOptimizer, DistributedDataParallel, DistributedDataParallelConfig
from trackbed.comm import run_ranks
from trackbed.errors import CheckpointError
from trackbed.optim import load_sharded_state, sharded_state

EMPTY = torch.empty(0, dtype=torch.uint8)


class Scaled(nn.Module):
    """A layer with extra state, as Transformer Engine's have it."""

    def __init__(self, scales=EMPTY):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scales = scales

    def get_extra_state(self):
        return self.scales

    def set_extra_state(self, state):
        self.scales = state


class Growing(nn.Module):
    """A module whose buffer grows, and which takes one of another size."""

    def __init__(self, seen=()):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.tensor(seen, dtype=torch.int64))

    def _load_from_state_dict(self, state_dict, prefix, *others):
        self.seen = torch.empty_like(state_dict[prefix + "seen"])
        super()._load_from_state_dict(state_dict, prefix, *others)


def reloaded(old, new, folder, *, wraps=False):
    trackbed.save(sharded_state(old), folder)
    load_sharded_state(folder, DistributedDataParallel(new) if wraps else new)
    return new


EXTRA = {
    "bytes": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "another shape and type": torch.ones(2, 3, dtype=torch.bfloat16),
    "a number": torch.tensor(5.0),
    "none": torch.empty(0, dtype=torch.uint8),
    "none of another shape": torch.empty(3, 0),
    "a large one": torch.arange(50_000),
    "a sparse one": torch.eye(3).to_sparse(),
    "a dictionary": {"a": torch.ones(2), "b": collections.deque([1], 3)},
    "text": "text",
    "a stream": io.BytesIO(b"xyz"),
    "nothing": None,
}


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("new", ["none", "a number", "a dictionary", "a large one", "nothing", "a sparse one"])
@pytest.mark.parametrize("saved", EXTRA)
def test_extra_state_is_loaded_as_it_was_saved(saved, new, wraps, tmp_path):
    module = reloaded(
        nn.Sequential(Scaled(EXTRA[saved])), nn.Sequential(Scaled(EXTRA[new])), tmp_path / "step", wraps=wraps
    )
    found, wanted = module[0].scales, EXTRA[saved]
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.layout) == (wanted.dtype, wanted.layout)
        assert torch.equal(found.to_dense(), wanted.to_dense())
    else:
        assert str(found) == str(wanted) or found.getvalue() == wanted.getvalue()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage")
@pytest.mark.parametrize(
    "change", [torch.Tensor.to_sparse, lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)]
)
def test_buffers_that_are_sparse_or_quantized_are_loaded(change, tmp_path):
    def module(values):
        found = nn.Linear(2, 2)
        found.register_buffer("values", change(values))
        return found

    old = module(torch.eye(3))
    new = reloaded(old, module(torch.zeros(3, 3)), tmp_path / "step")
    assert new.values.layout is old.values.layout
    dense = torch.Tensor.to_dense if old.values.is_sparse else torch.dequantize
    assert torch.equal(dense(new.values), dense(old.values))


def test_an_empty_buffer_is_given_what_was_saved_and_taken_by_the_module(tmp_path):
    assert reloaded(Growing([1, 2, 3]), Growing(), tmp_path / "step").seen.tolist() == [1, 2, 3]
    assert reloaded(Growing(), Growing(), tmp_path / "empty").seen.tolist() == []


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_parameters_that_are_not_initialised_take_what_was_saved(tmp_path):
    old = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    new = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    trackbed.save(sharded_state(old), tmp_path / "step")
    load_sharded_state(tmp_path / "step", new)
    assert all(torch.equal(new.state_dict()[name], value) for name, value in old.state_dict().items())
    with pytest.raises(CheckpointError, match=r"0\.weight must have values to be saved, but is not initialised"):
        sharded_state(nn.Sequential(nn.LazyLinear(2)))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (2, 0)])
def test_an_empty_tensor_is_refused_by_the_module_as_torch_does(shape, tmp_path):
    def module_of(shape):
        module = nn.Module()
        module.register_buffer("seen", torch.zeros(shape))
        module.register_buffer("other", torch.ones(2))
        return module

    old, new = module_of((3,)), module_of(shape)
    with pytest.raises(RuntimeError, match="size mismatch for seen"):
        new.load_state_dict(old.state_dict())
    with pytest.raises(CheckpointError, match="size mismatch for seen"):
        reloaded(old, new, tmp_path / "step")


def test_a_buffer_that_is_empty_in_the_checkpoint_alone_is_refused_by_key(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"model\.seen: must have the shape \(3,\) that is wanted, but is stored as"
    ):
        reloaded(Growing(), Growing([1, 2, 3]), tmp_path / "step")


def test_extra_state_is_loaded_by_all_ranks_with_the_optimizer(tmp_path):
    def model_of(group, scales):
        torch.manual_seed(0)
        module = Scaled(scales)
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = DistributedDataParallel(module, config, process_group=group)
        return module, model, DataParallelOptimizer(torch.optim.AdamW(module.parameters()), model)

    def on(group):
        module, model, optimizer = model_of(group, torch.tensor([1, 2, 3]))
        module.linear(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        trackbed.save(sharded_state(model, optimizer), tmp_path / "step", group=group)
        module, model, optimizer = model_of(group, EMPTY)
        load_sharded_state(tmp_path / "step", model, optimizer)
        assert module.scales.tolist() == [1, 2, 3]

    run_ranks(2, on)


@pytest.mark.parametrize("saved", ["bytes", "a number", "text"])
def test_extra_state_in_a_checkpoint_of_torch_is_loaded(saved, tmp_path):
    old, new = nn.Sequential(Scaled(EXTRA[saved])), nn.Sequential(Scaled())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": old.state_dict()}, checkpoint_id=str(tmp_path / "step"), no_dist=True)
    load_sharded_state(tmp_path / "step", new)
    assert str(new[0].scales) == str(EXTRA[saved])
