"""A rank with many small indices to build: it sends heartbeats meanwhile, and is notified when another fails."""

import time

import pytest

from tests.support.files.blends import BlendedMegatronDatasetBuilder, GPTDataset, gpt_config, write_pair
from trackbed.comm import run_ranks
from trackbed.errors import CollectiveError

NUM_PAIRS = 2500
PAUSE_SECONDS = 0.0005
TIMEOUT_SECONDS = 0.5


@pytest.fixture
def prefixes(tmp_path):
    """One small pair under many names."""
    pair = write_pair(tmp_path / "pair", [20] * 30)
    names = [f"{tmp_path}/name{number}" for number in range(NUM_PAIRS)]
    for name in names:
        for end in (".bin", ".idx"):
            (tmp_path / f"{name}{end}").symlink_to(f"{pair}{end}")
    return names


def builder(prefixes, cache, group, *, wants=True, progress=None):
    config = gpt_config(cache, blend=(prefixes, [1.0] * len(prefixes)), split="1")
    sizes = [len(prefixes), 0, 0]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: wants, config, group=group, progress=progress)


def test_who_builds_many_small_indices_is_not_taken_for_dead(prefixes, tmp_path):
    def work(group):
        def progress(*_):
            time.sleep(PAUSE_SECONDS)

        began = time.monotonic()
        builder(prefixes, tmp_path / "cache", group, wants=group.rank == 0, progress=progress).build()
        return time.monotonic() - began

    assert min(run_ranks(2, work, timeout_seconds=TIMEOUT_SECONDS)) > TIMEOUT_SECONDS


def test_who_builds_many_small_indices_hears_of_a_failure_at_once(prefixes, tmp_path):
    def work(group):
        done = []

        def progress(count, total, share):
            if group.rank == 1 and count:
                done.append(time.monotonic())
                raise ValueError("it broke")
            done.append(count)

        with pytest.raises(CollectiveError, match="building the indices: rank 1: ValueError: it broke"):
            builder(prefixes, tmp_path / "cache", group, progress=progress).build()
        return done[-1] if done else 0, time.monotonic()

    (count, heard), (failed, _) = run_ranks(2, work)
    assert count < NUM_PAIRS / 4
    assert heard - failed < 0.5
