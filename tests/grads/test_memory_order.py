"""Gradients lie in memory as their parameters do, on every rank alike."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trackbed import megatron
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import CollectiveError
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.grads.buffer import arranged_like, dims_in_memory, fills_memory, turned_like

SHAPES = st.lists(st.integers(0, 3), max_size=5)


@st.composite
def tensors(draw):
    """A tensor of any shape with its dimensions in any order in memory."""
    shape = draw(SHAPES)
    order = draw(st.permutations(range(len(shape))))
    return torch.arange(float(torch.Size(shape).numel())).view(shape).permute(order)


@given(tensors())
def test_a_tensor_with_permuted_dimensions_fills_its_memory(tensor):
    assert fills_memory(tensor)
    turned = turned_like(tensor, torch.empty(tensor.numel()))
    assert turned.stride() == tensor.stride()
    assert dims_in_memory(turned.copy_(tensor)) == dims_in_memory(tensor)
    assert torch.equal(turned, tensor)


@given(tensors(), st.data())
def test_an_arranged_tensor_has_the_elements_of_the_one_and_the_strides_of_the_other(tensor, data):
    order = data.draw(st.permutations(range(tensor.dim())))
    like = torch.empty([tensor.shape[dim] for dim in order])
    inverse = sorted(range(tensor.dim()), key=lambda dim: order[dim])
    arranged = arranged_like(tensor, like.permute(inverse))
    assert torch.equal(arranged, tensor)
    assert arranged.stride() == like.permute(inverse).stride()


@pytest.mark.parametrize(
    "tensor", [torch.empty(4, 6)[:, ::2], torch.empty(4, 1).expand(4, 3), torch.empty(5).as_strided((2, 3), (1, 1))]
)
def test_a_tensor_with_gaps_or_overlaps_does_not_fill_its_memory_and_is_followed_by_none(tensor):
    assert not fills_memory(tensor)
    other = torch.zeros(tensor.shape)
    assert arranged_like(other, tensor) is other


class Turned(nn.Module):
    """Two parameters, of which one lies in memory in another order than that of its indices."""

    def __init__(self, dtype, is_turned=True, is_expert=False):
        super().__init__()
        values = torch.arange(6.0, dtype=dtype).view(2, 3)
        self.weight = nn.Parameter(values.t().clone(memory_format=torch.contiguous_format).t() if is_turned else values)
        self.plain = nn.Parameter(values.clone())
        self.weight.allreduce = not is_expert


WAYS = [
    (torch.float32, {}),
    (torch.float32, {"overlap_grad_reduce": True, "bucket_size": 3}),
    (torch.bfloat16, {"grad_reduce_in_fp32": True}),
]


@pytest.mark.parametrize(("dtype", "options"), WAYS)
def test_a_gradient_has_the_strides_of_its_parameter(dtype, options):
    module = Turned(dtype)
    DistributedDataParallel(module, DistributedDataParallelConfig(**options), process_group=SOLO)
    assert module.weight.main_grad.stride() == module.weight.stride() == (1, 2)
    assert module.plain.main_grad.stride() == (3, 1)


@pytest.mark.parametrize(("dtype", "options"), WAYS)
def test_a_gradient_is_row_major_in_code_for_megatron(dtype, options):
    module = Turned(dtype)
    config = megatron.DistributedDataParallelConfig(**options)
    megatron.DistributedDataParallel(None, config, module, process_group=SOLO)
    assert module.weight.main_grad.stride() == (3, 1)


def test_a_sharded_parameter_and_its_gradient_are_row_major():
    module = Turned(torch.float32)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    DistributedDataParallel(module, config, process_group=SOLO)
    assert module.weight.stride() == module.weight.main_grad.stride() == (3, 1)
    assert module.weight.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("is_expert", [False, True])
def test_ranks_with_another_order_in_memory_are_refused_where_autograd_decides_the_order(is_expert):
    def run(group):
        module = Turned(torch.float32, is_turned=group.rank == 1, is_expert=is_expert)
        DistributedDataParallel(module, process_group=group)

    with pytest.raises(CollectiveError, match=r"rank 1 has parameter 'weight' with dimensions in the order \[1, 0\]"):
        run_ranks(2, run)


@pytest.mark.parametrize("is_expert", [False, True])
def test_ranks_with_another_order_in_memory_add_the_gradients_of_the_same_elements(is_expert):
    def run(group):
        module = Turned(torch.bfloat16, is_turned=group.rank == 1, is_expert=is_expert)
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        model = DistributedDataParallel(module, config, process_group=group)
        (module.weight * torch.arange(6.0).view(2, 3)).sum().backward()
        model.finish_grad_sync()
        return module.weight.main_grad.tolist()

    assert run_ranks(2, run) == [[[0, 1, 2], [3, 4, 5]]] * 2


@pytest.mark.parametrize(("dtype", "options"), WAYS)
def test_ranks_add_gradients_of_turned_parameters(dtype, options):
    def run(group):
        module = Turned(dtype)
        model = DistributedDataParallel(module, DistributedDataParallelConfig(**options), process_group=group)
        factors = torch.arange(6.0).view(2, 3) * (1 + 2 * group.rank)
        (module.weight * factors + module.plain * factors).sum().backward()
        model.finish_grad_sync()
        return module.weight.main_grad.tolist(), module.plain.main_grad.tolist()

    assert run_ranks(2, run) == [([[0, 2, 4], [6, 8, 10]],) * 2] * 2
