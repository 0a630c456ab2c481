"""Tensors that share memory are found, and no others."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.models.wrapped import wrap
from trackbed.comm import SOLO
from trackbed.errors import ArgumentError
from trackbed.grads.wrapped_model import check_separate

BASE = torch.zeros(60)


@st.composite
def views(draw):
    """View of `BASE` with strides and gaps."""
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    strides = [draw(st.integers(1, 7)) for _ in shape]
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
    return BASE.as_strided(shape, strides, draw(st.integers(0, max(0, 59 - reach))))


def elements(view):
    numbers = torch.arange(60).as_strided(view.shape, view.stride(), view.storage_offset())
    return set(numbers.flatten().tolist())


@given(st.lists(views(), max_size=4), st.lists(views(), max_size=2))
def test_views_of_one_tensor_are_refused_exactly_where_they_share_an_element(moved, others):
    def is_shared(place, other):
        return place != other and bool(elements(moved[place]) & elements((moved + others)[other]))

    wanted = any(is_shared(place, other) for place in range(len(moved)) for other in range(len(moved + others)))
    names = [(f"moved{number}", view) for number, view in enumerate(moved)]
    more = [(f"other{number}", view) for number, view in enumerate(others)]
    if wanted:
        with pytest.raises(ArgumentError, match=r"must have memory of its own .* but shares some with"):
            check_separate(names, more)
    else:
        check_separate(names, more)


def test_tensors_without_memory_share_none():
    tensors = [torch.empty(3, device="meta"), torch.empty(0), torch.eye(2).to_sparse(), nn.UninitializedParameter()]
    check_separate([(str(number), tensor) for number, tensor in enumerate(tensors * 2)], [])


def test_tensors_over_one_array_of_numpy_share_its_memory():
    array = np.zeros(80, dtype=np.float32)
    one, other, apart = (torch.from_numpy(array[part]) for part in (slice(0, 64), slice(8, 72), slice(72, 80)))
    with pytest.raises(ArgumentError, match=r"^other must have memory of its own"):
        check_separate([("one", one), ("other", other)], [])
    check_separate([("one", one), ("apart", apart)], [])


def test_ranges_of_other_types_that_intersect_are_shared():
    both = [("one", BASE[:4]), ("other", BASE.view(torch.float16)[6:9])]
    with pytest.raises(ArgumentError, match=r"^other must have memory of its own .* shares some with one"):
        check_separate(both, [])


def model(requires_grad=True):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data, requires_grad=requires_grad)
    return model


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_sharded_model_with_parameters_of_one_memory_is_refused(requires_grad):
    with pytest.raises(ArgumentError, match=r"^1\.weight must .* shares some with 0\.weight: give the model one"):
        wrap(SOLO, model(requires_grad), use_distributed_optimizer=True)
    wrap(SOLO, model(requires_grad))


def test_parameters_of_16_bits_in_one_memory_are_refused_because_copies_are_updated():
    shared = model().bfloat16()
    shared[1].weight = nn.Parameter(shared[0].weight.data)
    with pytest.raises(ArgumentError, match=r"^1\.weight must .* shares some with 0\.weight"):
        wrap(SOLO, shared)


def test_a_sharded_model_with_a_buffer_in_the_memory_of_a_parameter_is_refused():
    layer = nn.Linear(4, 4)
    layer.register_buffer("first_row", layer.weight.data[0])
    with pytest.raises(ArgumentError, match="first_row"):
        wrap(SOLO, layer, use_distributed_optimizer=True)


def test_a_sharded_model_may_be_wrapped_again():
    layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for _ in range(3):
        wrap(SOLO, layer, use_distributed_optimizer=True)
