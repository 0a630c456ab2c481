"""Sources of documents: a file beside a pair, which is replaced, merged and verified with it."""

import subprocess
import sys

import numpy as np
import pytest

from tests.support.files.built_pair import build, names_in
from tests.support.tiers import slow_but
from trackbed.errors import ArgumentError, FormatError
from trackbed.tokens import IndexedDataset, IndexedDatasetBuilder, finish_pair, merge, seal, verify, verify_content
from trackbed.tokens.document_sources import UNKNOWN_FILE, DocumentSources, Source, SourceColumns, SourceFile

A, B = SourceFile("a.jsonl", "byte"), SourceFile("s3://x/b.parquet", "row")


def write(prefix, places, files=(A, B), numbers=None):
    """Writes a pair of one document for each place, with its number as its only token."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.int32)
    builder.sources = SourceColumns()
    for number, _ in enumerate(places):
        builder.add_document([number], [1])
    builder.sources.add(files, np.zeros(len(places), int) if numbers is None else np.array(numbers), np.array(places))
    builder.finalize(f"{prefix}.idx")


def found(prefix):
    sources = DocumentSources.open(str(prefix))
    return [sources.of(document) for document in range(len(sources))]


def test_each_document_has_its_file_and_place(prefix):
    write(prefix, [0, 7, 2**40, 3], numbers=[0, 0, 1, UNKNOWN_FILE])
    assert found(prefix) == [
        Source("a.jsonl", "byte", 0), Source("a.jsonl", "byte", 7), Source("s3://x/b.parquet", "row", 2**40), None
    ]  # fmt: skip
    assert verify_content(str(prefix)).documents == 4
    names = (len('[["a.jsonl", "byte"], ["s3://x/b.parquet", "row"]]'), 32 + 12 * 4)
    assert (prefix.parent / "out.src").stat().st_size == sum(names)


def test_a_pair_without_sources_has_none_and_removes_those_of_an_older_pair(prefix):
    write(prefix, [0, 7])
    build(prefix, [[1, 2, 3]])
    assert DocumentSources.open(str(prefix)) is None
    assert names_in(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]
    write(prefix, [5])
    assert found(prefix) == [Source("a.jsonl", "byte", 5)]


def test_a_merged_pair_has_the_sources_of_its_parts(tmp_path):
    write(tmp_path / "one", [0, 7])
    write(tmp_path / "two", [1, 2], files=(B, A), numbers=[1, 0])
    build(tmp_path / "three", [[1, 2, 3]])
    merge([str(tmp_path / name) for name in ("three", "one", "three", "two")], str(tmp_path / "all"))
    wanted = [("a.jsonl", 0), ("a.jsonl", 7), None, ("a.jsonl", 1), ("s3://x/b.parquet", 2)]
    assert [one and (one.name, one.place) for one in found(tmp_path / "all")] == [None, *wanted]
    merge([str(tmp_path / "three")], str(tmp_path / "all"))
    assert DocumentSources.open(str(tmp_path / "all")) is None


def test_what_the_seal_does_not_name_is_refused(prefix):
    build(prefix, [[1, 2, 3]])
    (prefix.parent / "out.src").write_bytes(b"left by someone")
    assert DocumentSources.open(str(prefix)) is None
    for check in (verify, verify_content):
        with pytest.raises(FormatError, match=r"out\.src: the seal of the pair must name it"):
            check(str(prefix))


def test_a_seal_names_what_is_there(prefix):
    write(prefix, [0, 7])
    (prefix.parent / "out.trackbed.json").unlink()
    assert DocumentSources.open(str(prefix)) is None
    seal(str(prefix))
    assert [one.place for one in found(prefix)] == [0, 7]
    verify_content(str(prefix))


@pytest.mark.parametrize("byte", [0, 9, 16, 24, 40, 50, 56])
def test_a_damaged_byte_is_found(prefix, byte):
    write(prefix, [0, 7])
    path = prefix.parent / "out.src"
    raw = bytearray(path.read_bytes())
    raw[byte] ^= 0x41
    path.write_bytes(raw)
    with pytest.raises(FormatError, match=r"out\.src"):
        verify_content(str(prefix))
    if byte not in (40, 50):  # places and names may be anything
        with pytest.raises(FormatError, match=r"out\.src"):
            DocumentSources.open(str(prefix))


@pytest.mark.parametrize("content", [b"", b"TBSRC", b"x" * 100])
def test_other_files_are_refused(prefix, content):
    write(prefix, [0, 7])
    (prefix.parent / "out.src").write_bytes(content)
    with pytest.raises(FormatError, match=r"out\.src: must begin as version 1 of sources"):
        DocumentSources.open(str(prefix))


def test_each_document_must_have_a_source(prefix):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.int32)
    builder.sources = SourceColumns()
    builder.add_document([1], [1])
    with pytest.raises(ArgumentError, match="each of 1 documents must have a source, found 0"):
        builder.finalize(f"{prefix}.idx")
    builder.discard()
    assert names_in(prefix.parent) == []


# Kills itself at the n-th file that it opens, renames, links or removes while it replaces a pair.
DIE = """
import os, signal, sys
import numpy as np
from tests.tokens.test_document_sources import write
prefix, last, place = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
steps = 0
def step(event, arguments):
    global steps
    if event in ("open", "os.rename", "os.link", "os.remove") and str(arguments[0]).startswith(os.path.dirname(prefix)):
        steps += 1
        if steps == last:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(step)
write(prefix, [place] * place)
"""


@pytest.mark.parametrize("last", slow_but([7, 9, 11, 13, 15, 17], range(1, 40)))
def test_a_killed_writer_leaves_the_old_or_the_new_sources(prefix, last):
    write(prefix, [3] * 3)
    subprocess.run([sys.executable, "-c", DIE, str(prefix), str(last), "5"], timeout=60, check=False)
    finish_pair(str(prefix))
    num_documents = len(IndexedDataset(str(prefix)))
    assert num_documents in (3, 5)
    assert [one.place for one in found(prefix)] == [num_documents] * num_documents
    verify_content(str(prefix))
    write(prefix, [4] * 4)
    assert [one.place for one in found(prefix)] == [4] * 4
    assert [name for name in names_in(prefix.parent) if not name.endswith(".partial")] == [
        "out.bin", "out.idx", "out.src", "out.trackbed.json"
    ]  # fmt: skip
