"""What every source of token bytes must do."""

import numpy as np
import pytest

from tests.support.processes.forked import run_in_fork
from trackbed.errors import FormatError, StoreError

DATA = bytes(range(100))


class SourceContract:
    """Derive from this class, and give `open_source(path)` as a static method."""

    may_refuse_a_replacement = False
    """True for a source that may have lost its bytes once another file has its name."""

    @pytest.fixture
    def path(self, tmp_path):
        (tmp_path / "data.bin").write_bytes(DATA)
        return tmp_path / "data.bin"

    @pytest.fixture
    def source(self, path):
        return self.open_source(path)

    @pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int32, np.int64, np.float32, np.float64])
    @pytest.mark.parametrize("offset", [0, 1, 8, 90, 100])
    def test_tokens_are_the_bytes_from_the_offset_on(self, source, dtype, offset):
        count = (100 - offset) // np.dtype(dtype).itemsize
        tokens = source.read(dtype, count, offset)
        assert tokens.dtype == dtype
        assert tokens.shape == (count,)
        assert tokens.tobytes() == DATA[offset : offset + count * tokens.itemsize]

    @pytest.mark.parametrize("offset", [0, 1, 99, 100])
    def test_no_tokens_are_an_empty_array(self, source, offset):
        tokens = source.read(np.int32, 0, offset)
        assert (tokens.dtype, tokens.shape) == (np.int32, (0,))

    @pytest.mark.parametrize(
        ("count", "offset"),
        [(101, 0), (1, 100), (0, 101), (1, -1), (0, -1), (-1, 0), (-1, 50), (2**63, 0), (1, 2**63), (2**70, -(2**70))],
    )
    def test_what_is_not_inside_the_file_is_refused_with_both_sizes(self, source, path, count, offset):
        with pytest.raises(FormatError) as caught:
            source.read(np.uint8, count, offset)
        assert str(path) in str(caught.value)
        assert f"[{offset}, {offset + count})" in str(caught.value)
        assert "100" in str(caught.value)

    def test_a_last_token_that_is_cut_off_is_refused(self, source):
        assert source.read(np.int64, 12, 0).nbytes == 96
        with pytest.raises(FormatError, match=r"\[0, 104\).* 100"):
            source.read(np.int64, 13, 0)

    def test_an_empty_file_gives_no_tokens_and_no_more(self, path):
        path.write_bytes(b"")
        source = self.open_source(path)
        assert source.read(np.int32, 0, 0).tolist() == []
        with pytest.raises(FormatError, match=r"\[0, 4\).* 0$"):
            source.read(np.int32, 1, 0)

    def test_a_file_that_is_not_there_cannot_be_opened(self, path):
        with pytest.raises(FileNotFoundError):
            self.open_source(path.with_name("none"))

    def test_what_was_read_outlives_the_source_and_the_file(self, path):
        tokens = self.open_source(path).read(np.uint8, 100, 0)
        path.unlink()
        assert tokens.tobytes() == DATA

    def test_a_file_that_takes_the_name_is_not_read(self, source, path):
        path.with_name("other").write_bytes(bytes(10))
        path.with_name("other").replace(path)
        try:
            found = source.read(np.uint8, 100, 0).tobytes()
        except StoreError as error:
            assert self.may_refuse_a_replacement
            assert str(path) in str(error)  # noqa: PT017  the bytes before are as good
        else:
            assert found == DATA

    def test_parent_and_child_read_side_by_side(self, source):
        assert run_in_fork(lambda: source.read(np.uint8, 50, 50).tobytes()) == DATA[50:]
        assert source.read(np.uint8, 50, 0).tobytes() == DATA[:50]
