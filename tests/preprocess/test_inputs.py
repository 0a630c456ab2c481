import os

import pytest

from built_pair import build
from trackbed.errors import ArgumentError
from trackbed.files import partial_name
from trackbed.preprocess.inputs import InputFormat, find_inputs


def names(found):
    return [(file.path.name, file.format.value, file.size_bytes) for file in found.files]


def test_a_folder_stands_for_its_texts_sorted_by_path(tmp_path):
    for name in ("b.txt", "a.jsonl", "c/d.md", "c/e.JSON", "f.bin", "g.py", "noextension"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_inputs([tmp_path])
    assert found.left_out == 3
    assert names(found) == [("a.jsonl", "jsonl", 1), ("b.txt", "text", 1), ("d.md", "text", 1), ("e.JSON", "jsonl", 1)]


def test_a_seal_in_a_folder_is_no_text(tmp_path):
    (tmp_path / "out_text_document.trackbed.json").write_text("{}")
    (tmp_path / "a.json").write_text("{}")
    assert names(find_inputs([tmp_path])) == [("a.json", "jsonl", 2)]


@pytest.mark.parametrize("name", ["part-00000", "a.jsonl.bak", "a.csv", "a.gz", ".txt", "a.parquet.1"])
def test_a_named_file_of_unknown_suffix_is_refused_with_the_way_on(tmp_path, name):
    (tmp_path / name).write_text("x")
    with pytest.raises(
        ArgumentError, match=r"a file name must end in \.jsonl, .*; --format jsonl\|txt\|parquet states"
    ):
        find_inputs([tmp_path / name])
    (file,) = find_inputs([tmp_path / name], input_format=InputFormat.JSON_LINES).files
    assert file.format is InputFormat.JSON_LINES


def test_with_a_format_a_folder_means_every_file_but_those_of_trackbed(tmp_path):
    for name in ("part-0", "part-1.gz", "b.txt", "x.unfinished/own.txt", "c.bin", "d.idx"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    for name in ("record.json", "lock", "0.bin", "0.lengths"):
        (tmp_path / "x.unfinished" / name).write_text("{}")
    for name in ("out.trackbed.json", "out.bin.pending", "out.idx.lock", partial_name("out.bin")):
        (tmp_path / name).write_text("{}")
    build(tmp_path / "out", [[1, 2]])
    found = find_inputs([tmp_path], input_format=InputFormat.JSON_LINES)
    assert [(file.path.name, file.format.value, file.compression.value) for file in found.files] == [
        ("b.txt", "jsonl", ""),
        ("c.bin", "jsonl", ""),
        ("d.idx", "jsonl", ""),
        ("part-0", "jsonl", ""),
        ("part-1.gz", "jsonl", ".gz"),
        ("own.txt", "jsonl", ""),
    ]
    assert found.left_out == 0


def test_a_compressed_parquet_file_is_refused(tmp_path):
    (tmp_path / "a.parquet.gz").write_text("x")
    with pytest.raises(
        ArgumentError, match=r"a\.parquet\.gz: a Parquet file must not be compressed as a whole, found \.gz"
    ):
        find_inputs([tmp_path / "a.parquet.gz"])


def test_the_work_of_a_run_is_no_input_even_where_it_is_named(tmp_path, caplog):
    (tmp_path / "out.unfinished").mkdir()
    (tmp_path / "out.unfinished" / "record.json").write_text("{}")
    (tmp_path / "a.txt").write_text("x")
    assert names(find_inputs([tmp_path / "a.txt", tmp_path / "out.unfinished"])) == [("a.txt", "text", 1)]
    assert "out.unfinished: skipped, as it holds the work of an unfinished run" in caplog.text
    with pytest.raises(ArgumentError, match="found only the work of unfinished runs"):
        find_inputs([tmp_path / "out.unfinished"])


def test_a_pair_that_is_named_is_no_input(tmp_path):
    build(tmp_path / "out", [[1, 2]])
    for name in ("out.bin", "out.idx", "out.trackbed.json"):
        with pytest.raises(ArgumentError, match="an input must hold texts, found a file of a tokenised pair"):
            find_inputs([tmp_path / name], input_format=InputFormat.PLAIN_TEXT)


def test_inputs_keep_the_order_in_which_they_are_named(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text("x")
    found = find_inputs([tmp_path / "b.txt", tmp_path / "a.txt", tmp_path / "b.txt"])
    assert [file.path.name for file in found.files] == ["b.txt", "a.txt", "b.txt"]


def test_a_path_without_a_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ArgumentError, match=r"gone\.jsonl: an input must be a file or a folder, found nothing"):
        find_inputs([tmp_path / "gone.jsonl"])


def test_a_folder_without_texts_is_an_error(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ArgumentError, match=r"that end in \.jsonl, .*, found 1 other; --format reads files of other"):
        find_inputs([tmp_path])


def test_what_is_neither_a_file_nor_a_folder_is_an_error_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    for path in (tmp_path, tmp_path / "pipe.txt"):
        with pytest.raises(
            ArgumentError, match=r"pipe\.txt: an input must be a file or a folder, found something else"
        ):
            find_inputs([path])


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a.jsonl.xz", r"xz data: decompress it \(xz -d\)"),
        ("a.jsonl.bz2", r"bzip2 data: decompress it \(bzip2 -d\)"),
        ("a.txt.lz4", r"LZ4 data: decompress it"),
        ("a.tar.gz", r"a tar archive: unpack it"),
        ("a.tar", r"a tar archive: unpack it"),
        ("a.tar.zst", r"a tar archive: unpack it"),
        ("A.TAR.XZ", r"a tar archive: unpack it"),
        ("a.tgz", r"a tar archive: unpack it"),
        ("a.zip", r"a zip archive: unpack it"),
        ("a.arrow", r"an Arrow file: write it as Parquet"),
    ],
)
def test_a_named_file_of_a_kind_that_is_not_read_says_what_to_do(tmp_path, name, found):
    (tmp_path / name).write_text("x")
    with pytest.raises(ArgumentError, match=rf"{name}: an input must be .*, found the name of {found}"):
        find_inputs([tmp_path / name])
    assert find_inputs([tmp_path / name], input_format=InputFormat.JSON_LINES).files
