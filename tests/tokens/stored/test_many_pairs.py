"""Groups of 4,096 pairs, on a disk and in a store that answers in 50 ms."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.stores.servers import Relay
from trackbed.tokens import IndexedDataset, IndexedDatasetBuilder, IndexedGroup, ObjectStorageConfig

COUNT = 4096


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Copies of one pair under 4,096 names."""
    folder = tmp_path_factory.mktemp("many")
    rng = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{folder}/0.bin", np.uint16)
    lengths = rng.integers(1, 20, 2000).astype(np.int32)
    builder.add_documents(rng.integers(0, 9, int(lengths.sum())).astype(np.uint16), lengths)
    builder.finalize(f"{folder}/0.idx")
    for number in range(1, COUNT):
        for suffix in (".bin", ".idx"):
            shutil.copyfile(f"{folder}/0{suffix}", f"{folder}/{number}{suffix}")
    yield folder
    shutil.rmtree(folder)


def opened(prefixes, **options):
    started = time.monotonic()
    group = IndexedGroup.open("group", prefixes, **options)
    return group, time.monotonic() - started


@pytest.mark.slow
def test_a_group_of_4096_pairs_opens_in_a_second(folder):
    prefixes = [f"{folder}/{number}" for number in range(COUNT)]
    opened(prefixes)
    group, seconds = opened(prefixes)
    assert len(group) == 2000 * COUNT
    assert seconds < 1


@pytest.mark.slow
def test_a_group_of_4096_pairs_opens_from_a_store_that_answers_in_50_ms(monkeypatch, tmp_path, folder, ceph_bucket):
    def upload(number):
        for suffix in (".bin", ".idx"):
            ceph_bucket.put(f"{number}{suffix}", Path(f"{folder}/{number}{suffix}").read_bytes())

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(upload, range(COUNT)))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", Relay(ceph_bucket.endpoint, 0.05).url)
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "60")
    prefixes = [ceph_bucket.text(f"{number}") for number in range(COUNT)]
    storage = ObjectStorageConfig(str(tmp_path / "idx"))
    group, seconds = opened(prefixes, mmap=False, object_storage_config=storage)
    print(f"cold {seconds:.1f} s")
    assert len(group) == 2000 * COUNT
    assert seconds < 30
    assert group[-1].tolist() == IndexedDataset(f"{folder}/0")[-1].tolist()
