"""Blends of more datasets than a process may have maps and open files for."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from tests.builder.many_datasets_rank import write_pairs
from tests.support.files.blends import build, gpt_config, tokens_of, write_pair
from trackbed.files import DESCRIPTORS, MAPS
from trackbed.tokens import IndexedDataset

ORDERS = ["megatron", "balanced", "instant"]
MEMORY_PER_DATASET = 40 << 10
MEMORY_BESIDES = 150_000_000


def run_all(folder, count, step):
    write_pairs(folder, count)
    for order in ORDERS:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        command = [
            sys.executable,
            str(Path(__file__).parent / "many_datasets_rank.py"),
            folder,
            str(count),
            order,
            str(step),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout)
        print(order, found)
        assert found["maps"] < 65_530
        assert found["memory"] <= MEMORY_BESIDES + count * MEMORY_PER_DATASET, found


@pytest.mark.slow
def test_hundreds_of_datasets_are_read_under_a_limit_on_open_files(tmp_path):
    run_all(tmp_path, 500, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "step"), [(16_000, 1), (70_000, 8)])
def test_more_datasets_than_maps_are_built_and_read(tmp_path, count, step):
    run_all(tmp_path, count, step)


def pairs_of(folder, count=40):
    rng = np.random.default_rng(0)
    return [
        write_pair(folder / f"pair{number}", rng.integers(1, 12, 1100), seed=number, dtype=np.int32)
        for number in range(count)
    ]


@pytest.fixture
def few_maps(monkeypatch):
    """A process that may have 30 maps more than it has now."""
    monkeypatch.setattr(MAPS, "max_open", MAPS.count + 30)
    return MAPS.max_open


def config_of(folder, order, **options):
    prefixes = pairs_of(folder)
    return gpt_config(folder / "cache", blend=(prefixes, [1.0] * len(prefixes)), split="1", order=order, **options)


@pytest.mark.parametrize("order", ORDERS)
def test_what_was_used_least_recently_is_released(tmp_path, order, few_maps):
    train = build(config_of(tmp_path, order), (400, None, None))[0]
    wanted = tokens_of(train, range(400))
    assert MAPS.count <= few_maps + 5
    for turn in range(3):
        positions = np.random.default_rng(turn).permutation(400)
        for first in range(0, 400, 4):
            some = positions[first : first + 4]
            assert train.gather(some)["tokens"].tolist() == [wanted[position] for position in some]
            assert MAPS.count <= few_maps + 25  # those of one batch are needed at the same time
    assert tokens_of(train, range(400)) == wanted


def test_every_map_of_the_order_instant_can_be_released(tmp_path, monkeypatch):
    """A start maps every index, and a pair that makes room must not be the one that is forgotten."""
    config = config_of(tmp_path, "instant")
    monkeypatch.setattr(MAPS, "max_open", MAPS.count + 30)
    train = build(config, (400, None, None))[0]
    assert MAPS.count <= MAPS.max_open
    for dataset in train.datasets:
        dataset[0]
        assert MAPS.count <= MAPS.max_open + 2


def test_views_of_what_was_released_stay_valid(tmp_path, few_maps):
    pairs = [IndexedDataset(prefix, open_when_read=True) for prefix in pairs_of(tmp_path)]
    held = [pair[7] for pair in pairs]
    copies = [IndexedDataset(pair.path_prefix)[7].tolist() for pair in pairs]
    for pair in pairs:
        pair.release()
    assert [one.tolist() for one in held] == copies
    assert [pair[7].tolist() for pair in pairs] == copies


@pytest.mark.parametrize("order", ["megatron", "instant"])
def test_threads_that_read_at_once_do_not_lose_what_they_read(tmp_path, order, few_maps):
    train = build(config_of(tmp_path, order), (400, None, None))[0]
    wanted = np.array(tokens_of(train, range(400)))
    failures = []

    def read(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(150):
                some = rng.integers(0, 400, 3)
                if not (train.gather(some, num_threads=2)["tokens"].numpy() == wanted[some]).all():
                    failures.append(some)
        except Exception as error:
            failures.append(error)

    threads = [Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    assert failures == []


@pytest.mark.parametrize("order", ["megatron", "instant"])
def test_files_that_are_not_mapped_are_closed_where_too_many_are_open(tmp_path, order, monkeypatch):
    config = config_of(tmp_path, order, mmap_bin_files=False)
    mapped = gpt_config(tmp_path / "cache", **{**vars_of(config), "mmap_bin_files": True})
    wanted = tokens_of(build(mapped, (400, None, None))[0], range(400))
    monkeypatch.setattr(DESCRIPTORS, "max_open", DESCRIPTORS.count + 10)
    assert tokens_of(build(config, (400, None, None))[0], range(400)) == wanted
    assert DESCRIPTORS.count <= DESCRIPTORS.max_open + 2


def vars_of(config):
    return {"blend": config.blend, "split": "1", "order": config.order}


def test_an_index_that_was_replaced_is_not_mapped_again(tmp_path):
    """A running job does not mix indices of the data that it began with and of data that came later."""
    from trackbed.errors import CacheError

    config = gpt_config(tmp_path / "cache", blend=([write_pair(tmp_path / "pair", [5] * 3000)], None), split="1")
    train = build(config, (100, None, None))[0]
    before = tokens_of(train, range(5))
    train._index.arrays.release()
    assert tokens_of(train, range(5)) == before
    for path in (tmp_path / "cache").glob("*.npy"):
        copy = path.with_suffix(".copy")
        shutil.copy(path, copy)
        copy.replace(path)
    assert tokens_of(train, range(5)) == before
    train._index.arrays.release()
    assert tokens_of(train, range(5)) == before  # another builder of the same entry may have been as fast
    manifest = next((tmp_path / "cache" / ".trackbed").glob("*.json"))
    manifest.write_text(manifest.read_text().replace('"crc32": "', '"crc32": "0', 1))
    train._index.arrays.release()
    with pytest.raises(CacheError, match="found another one in its place"):
        tokens_of(train, range(5))
