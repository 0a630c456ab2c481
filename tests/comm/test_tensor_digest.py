"""Digests of tensors: equal exactly where the bits are, in any memory layout."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trackbed.comm.tensor_digest import tensor_digest

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def random_tensor(count, dtype, seed=0):
    numbers = torch.randint(0, 256, (count * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    return (numbers % (2 if dtype is torch.bool else 256)).to(torch.uint8).view(dtype)


@given(st.sampled_from(DTYPES), st.integers(1, 400), st.data())
def test_one_changed_bit_changes_the_digest(dtype, count, data):
    before = random_tensor(count, dtype)
    after = before.clone()
    byte = data.draw(st.integers(0, count * dtype.itemsize - 1))
    bit = 0 if dtype is torch.bool else data.draw(st.integers(0, 7))
    after.view(torch.uint8)[byte] ^= 1 << bit
    assert tensor_digest(before) == tensor_digest(before.clone())
    assert tensor_digest(before) != tensor_digest(after)


@given(st.sampled_from(DTYPES), st.integers(0, 30), st.integers(1, 9), st.integers(0, 3))
def test_strides_and_offsets_do_not_matter(dtype, rows, columns, offset):
    tensor = random_tensor(rows * columns + offset, dtype)[offset:].view(rows, columns)
    digest = tensor_digest(tensor.clone())
    assert tensor_digest(tensor) == digest
    assert tensor_digest(tensor.t().contiguous().t()) == digest
    assert tensor_digest(tensor.clone().view(columns, rows) if rows else tensor) == digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_opposite_numbers_and_exchanged_elements_differ(dtype):
    tensor = torch.randn(200_000, generator=torch.Generator().manual_seed(1)).to(dtype)
    digests = {tensor_digest(one) for one in (tensor, -tensor, tensor.flip(0), tensor.roll(1), tensor.roll(1 << 15))}
    assert len(digests) == 5


def test_lengths_that_are_not_whole_rows_are_read_to_their_end():
    for count in (1, 3, (1 << 15) - 1, 1 << 15, (1 << 15) + 1, 4 << 15, (4 << 15) + 5):
        tensor = torch.zeros(count)
        last = tensor.clone()
        last[-1] = 1
        assert tensor_digest(tensor) != tensor_digest(last)
    assert tensor_digest(torch.zeros(8)) != tensor_digest(torch.zeros(9))
    assert tensor_digest(torch.zeros(8, dtype=torch.uint8)) != tensor_digest(torch.zeros(9, dtype=torch.uint8))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_lazy_conjugates_sparse_and_scalar_tensors_are_read_by_value():
    number = torch.tensor([1 + 2j, 3 - 1j])
    assert tensor_digest(number.conj()) == tensor_digest(number.conj().resolve_conj()) != tensor_digest(number)
    dense = torch.eye(5)
    for sparse in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()):
        assert tensor_digest(sparse) != tensor_digest(2 * sparse)
    assert tensor_digest(torch.tensor(1.0)) != tensor_digest(torch.tensor(2.0))


def test_work_can_be_given_up_between_pieces():
    calls = []

    def poll():
        calls.append(None)
        if len(calls) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        tensor_digest(torch.zeros(8 << 17), poll)
