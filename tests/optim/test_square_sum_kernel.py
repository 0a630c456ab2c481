"""The kernel of Triton gives the exact sums of the C++ one. It is run by Triton's interpreter, on the CPU."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiers import slow_but
from trackbed.optim import norm as norm_module
from trackbed.optim.norm import GpuSquares, SquareSum

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernel():
    pytest.importorskip("triton", reason="Triton comes with torch for CUDA only: pip install triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("tests/gpu has the kernel run by the GPU that is here")
    from trackbed.optim import square_sum_kernel

    norm_module._kernel.cache_clear()
    return square_sum_kernel


@st.composite
def vectors(draw, most=5000):
    """Vectors of any bits, or of numbers of similar sizes; of three types."""
    seed, count = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, most))
    rng = np.random.default_rng(seed)
    if draw(st.booleans()):
        numbers = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    else:
        with np.errstate(over="ignore"):
            numbers = (rng.standard_normal(count) * 10.0 ** draw(st.integers(-46, 38))).astype(np.float32)
    vector = torch.from_numpy(numbers.copy())
    if draw(st.booleans()):
        vector = torch.where(torch.isfinite(vector), vector, 0.0)
    return vector.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))


def by_kernel(parts):
    squares = GpuSquares(CPU)
    for part in parts:
        squares.add(part)
    return SquareSum.total(squares.numbers().numpy()[np.newaxis])


def same(one, other):
    if one.num_nan or one.num_infinite:
        return (one.num_nan > 0, one.norm() == np.inf) == (other.num_nan > 0, other.norm() == np.inf)
    return one == other


@pytest.mark.parametrize("most", slow_but([1, 3], [1, 2, 3]))  # three tests, none of which takes minutes
@settings(max_examples=settings().max_examples // 3 + 1)
@given(data=st.data())
def test_the_sum_is_exact(kernel, most, data):
    parts = data.draw(st.lists(vectors(), min_size=most // 2, max_size=most))
    assert same(by_kernel(parts), SquareSum.of(parts))


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).max, 1e-45, 1.1754942e-38, -1.0, 0.0])
@pytest.mark.parametrize("count", [1, 65_535, 65_536, 65_537, 140_000])
def test_several_programs_add_equal_numbers_of_any_size(kernel, value, count):
    vector = torch.full((count,), value)
    assert by_kernel([vector]) == SquareSum.of([vector])


def test_vectors_that_begin_anywhere_or_have_gaps(kernel):
    base = torch.randn(300, generator=torch.Generator().manual_seed(0))
    for view in (base[1:], base[3:7], base[::3], base[:0]):
        assert by_kernel([view]) == SquareSum.of([view])


def test_without_triton_the_norm_is_rounded(monkeypatch):
    monkeypatch.setattr(norm_module, "_kernel", lambda device: None)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(count, generator=generator) * 1e-3 for count in (1, 100, 5000)]
    assert by_kernel(parts).norm() == pytest.approx(SquareSum.of(parts).norm(), rel=1e-14)
    for special in (float("nan"), float("inf")):
        found = by_kernel([*parts, torch.tensor([special, 1.0])]).norm()
        assert str(found) == str(abs(special))


def test_float64_is_rounded_with_triton_too(kernel):
    vector = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert by_kernel([vector]).norm() == pytest.approx(SquareSum.of([vector]).norm(), rel=1e-14)


def test_a_kernel_that_cannot_be_compiled_is_replaced_and_told_once(kernel, monkeypatch, caplog):
    def fail(numbers, sums):
        raise RuntimeError("Failed to find C compiler.\nSet CC.")

    monkeypatch.setattr(kernel, "add_squares", fail)
    norm_module._kernel.cache_clear()
    try:
        vector = torch.tensor([3.0, 4.0])
        assert [by_kernel([vector]).norm() for _ in range(2)] == [5.0, 5.0]
        assert [record.message for record in caplog.records] == [
            "norms of gradients on cpu are rounded to float64, because Triton fails: Failed to find C compiler."
        ]
    finally:
        norm_module._kernel.cache_clear()
