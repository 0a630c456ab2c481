"""Indexed files against Megatron Core's: the same bytes, and each reads the other's."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets import indexed_dataset as oracle

from tests.support.tiers import with_files
from trackbed import tokens as ours
from trackbed.errors import FormatError

CODES = [dtype.name for dtype in oracle.DType]


@st.composite
def corpora(draw):
    """A type, and documents of (sequence, mode)."""
    dtype = np.dtype(draw(st.sampled_from(CODES)))
    if dtype.kind == "f":
        numbers = st.floats(width=8 * dtype.itemsize, allow_nan=False)
    else:
        numbers = st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    sequence = st.tuples(st.lists(numbers, max_size=5), st.integers(-128, 127))
    return dtype.type, draw(st.lists(st.lists(sequence, max_size=4), max_size=5))


def write(library, prefix, dtype, documents, *, multimodal, by_item):
    builder = library.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=multimodal)
    for document in documents:
        if by_item:
            for sequence, mode in document:
                builder.add_item(torch.from_numpy(np.array(sequence, dtype=dtype)), mode)
            builder.end_document()
        else:
            tokens = np.array([token for sequence, _ in document for token in sequence], dtype=dtype)
            lengths = [len(sequence) for sequence, _ in document]
            builder.add_document(tokens, lengths, [mode for _, mode in document])
    builder.finalize(f"{prefix}.idx")


def read_all(library, prefix, *, multimodal, mmap):
    """Everything a dataset says, in lists."""
    dataset = library.IndexedDataset(str(prefix), multimodal=multimodal, mmap=mmap)
    items = [dataset[i] for i in range(len(dataset))]
    parts = [dataset.get(i, 1, max(0, int(dataset.sequence_lengths[i]) - 1)) for i in range(len(dataset))]
    if multimodal:
        items, parts = ([(tokens.tolist(), mode.item()) for tokens, mode in some] for some in (items, parts))
    else:
        items, parts = ([tokens.tolist() for tokens in some] for some in (items, parts))
    return {
        "dtype": dataset.index.dtype,
        "counts": (dataset.index.sequence_count, dataset.index.document_count),
        "items": items,
        "parts": parts,
        "lengths": dataset.sequence_lengths.tolist(),
        "borders": dataset.document_indices.tolist(),
        "pointers": dataset.index.sequence_pointers.tolist(),
    }


def files_of(prefix):
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.mark.parametrize("multimodal", [False, True])
@with_files
@given(corpus=corpora(), by_item=st.booleans())
def test_both_builders_write_the_same_bytes(tmp_path, multimodal, corpus, by_item):
    for library, name in ((ours, "ours"), (oracle, "theirs")):
        write(library, tmp_path / name, *corpus, multimodal=multimodal, by_item=by_item)
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("multimodal", [False, True])
@with_files
@given(corpus=corpora())
def test_each_reads_what_the_other_wrote(tmp_path, multimodal, mmap, corpus):
    dtype, documents = corpus
    # Megatron Core cannot map an empty file, nor read no tokens behind the end of one.
    documents = [*documents, [([1, 0], 5)], [([1], -1)]]
    for library, name in ((ours, "ours"), (oracle, "theirs")):
        for path in (tmp_path / f"{name}.bin", tmp_path / f"{name}.idx"):
            path.unlink(missing_ok=True)
        write(library, tmp_path / name, dtype, documents, multimodal=multimodal, by_item=False)
    settings = {"multimodal": multimodal, "mmap": mmap}
    by_us = read_all(ours, tmp_path / "theirs", **settings)
    assert by_us == read_all(ours, tmp_path / "ours", **settings)
    assert by_us == read_all(oracle, tmp_path / "ours", **settings)
    assert by_us == read_all(oracle, tmp_path / "theirs", **settings)


@pytest.mark.parametrize("mmap", [True, False])
def test_slices_are_what_megatron_gives(tmp_path, mmap):
    documents = [[([1, 2], 1), ([], 0)], [([3], 2), ([4, 5, 6], 0), ([7], 3)]]
    write(oracle, tmp_path / "theirs", np.int32, documents, multimodal=True, by_item=True)
    for multimodal in (False, True):
        datasets = [
            library.IndexedDataset(str(tmp_path / "theirs"), multimodal=multimodal, mmap=mmap)
            for library in (ours, oracle)
        ]
        for part in (slice(None), slice(1, 4), slice(-3, None), slice(0, 1), slice(2, -1)):
            found, wanted = (dataset[part] for dataset in datasets)
            if multimodal:
                assert found[1].tolist() == wanted[1].tolist()
                found, wanted = found[0], wanted[0]
            assert [tokens.tolist() for tokens in found] == [tokens.tolist() for tokens in wanted]


@pytest.fixture
def quick_collection():
    """Megatron Core collects garbage for every pair that it adds: let it not look at all that was imported."""
    gc.freeze()
    yield
    gc.unfreeze()


small_documents = st.lists(
    st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=4), st.just(0)), max_size=3), max_size=3
)


@with_files
@given(dtype=st.sampled_from(CODES).map(np.dtype), parts=st.lists(small_documents, min_size=1, max_size=3))
def test_merged_pairs_have_the_same_bytes(tmp_path, quick_collection, dtype, parts):
    for library, name in ((ours, "ours"), (oracle, "theirs")):
        for number, documents in enumerate(parts):
            part = tmp_path / f"{name}-{number}"
            for path in (Path(f"{part}.bin"), Path(f"{part}.idx")):
                path.unlink(missing_ok=True)
            write(library, part, dtype.type, documents, multimodal=False, by_item=False)
        builder = library.IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=dtype.type)
        for number in range(len(parts)):
            builder.add_index(str(tmp_path / f"{name}-{number}"))
        builder.finalize(str(tmp_path / f"{name}.idx"))
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")


def test_numbers_in_words_become_the_same_bytes(tmp_path):
    for dtype in (np.uint16, np.int32, np.float32, np.float64):
        for library, name in ((ours, "ours"), (oracle, "theirs")):
            builder = library.IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=dtype)
            builder.add_document(["1", "22", "300"], [2, 1])
            builder.finalize(str(tmp_path / f"{name}.idx"))
        assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")


def test_a_pair_that_megatron_wrote_can_be_sealed(tmp_path):
    prefix = str(tmp_path / "theirs")
    write(oracle, prefix, np.uint16, [[([1, 2], 0)], [([3], 0)]], multimodal=False, by_item=False)
    with pytest.raises(FileNotFoundError, match=r"trackbed\.json"):
        ours.verify_content(prefix)
    before = files_of(prefix)
    ours.seal(prefix)
    assert files_of(prefix) == before
    assert ours.verify_content(prefix).tokens == 3
    Path(f"{prefix}.bin").write_bytes(b"\x01\x00\x02\x00\x04\x00")
    with pytest.raises(FormatError, match=r"theirs\.bin"):
        ours.verify_content(prefix)


def test_types_have_the_same_codes_sizes_and_names():
    assert {dtype.name: dtype.value for dtype in ours.DType} == {dtype.name: dtype.value for dtype in oracle.DType}
    for code in range(1, 9):
        assert ours.DType.dtype_from_code(code) is oracle.DType.dtype_from_code(code)
        assert ours.DType.size(code) == oracle.DType.size(code)
    for cardinality in (None, 0, 1, 65499, 65500, 65501, 2**31):
        assert ours.DType.optimal_dtype(cardinality) is oracle.DType.optimal_dtype(cardinality)
