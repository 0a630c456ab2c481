"""Fuzz tests of arbitrary bytes in place of an `.idx`: only FormatError and ArgumentError may be raised."""

import itertools
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from tests.support.files.indexed_pair import CODES, Pair
from tests.support.hostile.fuzzing import for_seconds, fuzz
from trackbed.errors import ArgumentError, FormatError
from trackbed.tokens import IndexedDataset, Verified, open_index, verify

U64 = st.one_of(
    st.sampled_from([0, 1, 2, 3, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]),
    st.integers(0, 20),
    st.integers(0, 2**64 - 1),
)
TARGETS = 3


@st.composite
def whole_pairs(draw):
    """Strategy of valid pairs."""
    dtype = draw(st.sampled_from(sorted(CODES)))
    lengths = draw(st.lists(st.integers(0, 4), max_size=6))
    inner = draw(st.lists(st.integers(0, len(lengths)), max_size=4))
    return Pair(
        Path("unnamed"),
        lengths=lengths,
        borders=[0, *sorted(inner), len(lengths)],
        tokens=list(range(sum(lengths))),
        dtype=dtype,
        modes=[n % 3 for n in range(len(lengths))] if draw(st.booleans()) else None,
    )


@st.composite
def damaged_files(draw):
    """Strategy of the bytes of an `.idx` and a `.bin`: a valid pair with a few changes, or arbitrary bytes."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200)), draw(st.binary(max_size=50))
    pair = draw(whole_pairs())
    raw = bytearray(pair.encode())
    data = np.array(pair.tokens, dtype=pair.dtype).tobytes()
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(0, len(raw) - 1)))
        change = draw(st.sampled_from(["byte", "number", "length", "count", "cut", "grow", "swap", "data"]))
        if change == "byte" and raw:
            raw[at] = draw(st.integers(0, 255))
        elif change == "number":
            # At a pointer or border, if the counts are still those of the pair.
            place = 34 + 4 * len(pair.lengths) + 8 * draw(st.integers(0, len(pair.lengths) + len(pair.borders)))
            raw[place : place + 8] = struct.pack("<Q", draw(U64))
        elif change == "length":
            place = 34 + 4 * draw(st.integers(0, len(pair.lengths)))
            raw[place : place + 4] = struct.pack("<i", draw(st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 9)))
        elif change == "count":
            place = draw(st.sampled_from([18, 26]))
            raw[place : place + 8] = struct.pack("<Q", draw(U64))
        elif change == "cut":
            del raw[at : at + draw(st.integers(1, 12))]
        elif change == "grow":
            raw[at:at] = draw(st.binary(min_size=1, max_size=12))
        elif change == "swap":
            other = draw(st.integers(0, max(0, len(raw) - 8)))
            raw[at : at + 8], raw[other : other + 8] = raw[other : other + 8], raw[at : at + 8]
        else:
            data = data[: draw(st.integers(0, len(data)))] + draw(st.binary(max_size=9))
    return bytes(raw), data


@pytest.fixture
def written(tmp_path):
    """Writes an `.idx` and a `.bin` under a new name, because earlier ones may still be mapped."""
    serial = itertools.count()

    def write(files):
        prefix = tmp_path / str(next(serial))
        for suffix, raw in zip((".idx", ".bin"), files, strict=True):
            Path(f"{prefix}{suffix}").write_bytes(raw)
        return prefix

    return write


def remove(prefix):
    for suffix in (".idx", ".bin"):
        Path(f"{prefix}{suffix}").unlink()


@for_seconds(TARGETS)
def test_any_bytes_are_an_index_or_a_format_error(written, seconds):
    opened = 0

    def check(files):
        nonlocal opened
        prefix = written(files)
        idx = Path(f"{prefix}.idx")
        for multimodal in (False, True):
            try:
                index = open_index(idx, multimodal=multimodal)
            except FormatError as error:
                assert str(idx) in str(error)  # noqa: PT017  the other branch has checks of its own
            else:
                opened += 1
                assert index.sequence_lengths.shape == index.sequence_pointers.shape == (len(index),)
                assert index.document_indices.shape == (index.document_count,)
                assert multimodal is (index.sequence_modes is not None)
                used = index.sequence_lengths.nbytes + index.sequence_pointers.nbytes + index.document_indices.nbytes
                assert 34 + used <= len(files[0]) <= 34 + used + len(index)
                assert all(len(index[i]) == 3 for i in range(len(index)))
        remove(prefix)

    assert fuzz(damaged_files(), check, seconds=seconds) > opened > 0


@for_seconds(TARGETS)
def test_any_pair_that_opens_has_sequences_of_their_length_or_raises_a_format_error(written, seconds):
    opened = refused = 0

    def check(files):
        nonlocal opened, refused
        prefix = written(files)
        for options in ({}, {"mmap": False}, {"fast_cache_load": True}, {"multimodal": True}):
            try:
                dataset = IndexedDataset(str(prefix), **options)
            except (FormatError, ArgumentError) as error:
                assert str(prefix) in str(error)  # noqa: PT017  the other branch has checks of its own
                refused += 1
                continue
            opened += 1
            for number in range(len(dataset)):
                try:
                    tokens = dataset[number]
                    some = dataset[number : number + 2]
                except FormatError as error:
                    assert str(prefix) in str(error)  # noqa: PT017
                    continue
                if "multimodal" in options:
                    (tokens, mode), (some, modes) = tokens, some
                    assert modes[0] == mode
                assert tokens.dtype == dataset.index.dtype
                assert len(tokens) == dataset.sequence_lengths[number]
                assert [len(part) for part in some] == dataset.sequence_lengths[number : number + 2].tolist()
                assert tokens.tobytes() == some[0].tobytes()
        remove(prefix)

    fuzz(damaged_files(), check, seconds=seconds)
    assert opened > 0
    assert refused > 0


@for_seconds(TARGETS)
def test_a_verified_pair_is_readable_to_the_last_byte(written, seconds):
    verified = refused = 0

    def check(files):
        nonlocal verified, refused
        prefix = written(files)
        try:
            found = verify(str(prefix))
        except FormatError as error:
            assert str(prefix) in str(error)  # noqa: PT017  the other branch has checks of its own
            refused += 1
        else:
            verified += 1
            assert isinstance(found, Verified)
            for options in ({}, {"mmap": False}):
                dataset = IndexedDataset(str(prefix), **options)
                assert len(dataset) == found.sequences
                read = b"".join(dataset[number].tobytes() for number in range(len(dataset)))
                assert read == b"".join(tokens.tobytes() for tokens in dataset[:]) == files[1]
                borders = dataset.document_indices
                assert (len(borders), borders[0], borders[-1]) == (found.documents + 1, 0, found.sequences)
                assert (np.diff(borders) >= 0).all()
        remove(prefix)

    fuzz(damaged_files(), check, seconds=seconds)
    assert verified > 0
    assert refused > 0
