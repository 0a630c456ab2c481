import pytest

from trackbed.errors import ArgumentError
from trackbed.preprocess import find_pairs


def touch(folder, *names):
    for name in names:
        (folder / name).write_bytes(b"")


def test_a_prefix_and_either_file_of_a_pair_stand_for_the_pair():
    assert find_pairs(["out/a.b", "out/a.b.bin", "out/a.b.idx"]) == ["out/a.b"] * 3


def test_a_folder_stands_for_its_pairs_sorted_by_name(tmp_path):
    touch(tmp_path, "b.bin", "b.idx", "a.idx", "a.bin", "a.trackbed.json", "readme.txt", "half.bin")
    assert find_pairs([str(tmp_path)]) == [str(tmp_path / name) for name in ("a", "b", "half")]


def test_the_output_in_a_folder_is_not_among_its_inputs(tmp_path, monkeypatch):
    touch(tmp_path, "a.bin", "a.idx", "all.bin", "all.idx")
    monkeypatch.chdir(tmp_path)
    assert find_pairs(["."], exclude=str(tmp_path / "all")) == ["a"]


def test_a_pair_beside_a_folder_of_the_same_name_is_meant_and_not_the_folder(tmp_path):
    (tmp_path / "a").mkdir()
    touch(tmp_path, "a.idx", "a.bin")
    assert find_pairs([str(tmp_path / "a")]) == [str(tmp_path / "a")]


def test_a_folder_without_pairs_is_an_error(tmp_path):
    with pytest.raises(ArgumentError, match=r"a folder must have \.bin and \.idx files, found none"):
        find_pairs([str(tmp_path)])
