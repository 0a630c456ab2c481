"""The bytes of objects, and how their ranges are joined."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.contracts.source import DATA, SourceContract
from tests.support.files.stored_pairs import StoredPath
from trackbed.errors import FormatError, StoreError
from trackbed.tokens.stored.source import StoredSource, join_ranges, read_spans


class TestStoredSource(SourceContract):
    may_refuse_a_replacement = True

    @pytest.fixture
    def path(self, bucket):
        found = StoredPath(bucket, "web/data.bin")
        found.write_bytes(DATA)
        return found

    @staticmethod
    def open_source(path):
        return StoredSource.open(str(path))

    def test_several_spans_take_one_round(self, proxy, path):
        source = self.open_source(path)
        proxy.log.clear()
        proxy.delay_seconds = 0.1
        spans = [(source, 3, 90), (source, 0, 7), (source, 10, 0), (source, 2, 95)]
        found = read_spans(np.uint8, spans)
        assert [one.tobytes() for one in found] == [DATA[90:93], b"", DATA[:10], DATA[95:97]]
        assert [request for _, _, request in proxy.log] == ["bytes=0-96"]

    def test_objects_are_read_together(self, proxy, path):
        other = path.with_name("other.bin")
        other.write_bytes(DATA[::-1])
        sources = [self.open_source(path), self.open_source(other)]
        found = read_spans(np.uint16, [(sources[1], 2, 10), (sources[0], 1, 0)])
        assert [one.tobytes() for one in found] == [DATA[::-1][10:14], DATA[:2]]


class TestStoredSourceOfAWebServer(SourceContract):
    may_refuse_a_replacement = True

    @pytest.fixture
    def path(self, tmp_path, web_server):
        self.root = web_server
        (tmp_path / "data.bin").write_bytes(DATA)
        return tmp_path / "data.bin"

    @pytest.fixture
    def source(self, path):
        return self.open_source(path)

    def open_source(self, path):
        return StoredSource.open(f"{self.root}/data.bin" if path.name == "data.bin" else f"{self.root}/none")

    def test_what_is_not_inside_the_file_is_refused_with_both_sizes(self, source):
        with pytest.raises(FormatError, match=r"http://.*/data\.bin: .*\[0, 101\).* 100"):
            source.read(np.uint8, 101, 0)

    def test_a_file_that_takes_the_name_is_not_read(self, source, path):
        path.write_bytes(bytes(10))
        with pytest.raises(StoreError, match=r"/data\.bin: the object must be the one that was opened"):
            source.read(np.uint8, 100, 0)


class TestStoredSourceOfFiles(SourceContract):
    may_refuse_a_replacement = True

    @staticmethod
    def open_source(path):
        return StoredSource.open(f"file://{path}")


@given(
    ranges=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 60_000), st.sampled_from([0, 1, 100, 5_000])), max_size=30
    )
)
def test_joined_ranges_cover_all_and_do_not_overlap(ranges):
    wanted = np.array([(number, start, start + size) for number, start, size in ranges], dtype=np.int64).reshape(-1, 3)
    joined = join_ranges(wanted)
    assert (joined[:, 1] < joined[:, 2]).all()
    same = joined[1:, 0] == joined[:-1, 0]
    assert (joined[1:, 0] >= joined[:-1, 0]).all()
    gaps, sizes = joined[1:, 1] - joined[:-1, 2], joined[:, 2] - joined[:, 1]
    assert ((gaps > 4096) & (20 * gaps > sizes[1:] + sizes[:-1]))[same].all()
    for number, start, stop in wanted[wanted[:, 1] < wanted[:, 2]].tolist():
        inside = (joined[:, 0] == number) & (joined[:, 1] <= start) & (stop <= joined[:, 2])
        assert inside.sum() == 1
    ends = {(number, end) for number, start, stop in wanted.tolist() for end in (start, stop)}
    assert all((number, end) in ends for number, *both in joined.tolist() for end in both)


def test_large_ranges_are_whole(bucket, monkeypatch):
    monkeypatch.setattr("trackbed.tokens.stored.source._MOST_BYTES", 1000)
    data = np.random.default_rng(0).bytes(10_500)
    source = StoredSource.open(bucket.put("large.bin", data).text)
    assert source.read(np.uint8, 10_400, 50).tobytes() == data[50:10_450]
    bucket.put("large.bin", data[::-1])
    with pytest.raises(StoreError, match=r"large\.bin: the object must be the one that was opened"):
        source.read(np.uint8, 10, 0)
