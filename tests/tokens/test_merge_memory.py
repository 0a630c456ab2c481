"""Tests of the memory that a merge takes, measured in separate processes."""

import subprocess
import sys

import numpy as np
import pytest

from trackbed.tokens import IndexedDataset, IndexedDatasetBuilder, verify

# Not by getrusage, whose peak is inherited from the parent process.
MERGE = """
import sys
from pathlib import Path
from trackbed.tokens import merge
def peak():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10
before = peak()
merge(sys.argv[2:], sys.argv[1])
print(peak() - before)
"""
INDEX_BYTES = 20
"""Memory of the index per document."""


def write_pair(prefix, num_documents):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    builder.add_documents(np.zeros(2 * num_documents, dtype=np.uint16), np.full(num_documents, 2))
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def peak_of_a_merge(folder, prefixes):
    """Peak memory in bytes above the peak after importing."""
    done = subprocess.run(
        [sys.executable, "-c", MERGE, str(folder / "merged"), *prefixes], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_a_merge_takes_no_more_memory_for_more_documents_than_their_index_does(tmp_path):
    pair = write_pair(tmp_path / "pair", 1_000_000)
    of_one, of_three = (peak_of_a_merge(tmp_path, [pair] * count) for count in (1, 3))
    assert 2_000_000 * 8 < of_three - of_one < 2_000_000 * INDEX_BYTES
    assert verify(str(tmp_path / "merged")).documents == 3_000_000


@pytest.mark.slow
@pytest.mark.parametrize("num_files", [2_000, 2])
def test_ten_million_documents_are_merged_in_the_memory_of_their_index(tmp_path, num_files):
    # One pair, merged repeatedly, so that only its path takes memory for each of thousands of inputs.
    one, many = (write_pair(tmp_path / f"pair{count}", count) for count in (10, 10_000_000 // num_files))
    constant = peak_of_a_merge(tmp_path, [one] * num_files)
    assert 10_000_000 * 8 < peak_of_a_merge(tmp_path, [many] * num_files) - constant < 10_000_000 * INDEX_BYTES
    merged = IndexedDataset(str(tmp_path / "merged"))
    assert len(merged) == 10_000_000
    assert merged[9_999_999].tolist() == [0, 0]
