"""Tests that writeback hints do not change the content of a file."""

from trackbed.files import Writeback


def test_a_file_that_grows_past_several_steps_keeps_its_bytes(tmp_path):
    path = tmp_path / "file"
    with path.open("wb", buffering=0) as file:
        writeback = Writeback(file.fileno())
        for count in range(1, 25):
            file.write(bytes([count]) * (1 << 20))
            writeback.grown(count << 20)
    assert path.read_bytes() == b"".join(bytes([count]) * (1 << 20) for count in range(1, 25))


def test_a_descriptor_that_cannot_be_written_back_is_no_error(tmp_path):
    Writeback(-1).grown(1 << 30)
