"""The memory that a merge takes, measured in processes of their own."""

import subprocess
import sys

import numpy as np
import pytest

from trackbed.tokens import IndexedDataset, IndexedDatasetBuilder, verify

MERGE = """
import resource, sys
from trackbed.tokens import merge
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
merge(sys.argv[2:], sys.argv[1])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""
INDEX_BYTES = 20
"""What the index takes for each document."""


def write_pair(prefix, num_documents):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    builder.add_documents(np.zeros(2 * num_documents, dtype=np.uint16), np.full(num_documents, 2))
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def peak_of_a_merge(folder, prefixes):
    """Bytes above what importing took."""
    done = subprocess.run(
        [sys.executable, "-c", MERGE, str(folder / "merged"), *prefixes], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_a_merge_takes_no_more_memory_for_more_documents_than_their_index_does(tmp_path):
    small, large = (write_pair(tmp_path / f"pair{count}", count) for count in (1_000, 1_000_000))
    constant = peak_of_a_merge(tmp_path, [small] * 2)
    assert peak_of_a_merge(tmp_path, [large] * 2) - constant < 2_000_000 * INDEX_BYTES
    assert verify(str(tmp_path / "merged")).documents == 2_000_000


@pytest.mark.slow
@pytest.mark.parametrize("num_files", [2_000, 2])
def test_ten_million_documents_are_merged_in_the_memory_of_their_index(tmp_path, num_files):
    # One pair, merged again and again: the memory of thousands of pairs is that of thousands of names for them.
    one, many = (write_pair(tmp_path / f"pair{count}", count) for count in (10, 10_000_000 // num_files))
    constant = peak_of_a_merge(tmp_path, [one] * num_files)
    assert peak_of_a_merge(tmp_path, [many] * num_files) - constant < 10_000_000 * INDEX_BYTES
    merged = IndexedDataset(str(tmp_path / "merged"))
    assert len(merged) == 10_000_000
    assert merged[9_999_999].tolist() == [0, 0]
