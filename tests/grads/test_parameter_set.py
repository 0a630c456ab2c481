"""Which parameters share a buffer, and how their gradients are scaled."""

import pytest
import torch
from torch import nn

from trackbed.grads.parameter_set import averaging_factors, group_parameters, is_expert


def parameter(dtype=torch.float32, *, is_8_bit=False):
    found = nn.Parameter(torch.zeros(2, 3, dtype=dtype))
    if is_8_bit:
        found._data = torch.zeros(2, 3, dtype=torch.uint8)
    return found


def found(params, **options):
    return [
        (group.param_dtype, group.grad_dtype, [params.index_of(param) for param in group.params], group.indices)
        for group in group_parameters(params, **options)
    ]


class Params(list):
    """Parameters, which are found by identity."""

    def index_of(self, wanted):
        return next(number for number, param in enumerate(self) if param is wanted)


def test_parameters_of_one_type_share_a_buffer_in_order_of_the_first():
    params = Params([parameter(torch.bfloat16), parameter(), parameter(torch.bfloat16)])
    assert found(params, reduce_in_fp32=False) == [
        (torch.bfloat16, torch.bfloat16, [0, 2], [0, 1]),
        (torch.float32, torch.float32, [1], [0]),
    ]


def test_gradients_may_all_be_float32():
    params = Params([parameter(torch.bfloat16), parameter()])
    assert found(params, reduce_in_fp32=True) == [
        (torch.bfloat16, torch.float32, [0], [0]),
        (torch.float32, torch.float32, [1], [0]),
    ]


def test_parameters_of_8_bits_have_their_own_buffer_and_count_under_their_other_type():
    params = Params([parameter(torch.bfloat16, is_8_bit=number in (1, 3)) for number in range(5)])
    assert found(params, reduce_in_fp32=True) == [
        (torch.bfloat16, torch.float32, [0, 2, 4], [0, 2, 4]),
        (torch.uint8, torch.float32, [1, 3], [1, 3]),
    ]


def test_no_parameters_need_no_buffer():
    assert group_parameters([], reduce_in_fp32=False) == []


def test_a_parameter_is_an_experts_if_it_is_not_to_be_reduced_over_all_ranks():
    expert, dense = parameter(), parameter()
    expert.allreduce, dense.allreduce = False, True
    assert [is_expert(param) for param in (expert, dense, parameter())] == [True, False, False]


@pytest.mark.parametrize(("ranks", "expert_ranks"), [(8, 8), (8, 2), (1, 1), (6, 3)])
@pytest.mark.parametrize("average", [False, True])
def test_sums_end_as_averages_over_all_ranks(ranks, expert_ranks, average):
    factors = averaging_factors(num_ranks=ranks, num_expert_ranks=expert_ranks, average_in_collective=average)
    for factor, summed in ((factors.dense, ranks), (factors.expert, expert_ranks)):
        assert factor / (summed if average else 1) == pytest.approx(1 / ranks)
    if not average:
        assert factors.dense == factors.expert == 1 / ranks
