import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.contracts.source import DATA, SourceContract
from trackbed.errors import FormatError
from trackbed.tokens.source import FileSource, MappedSource


class TestMappedSource(SourceContract):
    open_source = staticmethod(MappedSource.open)

    def test_reads_return_read_only_views(self, source):
        assert np.shares_memory(source.read(np.uint8, 10, 0), source.read(np.uint8, 10, 5))
        with pytest.raises(ValueError, match="read-only"):
            source.read(np.uint8, 10, 0)[0] = 1


class TestFileSource(SourceContract):
    open_source = staticmethod(FileSource.open)

    def test_reads_return_copies(self, source):
        tokens = source.read(np.uint8, 100, 0)
        tokens[:] = 0
        assert source.read(np.uint8, 100, 0).tobytes() == DATA

    def test_a_file_that_was_cut_shorter_is_noticed(self, source, path):
        os.truncate(path, 60)
        assert source.read(np.uint8, 60, 0).tobytes() == DATA[:60]
        with pytest.raises(FormatError, match=r"\[0, 61\).* 60$"):
            source.read(np.uint8, 61, 0)

    def test_a_child_process_does_not_inherit_the_file(self, path):
        descriptor = os.open("/dev/null", os.O_RDONLY)
        os.close(descriptor)
        source = self.open_source(path)  # takes the same number
        assert Path(f"/proc/self/fd/{descriptor}").readlink() == path
        assert not os.get_inheritable(descriptor)
        del source
