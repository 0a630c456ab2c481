import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError
from trackbed.kernels import narrow, reference

SOURCES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
TARGETS = ["uint8", "int8", "uint16", "int16", "int32", "int64"]


def integers(dtype):
    limits = np.iinfo(dtype)
    edges = [edge for target in TARGETS for edge in (np.iinfo(target).min, np.iinfo(target).max)]
    near = sorted({value for edge in edges for value in (edge - 1, edge, edge + 1)})
    inside = [value for value in near if limits.min <= value <= limits.max]
    return st.one_of(st.integers(0, 100), st.sampled_from(inside), st.integers(limits.min, limits.max))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
@given(data=st.data())
def test_narrow_equals_its_reference(source, target, data):
    few = st.lists(integers(source), max_size=3)
    tokens = np.array(data.draw(few) + [7] * data.draw(st.integers(0, 40)) + data.draw(few), dtype=source)
    wanted, first = reference.narrow(tokens, target)
    if first == len(tokens):
        assert narrow(tokens, np.dtype(target)) == wanted.tobytes()
        assert wanted.tolist() == tokens.tolist()
    else:
        limits = np.iinfo(target)
        with pytest.raises(ArgumentError) as caught:
            narrow(tokens, np.dtype(target))
        assert str(caught.value) == (
            f"a token must be an integer in [{limits.min}, {limits.max}] to be stored as {target}, "
            f"found {tokens[first]}"
        )


@pytest.mark.parametrize("at", range(70))
def test_a_number_that_does_not_fit_is_found_anywhere(at):
    tokens = np.arange(70)
    tokens[at] = -1
    with pytest.raises(ArgumentError, match=r"found -1$"):
        narrow(tokens, np.dtype(np.uint16))


def test_the_first_of_several_that_do_not_fit_is_named():
    with pytest.raises(ArgumentError, match=r"found 70000$"):
        narrow(np.array([1, 70000, -5]), np.dtype(np.uint16))


def test_a_source_may_be_strided_unaligned_or_read_only():
    tokens = np.array([1, 2, 3], dtype=np.int64)
    unaligned = np.frombuffer(b"\x00" + tokens.tobytes(), dtype=np.int64, offset=1)
    for source in (unaligned, np.repeat(tokens, 2)[::2], tokens[::-1][::-1]):
        assert narrow(source, np.dtype(np.uint16)) == np.array([1, 2, 3], dtype=np.uint16).tobytes()


@pytest.mark.parametrize(
    ("source", "target", "found"),
    [
        (np.zeros((1, 2), np.int64), np.uint16, r"<i8\[1, 2\] and <u2"),
        (np.zeros(2, np.float64), np.uint16, "<f8"),
        (np.zeros(2, np.bool_), np.uint16, "|b1"),
        (np.zeros(2, np.int64), np.float32, "<f4"),
        (np.zeros(2, np.int64), np.uint32, "<u4"),
        (np.zeros(2, ">i8"), np.uint16, ">i8"),
        (np.zeros(2, np.int64), ">u2", ">u2"),
    ],
)
def test_vectors_and_types_of_another_kind_are_refused(source, target, found):
    with pytest.raises(ArgumentError, match=f"source and dtype must be .*{found}"):
        narrow(source, np.dtype(target))
