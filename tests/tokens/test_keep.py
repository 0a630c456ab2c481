"""Tests of builders that resume from the data of a killed process."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.files.built_pair import build, names_in
from tests.support.tiers import with_files
from trackbed.errors import ArgumentError, FormatError
from trackbed.files import FileSum
from trackbed.tokens import IndexedDatasetBuilder, verify_content

STOPS = """
import os, signal, sys
import numpy as np
from pathlib import Path
from trackbed.tokens import IndexedDatasetBuilder
prefix, kept = sys.argv[1:]
builder = IndexedDatasetBuilder(prefix + ".bin", np.uint16)
builder.add_documents(np.arange(500_000) % 1000, [300_000, 200_000])
written = builder.keep(Path(kept))
print(written.size_bytes, *written.crc32, flush=True)
builder.add_documents(np.zeros(400_000, dtype=np.int64), [400_000])
os.kill(os.getpid(), signal.SIGKILL)
"""


def files_of(prefix):
    return [prefix.with_suffix(end).read_bytes() for end in (".bin", ".idx", ".trackbed.json")]


@with_files
@given(
    before=st.lists(st.integers(0, 5), max_size=4),
    lost=st.lists(st.integers(0, 5), max_size=4),
    after=st.lists(st.integers(0, 5), max_size=4),
)
def test_kept_data_and_later_documents_make_the_pair_of_a_builder_that_never_stopped(tmp_path, before, lost, after):
    prefix, kept = tmp_path / "out", tmp_path / "kept"
    first = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    for length in before:
        first.add_document([7] * length, [length])
    written = first.keep(kept)
    for length in lost:
        first.add_document([8] * length, [length])
    first.leave()
    second = IndexedDatasetBuilder.reopen(f"{prefix}.bin", np.uint16, partial=kept, written=written, lengths=before)
    for length in after:
        second.add_document([9] * length, [length])
    second.finalize(f"{prefix}.idx")
    build(tmp_path / "whole", [[7] * length for length in before] + [[9] * length for length in after], np.uint16)
    assert files_of(prefix) == files_of(tmp_path / "whole")
    assert len(names_in(tmp_path)) == 6


@pytest.mark.parametrize("modes", [None, [0, 1, 0, -3]])
def test_kept_documents_of_several_sequences_go_on(tmp_path, modes):
    prefixes = [tmp_path / name for name in ("out", "whole")]
    multimodal = modes is not None
    lengths, counts = [1, 0, 2, 1], [3, 0, 1]
    for prefix in prefixes:
        builder = IndexedDatasetBuilder(f"{prefix}.bin", np.int32, multimodal)
        builder.add_documents([1, 2, 3, 4], lengths, counts=counts, modes=modes)
        if prefix.name == "out":
            written = builder.keep(tmp_path / "kept")
            builder.leave()
            builder = IndexedDatasetBuilder.reopen(
                f"{prefix}.bin",
                np.int32,
                partial=tmp_path / "kept",
                written=written,
                lengths=lengths,
                counts=counts,
                modes=modes,
            )
        builder.add_documents([5, 6], [1, 1], counts=[2], modes=[0, 1] if multimodal else None)
        builder.finalize(f"{prefix}.idx")
    assert files_of(prefixes[0]) == files_of(prefixes[1])


def test_a_builder_resumes_from_the_data_of_a_killed_process(tmp_path):
    prefix, kept = tmp_path / "out", tmp_path / "kept"
    done = subprocess.run(
        [sys.executable, "-c", STOPS, str(prefix), str(kept)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -9
    assert kept.stat().st_size > 1_000_000
    size, *crc32 = done.stdout.split()
    written = FileSum(int(size), crc32)
    builder = IndexedDatasetBuilder.reopen(
        f"{prefix}.bin", np.uint16, partial=kept, written=written, lengths=[300_000, 200_000]
    )
    builder.add_documents([1, 2, 3], [3])
    builder.finalize(f"{prefix}.idx")
    assert verify_content(str(prefix)).tokens == 500_003
    assert names_in(tmp_path) == ["out.bin", "out.idx", "out.trackbed.json"]


@pytest.fixture
def kept(prefix):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    builder.add_documents([1, 2, 3], [3])
    written = builder.keep(prefix.with_name("kept"))
    builder.leave()
    return written


@pytest.mark.parametrize("content", [b"", b"\x01\x00", b"\x01\x00\x02\x00\x04\x00", b"x" * 100])
def test_data_that_differ_from_those_kept_are_refused_and_not_changed(prefix, kept, content):
    partial = prefix.with_name("kept")
    partial.write_bytes(content)
    with pytest.raises(FormatError, match="kept: must begin with the 6 bytes that were saved, found others"):
        IndexedDatasetBuilder.reopen(f"{prefix}.bin", np.uint16, partial=partial, written=kept, lengths=[3])
    assert partial.read_bytes() == content
    assert names_in(prefix.parent) == ["kept"]


def test_lengths_that_do_not_match_the_kept_data_are_refused(prefix, kept):
    partial = prefix.with_name("kept")
    with pytest.raises(ArgumentError, match="lengths must add up to the 3 tokens, found 2"):
        IndexedDatasetBuilder.reopen(f"{prefix}.bin", np.uint16, partial=partial, written=kept, lengths=[2])


def test_a_failure_at_the_end_leaves_the_kept_data(prefix, kept, tmp_path):
    partial = prefix.with_name("kept")
    builder = IndexedDatasetBuilder.reopen(f"{prefix}.bin", np.uint16, partial=partial, written=kept, lengths=[3])
    builder.sequence_lengths.pop()  # the state after an interrupt
    with pytest.raises(ArgumentError, match="must have the 6 bytes written, found 0"):
        builder.finalize(f"{prefix}.idx")
    builder.leave()
    assert names_in(tmp_path) == ["kept"]


def test_discard_removes_kept_data_too(prefix, kept):
    partial = prefix.with_name("kept")
    builder = IndexedDatasetBuilder.reopen(f"{prefix}.bin", np.uint16, partial=partial, written=kept, lengths=[3])
    builder.discard()
    assert names_in(prefix.parent) == []
