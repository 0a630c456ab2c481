"""Files of JSON lines: a torn last line is cut off, and not read."""

import os
import resource
import signal

import pytest

from tests.support.processes.forked import run_in_fork
from trackbed.errors import FormatError
from trackbed.ledger.lines import LineFile, check_lines, read_lines


def lines_in(path):
    return [fields for _, fields in read_lines(path)]


@pytest.mark.parametrize("torn", [b"", b"{", b'{"step": 2', b"\xff" * 200_000])
def test_a_torn_last_line_is_not_read_and_cut_off_by_the_next_job(tmp_path, torn):
    path = tmp_path / "lines"
    path.write_bytes(b'{"step": 1}\n' + torn)
    assert lines_in(path) == [{"step": 1}]
    file = LineFile(path)
    file.append({"step": 2, "loss": None})
    file.close()
    assert path.read_bytes() == b'{"step": 1}\n{"step":2,"loss":null}\n'
    assert read_lines(path) == [(0, {"step": 1}), (12, {"step": 2, "loss": None})]


@pytest.mark.parametrize("torn", [b"{", b'{"st', b'{"step":2', b'{"step":2,"loss":1.0}', b"\0" * 4096])
def test_a_file_of_a_torn_line_alone_becomes_empty(tmp_path, torn):
    path = tmp_path / "lines"
    path.write_bytes(torn)
    check_lines(path, "step")
    LineFile(path).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "content",
    [
        *(b"notes of someone", b"a\nb\n", b'{"event": "open"}\n', b"[1]\n", b'{"step": 1}\n\n', b"\n{"),
        *(b'{"my": "only copy"}', b'\0\0{"x": 1}', b'{"step": 1}\nnotes', b'{"loss": 1, "step": 1}\n'),
    ],
)
def test_a_file_of_other_lines_is_refused_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "lines"
    path.write_bytes(content)
    with pytest.raises(
        FormatError, match="lines: must have lines of JSON objects that begin with the key 'step', found others"
    ):
        check_lines(path, "step")
    assert path.read_bytes() == content


def test_a_line_that_does_not_fit_leaves_no_part_of_itself(tmp_path):
    path = tmp_path / "lines"

    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        file = LineFile(path)
        file.append({"step": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, 30))
        with pytest.raises(OSError, match="File too large"):
            file.append({"step": 2, "words": "x" * 100})
        return path.read_bytes()

    assert run_in_fork(work) == b'{"step":1}\n'


@pytest.mark.parametrize("line", [b"{\n", b"[1]\n", b"\n"])
def test_a_line_that_is_no_object_is_named(tmp_path, line):
    path = tmp_path / "lines"
    path.write_bytes(b'{"step":1}\n' + line + b"{}\n")
    with pytest.raises(FormatError, match="lines: the line from byte 11 on must be"):
        read_lines(path)


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises((FormatError, OSError)):
            LineFile(path)
    assert read_lines(tmp_path / "none") == []
