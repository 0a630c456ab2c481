"""What ranks tell each other of a start: a bounded number of bytes for each, however many they are."""

import pytest

from tests.support.files.blends import BlendedMegatronDatasetBuilder, GPTDataset, gpt_config, write_pairs
from trackbed.comm import run_ranks
from trackbed.comm.store import MemoryStore

BYTES = {"cold": 2_000, "warm": 1_200}
"""That a rank writes and reads for a start with some ten entries: is all as it was, and if not, what is missing?"""
SUMMED_BYTES = 150
"""That one rank, who sums up for all, reads of each rank besides."""


class WeighingStore:
    """One rank's way to a store in memory, which counts the bytes that go over it."""

    def __init__(self, store):
        self._store = store
        self.num_bytes = 0

    def set(self, key, value):
        self.num_bytes += len(key) + len(value)
        self._store.set(key, value)

    def set_first(self, key, value):
        found = self._store.set_first(key, value)
        self.num_bytes += len(key) + len(value) + len(found)
        return found

    def get(self, key):
        found = self._store.get(key)
        self.num_bytes += len(key) + len(found)
        return found

    def get_all(self, keys):
        found = self._store.get_all(keys)
        self.num_bytes += sum(map(len, [*keys, *found]))
        return found

    def has(self, keys):
        self.num_bytes += sum(map(len, keys)) + 1
        return self._store.has(keys)

    def add(self, key, amount):
        self.num_bytes += len(key) + 8
        return self._store.add(key, amount)

    def delete(self, key):
        self.num_bytes += len(key)
        self._store.delete(key)

    def watch(self, key):
        self.num_bytes += len(key)
        return self._store.watch(key)


@pytest.mark.parametrize("start", ["cold", "warm"])
def test_bytes_of_a_rank_do_not_grow_with_the_number_of_ranks(tmp_path, start):
    prefixes = write_pairs(tmp_path)
    for size in (2, 16, 64):
        shared, ways = MemoryStore(), []

        def connect(shared=shared, ways=ways):
            ways.append(WeighingStore(shared))
            return ways[-1]

        def work(group, cache=tmp_path / f"cache{size}"):
            config = gpt_config(cache, blend=(prefixes, [3, 2, 1]), split="8,1,1")
            BlendedMegatronDatasetBuilder(GPTDataset, [50, 5, 5], lambda: True, config, group=group).build()

        if start == "warm":
            run_ranks(size, work)
        run_ranks(size, work, connect=connect)
        assert len(ways) == size
        weights = sorted(way.num_bytes for way in ways)
        # One rank may sum up at each meeting, tell their process, and look who is missing: hence not each rank's bytes,
        # but those of half of the ranks, and of all.
        assert weights[(size - 1) // 2] <= BYTES[start], weights
        assert sum(weights) <= size * (BYTES[start] + SUMMED_BYTES), weights
