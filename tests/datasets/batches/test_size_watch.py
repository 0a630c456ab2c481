"""Sizes of mapped files are checked while other threads map and release files."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from trackbed.datasets.batches import sources


class PairInUse(tuple):
    """A pair of files; while it is read, another thread adds one."""

    def __iter__(self):
        self.add()
        return super().__iter__()


def test_a_file_that_is_added_during_a_check_is_checked_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_CHECK_SECONDS", 0.0)
    path = Path(tmp_path / "a")
    path.write_bytes(bytes(10))

    def source(size):
        def check_size(stamp):
            raise ValueError(f"{size} bytes must be there")

        return SimpleNamespace(path=path, data=bytes(size), check_size=check_size)

    watch = sources._SizeWatch()
    pair = PairInUse([source(10)])
    pair.add = lambda: watch.add(len(watch._sources), source(10 if len(watch._sources) < 3 else 20))
    watch._sources[0] = pair
    for _ in range(3):
        watch.check()  # the last one adds a file that is too short
    with pytest.raises(ValueError, match="20 bytes must be there"):
        watch.check()
