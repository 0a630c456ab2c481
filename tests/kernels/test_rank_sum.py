"""The kernel that sums the buffers of all ranks in place."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError
from trackbed.kernels import reference, sum_ranks

NUMPY = {"float32": np.float32, "float64": np.float64}
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16}
UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}
FACTORS = [1.0, 0.5, 1 / 3, 0.2, 1 / 7, 0.0, 3.0]


def numbers(name, count, seed):
    """Bits of any kind: NaNs, infinities, subnormals, ties, and numbers of similar sizes."""
    width = 2 if name in TORCH else np.dtype(name).itemsize
    random = np.random.default_rng(seed)
    bits = random.integers(0, 2 ** (8 * width), count, dtype=UNSIGNED[width])
    if seed % 2:  # numbers around 1 with few mantissa bits, whose sums are often ties
        one = {"float32": 0x3F800000, "float64": 0x3FF0000000000000, "bfloat16": 0x3F80, "float16": 0x3C00}[name]
        bits = (bits & UNSIGNED[width](0x83)) | UNSIGNED[width](one) | (bits << UNSIGNED[width](8 * width - 1))
    special = {"float32": [0x7F800000, 0x7FC00000, 1], "float64": [0x7FF << 52, 0x7FF8 << 48, 1]}
    special |= {"bfloat16": [0x7F80, 0x7F81, 1], "float16": [0x7C00, 0x7C01, 1]}
    places = random.random(count) < 0.02
    bits[places] = random.choice(special[name], places.sum())
    return bits.view(np.float16 if name == "float16" else name) if name != "bfloat16" else bits


def as_torch(name, array):
    return torch.from_numpy(array.view(np.int16).copy()).view(TORCH[name])


def expected(name, buffers, factor, divisor, owner):
    """The buffers after the sum: by NumPy's arithmetic, or for 16 bits by torch's."""
    with np.errstate(all="ignore"):
        if name in NUMPY:
            return reference.sum_ranks(buffers, factor=factor, divisor=divisor, owner=owner)
        products = [as_torch(name, buffer) * factor for buffer in buffers]
        terms = [product.float() for product in products]
        while len(terms) > 1:
            half = (len(terms) + 1) // 2
            terms = [terms[i] + terms[i + half] if i + half < len(terms) else terms[i] for i in range(half)]
        total = (terms[0] / divisor).to(TORCH[name])
        return [total if owner in (None, rank) else product for rank, product in enumerate(products)]


def is_same(name, found, wanted):
    """Equal to the last bit, where all NaNs count as equal."""
    if name in TORCH:
        found = as_torch(name, found)
        nan = torch.isnan(found)
        same = found.view(torch.int16) == wanted.view(torch.int16)
        return bool((nan == torch.isnan(wanted)).all()) and bool((same | nan).all())
    unsigned = UNSIGNED[found.dtype.itemsize]
    nan = np.isnan(found)
    return (nan == np.isnan(wanted)).all() and (nan | (found.view(unsigned) == wanted.view(unsigned))).all()


@pytest.mark.parametrize("name", [*NUMPY, *TORCH])
@given(data=st.data(), ranks=st.integers(1, 9), count=st.integers(0, 1500), seed=st.integers(0, 2**32))
def test_a_sum_equals_its_reference_to_the_last_bit(level, name, data, ranks, count, seed):
    owner = data.draw(st.none() | st.integers(0, ranks - 1))
    factor = data.draw(st.sampled_from([*FACTORS, 1 / ranks]))
    divisor = data.draw(st.sampled_from([1, ranks]))
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    buffers = [numbers(name, count, seed + rank) for rank in range(ranks)]
    before = [buffer.copy() for buffer in buffers]
    wanted = expected(name, [buffer[start:stop] for buffer in before], factor, divisor, owner)
    sum_ranks(buffers, start=start, stop=stop, factor=factor, divisor=divisor, owner=owner)
    for found, old, sums in zip(buffers, before, wanted, strict=True):
        assert is_same(name, found[start:stop], sums)
        assert found[:start].tobytes() + found[stop:].tobytes() == old[:start].tobytes() + old[stop:].tobytes()


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
def test_every_number_of_16_bits_is_scaled_as_torch_scales_it(level, name, factor):
    every = np.arange(2**16, dtype=np.uint16)
    every = every if name == "bfloat16" else every.view(np.float16)
    buffers = [every.copy(), every[::-1].copy()]
    wanted = expected(name, [buffer.copy() for buffer in buffers], factor, 1, 0)
    sum_ranks(buffers, start=0, stop=len(every), factor=factor, owner=0)
    assert all(is_same(name, found, sums) for found, sums in zip(buffers, wanted, strict=True))


@pytest.mark.parametrize("name", TORCH)
def test_a_tie_is_rounded_to_the_even_neighbour(level, name):
    bits = {"bfloat16": 8, "float16": 11}[name]  # of the mantissa, so 2**bits + 1 lies between two neighbours
    pairs = torch.tensor([[2.0**bits, 1.0], [2.0**bits + 2, 1.0]]).to(TORCH[name])
    rows = [column.contiguous().view(torch.int16).numpy() for column in pairs.T]
    rows = [row.view(np.uint16 if name == "bfloat16" else np.float16) for row in rows]
    sum_ranks(rows, start=0, stop=2)
    assert as_torch(name, rows[0]).tolist() == [2.0**bits, 2.0**bits + 4]


def test_rank_r_adds_rank_r_plus_half():
    large, small = np.float32(2**24), np.float32(1)
    # (b0 + b2) + b1: the ones are added to the large number one by one, or to each other first.
    apart = [np.array([value], dtype=np.float32) for value in (large, small, small)]
    together = [np.array([value], dtype=np.float32) for value in (small, large, small)]
    for buffers in (apart, together):
        sum_ranks(buffers, start=0, stop=1)
    assert apart[0] == 2**24
    assert together[0] == 2**24 + 2


@pytest.mark.parametrize("name", [*NUMPY, *TORCH])
@pytest.mark.parametrize("ranks", [2, 3])
def test_threads_do_not_change_the_sum(name, ranks):
    count = 2**19 + 77
    buffers = [numbers(name, count, 2 * rank) for rank in range(ranks)]
    alone = [buffer.copy() for buffer in buffers]
    sum_ranks(alone, start=5, stop=count - 3, factor=0.5)
    sum_ranks(buffers, start=5, stop=count - 3, factor=0.5, num_threads=3)
    assert [buffer.tobytes() for buffer in buffers] == [buffer.tobytes() for buffer in alone]


def test_an_exception_of_the_poll_ends_the_sum():
    def stop(done):
        raise KeyboardInterrupt

    buffer = np.zeros(2**22, dtype=np.float64)
    with pytest.raises(KeyboardInterrupt):
        sum_ranks([buffer] * 256, start=0, stop=2**22, poll=stop)  # 8 GB to read take longer than any poll


def frozen(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffers": []}, "buffers must hold at least one buffer, found none"),
        ({"buffers": [np.zeros(3, np.float32), np.zeros(4, np.float32)]}, r"but buffers\[1\] is <f4\[4\] beside <f4"),
        ({"buffers": [np.zeros(3, np.float32), np.zeros(3)]}, r"but buffers\[1\] is <f8\[3\] beside <f4\[3\]"),
        ({"buffers": [np.zeros(3, np.int32)]}, r"but buffers\[0\] is <i4"),
        ({"buffers": [np.zeros(3, ">f4")]}, r"but buffers\[0\] is >f4"),
        ({"buffers": [np.zeros((3, 1), np.float32)]}, r"but buffers\[0\] is <f4\[3, 1\]"),
        ({"buffers": [np.zeros(6, np.float32)[::2]]}, "buffers must be writable vectors"),
        ({"buffers": [frozen(np.zeros(3, np.float32))]}, "buffers must be writable vectors"),
        ({"start": -1}, r"start and stop must be in order in \[0, 3\], but are -1 and 3"),
        ({"start": 2, "stop": 1}, r"in order in \[0, 3\], but are 2 and 1"),
        ({"stop": 4}, r"in order in \[0, 3\], but are 0 and 4"),
        ({"owner": 1}, r"owner must be a rank in \[0, 1\), but is 1"),
        ({"divisor": 0}, "divisor and num_threads must be at least 1, but are 0 and 1"),
        ({"num_threads": 0}, "divisor and num_threads must be at least 1, but are 1 and 0"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    arguments = {"buffers": [np.zeros(3, np.float32)], "start": 0, "stop": 3, **change}
    with pytest.raises(ArgumentError, match=message):
        sum_ranks(**arguments)
