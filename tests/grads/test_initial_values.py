"""All ranks begin with the values of rank 0, or are told that they do not."""

import pytest
import torch
from torch import nn

from trackbed import megatron
from trackbed.comm import run_ranks
from trackbed.errors import CollectiveError
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig

KINDS = {
    "whole": {},
    "overlapped": {"overlap_grad_reduce": True},
    "sharded": {"use_distributed_optimizer": True},
    "sharded and gathered": {
        "use_distributed_optimizer": True,
        "overlap_param_gather": True,
        "overlap_grad_reduce": True,
    },
}


class Mixed(nn.Module):
    """Parameters of several types, frozen ones, and buffers of many kinds, all of one number."""

    def __init__(self, number):
        super().__init__()
        self.linear, self.half = nn.Linear(3, 4), nn.Linear(4, 4).bfloat16()
        self.frozen, self.norm = nn.Linear(2, 2).double(), nn.BatchNorm1d(4)
        self.frozen.requires_grad_(False)
        self.turned = nn.Parameter(torch.empty(4, 3).t())
        self.register_buffer("flags", torch.full((5,), bool(number)))
        self.register_buffer("hidden", torch.full((3,), number, dtype=torch.int8), persistent=False)
        self.register_buffer("scalar", torch.tensor(number, dtype=torch.complex64))
        self.register_buffer("wide", torch.full((1, 1), float(number)).expand(2, 3))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("none", None)
        self.register_buffer("eight", torch.full((3,), float(number)).to(torch.float8_e4m3fn))
        with torch.no_grad():
            for value in [*self.parameters(), self.norm.running_mean]:
                value.fill_(number)


def values(module):
    return {name: value.detach().clone() for name, value in [*module.named_parameters(), *module.named_buffers()]}


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_begin_with_the_values_of_rank_0(kind):
    config = DistributedDataParallelConfig(**KINDS[kind])

    def on(group):
        model = DistributedDataParallel(Mixed(group.rank + 1), config, process_group=group)
        found = dict([*model.module.named_parameters(), *model.module.named_buffers()])
        wanted_module = Mixed(1)
        for name, wanted in [*wanted_module.named_parameters(), *wanted_module.named_buffers()]:
            assert torch.equal(found[name].detach().to(torch.complex64), wanted.detach().to(torch.complex64)), name
            assert found[name].stride() == wanted.stride() or config.use_distributed_optimizer

    run_ranks(3, on)


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_differ_are_named_without_a_broadcast(kind):
    config = DistributedDataParallelConfig(**KINDS[kind])

    def same(group):
        DistributedDataParallel(Mixed(7), config, process_group=group, broadcast=False)

    run_ranks(2, same)
    for name in values(Mixed(1)):
        if name == "empty":
            continue

        def different(group, name=name):
            module = Mixed(1)
            tensor = dict([*module.named_parameters(), *module.named_buffers()])[name]
            if group.rank == 1:
                with torch.no_grad():
                    (tensor[:1, :1] if name == "wide" else tensor).copy_(
                        torch.tensor(5.0 if name.endswith("tracked") else 0.0)
                    )
            DistributedDataParallel(module, config, process_group=group, broadcast=False)

        with pytest.raises(CollectiveError, match=rf"{name} of rank 1 differs.*broadcast=False"):
            run_ranks(2, different)


class Experts(nn.Module):
    """Experts of a pair of ranks, whose batch norm and cache are theirs alone."""

    def __init__(self, number):
        super().__init__()
        self.shared, self.shared_norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.expert = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.expert.add_module("cache", nn.Module())
        self.expert.cache.register_buffer("table", torch.zeros(2))
        self.cache = nn.Module()
        self.cache.register_buffer("table", torch.zeros(2))
        with torch.no_grad():
            for value in [*self.parameters(), *(one for one in self.buffers() if one.is_floating_point())]:
                value.fill_(number)
        for param in self.expert.parameters():
            param.allreduce = False


@pytest.mark.dist
def test_experts_and_their_buffers_come_from_their_own_first_rank():
    from pathlib import Path

    from tests.support.processes.launching import run_script

    found = run_script(Path(__file__).with_name("initial_values_rank.py"), 4, limit_seconds=100)
    for rank, (outcome,) in enumerate(found):
        assert outcome == {"shared": 0.0, "expert": float(rank % 2), "differs": True}


def test_buffers_of_other_shapes_are_refused_by_name():
    def on(group):
        module = nn.Linear(2, 2)
        module.register_buffer("cache", torch.zeros(2 + group.rank))
        DistributedDataParallel(module, process_group=group)

    with pytest.raises(CollectiveError, match="buffer 'cache' of shape"):
        run_ranks(2, on)


def test_the_form_of_megatron_neither_copies_nor_compares():
    def on(group):
        config = megatron.DistributedDataParallelConfig()
        model = megatron.DistributedDataParallel(None, config, Mixed(group.rank + 1), process_group=group)
        assert float(model.module.linear.bias.detach()[0]) == group.rank + 1
        model.broadcast_params()
        assert float(model.module.linear.bias.detach()[0]) == 1

    run_ranks(2, on)


def test_a_rank_that_fails_while_it_wraps_is_named_on_all():
    def on(group):
        module = nn.Linear(2, 2)
        if group.rank == 1:
            module.weight = nn.Parameter(torch.zeros(2, 2, device="meta"))
        DistributedDataParallel(module, process_group=group)

    with pytest.raises(CollectiveError, match=r"rank 1: .*meta"):
        run_ranks(3, on)


OTHER_BUFFERS = {
    "sparse": lambda values: values.to_sparse(),
    "compressed": lambda values: values.to_sparse_csr(),
    "quantized": lambda values: torch.quantize_per_tensor(values, 0.1, 0, torch.qint8),
}


def wrap_with_buffer(make, **more):
    def body(group):
        module = nn.Linear(2, 2)
        module.register_buffer("other", make(group.rank))
        DistributedDataParallel(module, process_group=group, **more)
        return module.other

    return run_ranks(2, body)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", OTHER_BUFFERS)
def test_buffers_that_cannot_be_sent_must_be_the_same(kind):
    wrap_with_buffer(lambda _: OTHER_BUFFERS[kind](torch.eye(3)))
    with pytest.raises(CollectiveError, match="other of rank 1 differs"):
        wrap_with_buffer(lambda rank: OTHER_BUFFERS[kind](torch.eye(3) + rank))


def test_a_lazy_conjugate_is_sent_by_value():
    one, other = wrap_with_buffer(lambda rank: torch.complex(torch.ones(3), torch.full((3,), rank + 1.0)).conj())
    assert torch.equal(one, other)
    assert other.tolist() == [1 - 1j] * 3


def test_ranks_that_differ_in_broadcast_are_told_at_once():
    def body(group):
        DistributedDataParallel(nn.Linear(2, 2), process_group=group, broadcast=group.rank == 0)

    with pytest.raises(CollectiveError, match="option broadcast"):
        run_ranks(2, body)
