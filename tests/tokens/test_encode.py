"""Tests of the conversion of tokens to the bytes of a file."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.files.built_pair import build
from tests.support.files.indexed_pair import CODES
from tests.support.tiers import with_files
from trackbed.errors import ArgumentError
from trackbed.tokens import IndexedDataset, IndexedDatasetBuilder, verify, verify_content

INTEGERS = ["uint8", "int8", "uint16", "int16", "int32", "int64"]


@st.composite
def documents_of(draw, dtype):
    """Documents of sequences of numbers that `dtype` holds."""
    if np.dtype(dtype).kind == "f":
        numbers = st.floats(width=8 * np.dtype(dtype).itemsize, allow_nan=False)
    else:
        numbers = st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    return draw(st.lists(st.lists(st.lists(numbers, max_size=5), max_size=4), max_size=5))


FORMS = {
    "list": lambda tokens, dtype: tokens,
    "tuple": lambda tokens, dtype: tuple(tokens),
    "array": lambda tokens, dtype: np.array(tokens, dtype=dtype),
    "strided array": lambda tokens, dtype: np.repeat(np.array(tokens, dtype=dtype), 2)[::2],
    "read-only array": lambda tokens, dtype: np.frombuffer(np.array(tokens, dtype=dtype).tobytes(), dtype=dtype),
    "foreign byte order": lambda tokens, dtype: np.array(tokens, dtype=np.dtype(dtype).newbyteorder(">")),
    "tensor": lambda tokens, dtype: torch.from_numpy(np.array(tokens, dtype=dtype)),
}


@pytest.mark.parametrize("form", FORMS)
@with_files
@given(data=st.data())
def test_what_is_written_is_read_back(prefix, form, data):
    dtype = data.draw(st.sampled_from(sorted(CODES)))
    documents = data.draw(documents_of(dtype))
    by_item = data.draw(st.booleans())
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.dtype(dtype).type)
    for document in documents:
        if by_item:
            for sequence in document:
                builder.add_item(FORMS[form](sequence, dtype))
            builder.end_document()
        else:
            tokens = [token for sequence in document for token in sequence]
            builder.add_document(FORMS[form](tokens, dtype), [len(sequence) for sequence in document])
    builder.finalize(f"{prefix}.idx")
    dataset = IndexedDataset(str(prefix))
    assert [tokens.tolist() for tokens in dataset[:]] == [sequence for document in documents for sequence in document]
    assert np.diff(dataset.document_indices).tolist() == [len(document) for document in documents]
    assert verify_content(str(prefix)).dtype == dtype


WIDE = {
    "list": lambda tokens: list(tokens),
    "tuple": lambda tokens: tuple(tokens),
    "list of NumPy numbers": lambda tokens: [np.int64(token) for token in tokens],
    "strings": lambda tokens: [str(token) for token in tokens],
    "array": lambda tokens: np.array(tokens, dtype=np.int64),
    "strided array": lambda tokens: np.repeat(np.array(tokens, dtype=np.int64), 2)[::2],
    "foreign byte order": lambda tokens: np.array(tokens, dtype=">i8"),
    "unaligned array": lambda tokens: np.frombuffer(
        b"\x00" + np.array(tokens, dtype=np.int64).tobytes(), dtype=np.int64, offset=1
    ),
    "tensor": lambda tokens: torch.tensor(tokens, dtype=torch.int64),
    "tensor with a stride": lambda tokens: torch.tensor(tokens, dtype=torch.int64).repeat_interleave(2)[::2],
}


@pytest.mark.parametrize("form", WIDE)
@pytest.mark.parametrize("dtype", [dtype for dtype in INTEGERS if dtype != "int64"])
def test_tokens_of_a_wider_type_are_stored_if_they_fit_and_refused_if_not(prefix, dtype, form):
    limits = np.iinfo(dtype)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.dtype(dtype).type)
    builder.add_item(WIDE[form]([limits.min, 0, limits.max]))
    for wrong in (limits.min - 1, limits.max + 1):
        with pytest.raises(ArgumentError, match=rf"out\.bin: .*{dtype}.* found {wrong}$"):
            builder.add_item(WIDE[form]([1, 2, wrong, 3]))
        with pytest.raises(ArgumentError, match=rf"out\.bin: .*{dtype}.* found {wrong}$"):
            builder.add_document(WIDE[form]([1, wrong]), [2])
    builder.add_item(WIDE[form]([7]))
    builder.end_document()
    builder.finalize(f"{prefix}.idx")
    # A refused call appends nothing.
    assert [tokens.tolist() for tokens in IndexedDataset(str(prefix))[:]] == [[limits.min, 0, limits.max], [7]]
    assert verify(str(prefix)).tokens == 4


@pytest.mark.parametrize("dtype", CODES)
def test_empty_input_is_accepted_in_any_form(prefix, dtype):
    empty = ([], (), [[]], np.array([]), np.array([], dtype=np.int64), torch.tensor([]))
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.dtype(dtype).type)
    for tokens in (*empty, np.zeros((2, 0))):
        builder.add_document(tokens, [0])
    builder.finalize(f"{prefix}.idx")
    assert [tokens.tolist() for tokens in IndexedDataset(str(prefix))[:]] == [[]] * 7


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(
    "tokens",
    [
        [2**70],
        [1, 2.0],
        [1.5],
        [None],
        ["x"],
        ["1.5"],
        ["1", "99999999999999999999"],
        [[1], [2, 3]],
        np.array([1.0]),
        np.array([True]),
        np.array([1j]),
        np.array([object()]),
        torch.tensor([1.0]),
        torch.tensor([True]),
        b"12",
    ],
)
def test_tokens_that_are_not_integers_are_refused(prefix, dtype, tokens):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.dtype(dtype).type)
    with pytest.raises(ArgumentError, match=r"out\.bin: tokens stored as .* must be integers"):
        builder.add_item(tokens)
    builder.discard()


@pytest.mark.parametrize("tokens", [2**24 + 1, -(2**24) - 1, 2**31 - 1])
def test_an_integer_that_a_float_would_round_is_refused(prefix, tokens):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.float32)
    builder.add_item([2**24, -(2**24), 0])
    for form in (list, np.array, torch.tensor):
        with pytest.raises(ArgumentError, match=f"float32 .* found {tokens}$"):
            builder.add_item(form([1, tokens]))
    builder.discard()


@pytest.mark.parametrize("dtype", CODES)
def test_numbers_given_as_strings_are_accepted(prefix, dtype):
    build(prefix, [["1", "22", "0"], []], np.dtype(dtype).type)
    assert [tokens.tolist() for tokens in IndexedDataset(str(prefix))[:]] == [[1, 22, 0], []]


def test_fractions_given_as_strings_are_accepted_in_float_files(prefix):
    build(prefix, [["1.5", "-2e3"]], np.float64)
    assert IndexedDataset(str(prefix))[0].tolist() == [1.5, -2000.0]


@pytest.mark.parametrize("dtype", CODES)
def test_the_file_is_little_endian_whatever_type_is_asked_for(prefix, dtype):
    swapped = np.dtype(dtype).newbyteorder(">")
    for tokens in ([1, 2], np.array([1, 2], dtype=dtype), np.array([1, 2], dtype=swapped)):
        build(prefix, [tokens], swapped)
        assert Path(f"{prefix}.bin").read_bytes() == np.array([1, 2], dtype=np.dtype(dtype).newbyteorder("<")).tobytes()


def test_tokens_in_several_rows_are_counted_by_the_number(prefix):
    rows = np.arange(6).reshape(2, 3)
    for tokens in (rows, rows.tolist(), torch.from_numpy(rows)):
        builder = IndexedDatasetBuilder(f"{prefix}.bin")
        builder.add_item(tokens)
        builder.end_document()
        builder.add_document(tokens, [6])
        with pytest.raises(ArgumentError, match=r"lengths .* 6 tokens, found \[2\]"):
            builder.add_document(tokens, [2])
        builder.finalize(f"{prefix}.idx")
        assert verify(str(prefix)).tokens == 12
        assert IndexedDataset(str(prefix))[1].tolist() == [0, 1, 2, 3, 4, 5]


def test_arrays_may_be_changed_as_soon_as_they_were_added(prefix):
    for dtype in (np.int32, np.int64, np.uint16):
        builder = IndexedDatasetBuilder(f"{prefix}.bin")
        tokens = np.empty(50_000, dtype=dtype)
        for number in range(10):
            tokens[:] = number
            builder.add_document(tokens, [len(tokens)])
            tokens[:] = 99
        builder.finalize(f"{prefix}.idx")
        assert [set(found.tolist()) for found in IndexedDataset(str(prefix))[:]] == [{number} for number in range(10)]
