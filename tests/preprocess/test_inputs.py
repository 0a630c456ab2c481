import os

import pytest

from trackbed.errors import ArgumentError
from trackbed.preprocess.inputs import Layout, find_inputs


def names(files):
    return [(file.path.name, file.layout.value, file.size_bytes) for file in files]


def test_a_folder_stands_for_its_texts_sorted_by_path(tmp_path):
    for name in ("b.txt", "a.jsonl", "c/d.md", "c/e.JSON", "f.bin", "g.py", "noextension"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_inputs([tmp_path])
    assert names(found) == [("a.jsonl", "jsonl", 1), ("b.txt", "text", 1), ("d.md", "text", 1), ("e.JSON", "jsonl", 1)]


def test_a_seal_in_a_folder_is_no_text(tmp_path):
    (tmp_path / "out_text_document.trackbed.json").write_text("{}")
    (tmp_path / "a.json").write_text("{}")
    assert names(find_inputs([tmp_path])) == [("a.json", "jsonl", 2)]


def test_a_file_that_is_named_is_plain_text_unless_its_name_says_otherwise(tmp_path):
    (tmp_path / "readme").write_text("x")
    (tmp_path / "code.py").write_text("xy")
    found = find_inputs([tmp_path / "readme", tmp_path / "code.py"])
    assert [file.layout for file in found] == [Layout.PLAIN_TEXT, Layout.PLAIN_TEXT]


def test_inputs_keep_the_order_in_which_they_are_named(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text("x")
    found = find_inputs([tmp_path / "b.txt", tmp_path / "a.txt", tmp_path / "b.txt"])
    assert [file.path.name for file in found] == ["b.txt", "a.txt", "b.txt"]


def test_a_path_without_a_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ArgumentError, match=r"gone\.jsonl: an input must be a file or a folder, found nothing"):
        find_inputs([tmp_path / "gone.jsonl"])


def test_a_folder_without_texts_is_an_error(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ArgumentError, match=r"a folder must have files that end in \.jsonl, .*, found none"):
        find_inputs([tmp_path])


def test_what_is_neither_a_file_nor_a_folder_is_an_error_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    for path in (tmp_path, tmp_path / "pipe.txt"):
        with pytest.raises(
            ArgumentError, match=r"pipe\.txt: an input must be a file or a folder, found something else"
        ):
            find_inputs([path])
