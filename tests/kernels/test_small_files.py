import numpy as np
import pytest

from trackbed.errors import ArgumentError
from trackbed.kernels import file_stamps, read_parts, reference, write_files


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
def test_file_stamps_equal_their_reference(tmp_path, count, num_threads):
    names = [f"{number}" for number in range(count)]
    for number, name in enumerate(names[::3]):
        (tmp_path / name).write_bytes(bytes(number))
    found = file_stamps(str(tmp_path), names, num_threads=num_threads)
    np.testing.assert_array_equal(found, reference.file_stamps(str(tmp_path), names))
    assert found.shape == (count, 3)
    assert (found[1::3] == -1).all()


def test_names_may_be_absolute_or_links_and_contain_any_byte(tmp_path):
    odd = tmp_path / "a \n\udcff b"
    odd.write_bytes(b"abc")
    (tmp_path / "link").symlink_to(odd)
    (tmp_path / "folder").mkdir()
    names = [str(odd), odd.name, "link", "folder", "folder/../link", "broken/.."]
    found = file_stamps(str(tmp_path), names)
    np.testing.assert_array_equal(found, reference.file_stamps(str(tmp_path), names))
    assert found[:3, 1].tolist() == [3, 3, 3]


def test_relative_names_in_a_missing_folder_do_not_exist_but_absolute_ones_do(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    found = file_stamps(str(tmp_path / "absent"), ["file", str(tmp_path / "file")])
    assert found[:, 1].tolist() == [-1, 3]


@pytest.mark.parametrize("names", [[""], ["a", ""], ["", "a"], ["a", "", "b"], ["a\0b"]])
def test_a_name_that_is_empty_or_holds_a_zero_byte_is_refused(tmp_path, names):
    with pytest.raises(ArgumentError, match="must not be empty or contain a zero byte"):
        file_stamps(str(tmp_path), names)


def test_file_stamps_of_many_files_can_be_ended(tmp_path):
    class EndedError(Exception):
        pass

    def end(_done):
        raise EndedError

    with pytest.raises(EndedError):
        file_stamps(str(tmp_path), ["absent"] * 300_000, poll=end)


@pytest.mark.parametrize(
    "parts", [[], [b""], [b"abc"], [b"abc", b"", memoryview(b"defg")[1:3]], [bytes(20 << 20), b"end"]]
)
def test_files_are_written_part_by_part(tmp_path, parts):
    write_files({f"{tmp_path}/one": parts, f"{tmp_path}/two": [np.arange(3, dtype=np.uint8).data]})
    assert (tmp_path / "one").read_bytes() == b"".join(parts)
    assert (tmp_path / "two").read_bytes() == bytes(range(3))


def test_an_existing_file_is_not_overwritten(tmp_path):
    (tmp_path / "two").write_bytes(b"old")
    with pytest.raises(FileExistsError) as caught:
        write_files({f"{tmp_path}/{name}": [b"new"] for name in ("one", "two", "three")})
    assert caught.value.filename == f"{tmp_path}/two"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    assert (tmp_path / "two").read_bytes() == b"old"


def test_parts_that_are_not_contiguous_bytes_are_refused(tmp_path):
    with pytest.raises(BufferError):
        write_files({f"{tmp_path}/x": [memoryview(b"abcdef")[::2]]})
    with pytest.raises(TypeError):
        write_files({f"{tmp_path}/x": ["text"]})
    assert not list(tmp_path.iterdir())


def test_parts_of_files_are_read_one_after_the_other(tmp_path):
    paths = [f"{tmp_path}/{number}" for number in range(4)]
    for number, path in enumerate(paths[:3]):
        (tmp_path / path).write_bytes(bytes(range(number * 10, number * 10 + 10)))
    content, stamps = read_parts(paths, [2, 0, 8, 0], [3, 0, 3, 1])
    assert content[:3].tolist() == [2, 3, 4]
    np.testing.assert_array_equal(stamps[:2], file_stamps(".", paths[:2]))
    assert stamps[2:].tolist() == [[-1] * 3] * 2  # one file is too short, one does not exist
    assert len(content) == 7


@pytest.mark.parametrize(("starts", "sizes"), [([-1], [1]), ([0], [-1]), ([0, 0], [1, 1])])
def test_negative_ranges_are_refused(tmp_path, starts, sizes):
    with pytest.raises(ArgumentError, match="1 files must have starts and sizes of at least 0"):
        read_parts([f"{tmp_path}/x"], starts, sizes)


def test_reading_many_files_can_be_ended(tmp_path):
    class EndedError(Exception):
        pass

    def end(_done):
        raise EndedError

    with pytest.raises(EndedError):
        read_parts([f"{tmp_path}/absent"] * 300_000, [0] * 300_000, [0] * 300_000, poll=end)
