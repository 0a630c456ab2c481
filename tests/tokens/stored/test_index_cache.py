"""Copies of indexes: fetched once per host, and believed only if whole."""

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.files.built_pair import build
from tests.support.files.stored_pairs import open_stored, upload
from trackbed.errors import ArgumentError, FormatError
from trackbed.files.stores import stamp_of_object
from trackbed.megatron.functions import get_index_cache_path
from trackbed.tokens import IndexedDataset, ObjectStorageConfig
from trackbed.tokens.idx_header import checksum_lengths
from trackbed.tokens.stored.index_cache import StoredIndex, await_marks

SCRIPT = Path(__file__).with_name("fetch_index.py")


@pytest.fixture
def local(tmp_path):
    rng = np.random.default_rng(0)
    build(tmp_path / "corpus", [[1] * int(length) for length in rng.integers(0, 5, 5000)], np.uint16)
    return IndexedDataset(str(tmp_path / "corpus"))


@pytest.fixture
def address(bucket, local):
    return upload(bucket, local.path_prefix, "web/corpus")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def start(address, cache):
    return subprocess.Popen([sys.executable, str(SCRIPT), address, str(cache)], stdout=subprocess.PIPE, text=True)


def whole_fetches(proxy, size_bytes):
    """Number of times that each byte of the index was requested after opening."""
    spans = [span for method, key, span in proxy.log if method == "GET" and key.endswith(".idx")]
    ends = [tuple(map(int, span.removeprefix("bytes=").split("-"))) for span in spans]
    return sum(1 for start, stop in ends if (start, stop) == (0, size_bytes - 1))


def side_of(cache):
    (path,) = cache.rglob("*.json")
    return path


def test_processes_of_a_host_fetch_an_index_once(local, address, cache, proxy):
    proxy.delay_seconds = 0.05
    processes = [start(address, cache) for _ in range(8)]
    found = [process.communicate(timeout=60)[0].split() for process in processes]
    assert found == [["opened", str(int(local.sequence_lengths.sum()))]] * 8
    assert whole_fetches(proxy, local.index.ends.size_bytes) == 1


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_while_it_fetches_leaves_nothing_that_is_believed(local, address, cache, proxy, kills):
    rng = random.Random(0)
    proxy.delay_seconds = 0.2
    for _ in range(kills):
        process = start(address, cache)
        process.stdout.readline()
        time.sleep(rng.uniform(0, 0.25))
        process.kill()
        process.communicate()
        for side in cache.rglob("*.json"):
            idx = side.with_suffix(".idx")
            assert idx.read_bytes() == Path(local.index.path).read_bytes()
            side.unlink()
            idx.unlink()
    proxy.delay_seconds = 0
    assert open_stored(address, cache).sequence_lengths.tolist() == local.sequence_lengths.tolist()
    assert not list(cache.rglob("*.partial"))


def test_a_copy_of_another_boot_is_checked_unless_it_is_marked(monkeypatch, local, address, cache, proxy):
    monkeypatch.setenv("TRACKBED_BOOT_ID", "first")
    _ = open_stored(address, cache).sequence_lengths
    await_marks()
    assert json.loads(side_of(cache).read_text())["is_on_disk"] is True
    record = {**json.loads(side_of(cache).read_text()), "is_on_disk": False}
    side_of(cache).write_text(json.dumps(record))
    monkeypatch.setenv("TRACKBED_BOOT_ID", "second")
    proxy.log.clear()
    assert open_stored(address, cache).sequence_lengths.tolist() == local.sequence_lengths.tolist()
    assert [method for method, *_ in proxy.log] == ["HEAD", "HEAD"]  # whole: it was checked, and marked
    assert json.loads(side_of(cache).read_text())["is_on_disk"] is True
    side_of(cache).write_text(json.dumps(record))
    side_of(cache).with_suffix(".idx").write_bytes(bytes(local.index.ends.size_bytes))  # a loss of power
    assert open_stored(address, cache).sequence_lengths.tolist() == local.sequence_lengths.tolist()


@pytest.mark.parametrize(
    "damage",
    [
        lambda side: side.write_text("{}"),
        lambda side: side.write_text("[" * 100_000),
        lambda side: side.write_bytes(b"\xff\x00"),
        lambda side: side.unlink(),
        lambda side: side.with_suffix(".idx").unlink(),
        lambda side: os.truncate(side.with_suffix(".idx"), 100),
        lambda side: side.write_text(side.read_text().replace('"endpoint": "', '"endpoint": "other')),
    ],
)
def test_a_copy_without_its_side_file_counts_for_nothing(local, address, cache, damage):
    _ = open_stored(address, cache).sequence_lengths
    damage(side_of(cache))
    assert open_stored(address, cache).sequence_lengths.tolist() == local.sequence_lengths.tolist()
    assert json.loads(side_of(cache).read_text())["address"] == f"{address}.idx"


def test_what_megatron_left_is_never_believed(local, address, cache):
    theirs = Path(get_index_cache_path(f"{address}.idx", ObjectStorageConfig(str(cache))))
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"stale")
    assert str(theirs) == f"{cache}/{address.removeprefix('s3://')}.idx"
    assert open_stored(address, cache).sequence_lengths.tolist() == local.sequence_lengths.tolist()
    assert theirs.read_bytes() == b"stale"


def test_a_new_version_replaces_the_copies_of_the_old_one(bucket, tmp_path, local, address, cache):
    old = open_stored(address, cache)
    assert old.sequence_lengths.tolist() == local.sequence_lengths.tolist()
    build(tmp_path / "other", [[1, 2]] * 7, np.uint16)
    upload(bucket, tmp_path / "other", "web/corpus")
    assert open_stored(address, cache).sequence_lengths.tolist() == [2] * 7
    assert len(list(cache.rglob("*.idx/*.idx"))) == 1
    assert old.sequence_lengths.tolist() == local.sequence_lengths.tolist()  # mapped


def test_a_folder_that_cannot_be_written_to_is_named(address, tmp_path):
    (tmp_path / "file").write_text("")
    stored = open_stored(address, tmp_path / "file")
    with pytest.raises(ArgumentError, match=r"file: path_to_idx_cache must be a folder with space for copies"):
        _ = stored.sequence_lengths


def test_names_of_keys_do_not_leave_the_folder(bucket, tmp_path, local, cache):
    keys = ["d e", "é" * 100, "a=b/c+d", "deep/" * 20 + "one"]
    for key in keys:
        address = upload(bucket, local.path_prefix, key)
        assert open_stored(address, cache).sequence_lengths.tolist() == local.sequence_lengths.tolist()
    sides = {path for path in tmp_path.rglob("*.json") if not path.name.endswith("trackbed.json")}
    assert sides == set(cache.rglob("*.json"))
    assert len(sides) == len(keys)


def test_stores_with_one_bucket_name_have_copies_of_their_own(monkeypatch, local, address, cache, proxy):
    _ = open_stored(address, cache).sequence_lengths
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    _ = open_stored(address, cache).sequence_lengths
    assert len(list(cache.rglob("*.json"))) == 2


def test_the_side_file_has_the_checksum_of_the_lengths(local, address, cache):
    stored = open_stored(address, cache)
    wanted = checksum_lengths(local.sequence_lengths)
    assert stored.index.checksum_lengths() == local.index.checksum_lengths() == wanted
    side = json.loads(side_of(cache).read_text())
    assert side["lengths_crc32"] == wanted
    side_of(cache).write_text(json.dumps({**side, "lengths_crc32": "0000abcd"}))
    assert open_stored(address, cache).index.checksum_lengths() == "0000abcd"  # the lengths are not read again


def test_a_side_file_without_the_checksum_of_the_lengths_is_not_used(local, address, cache, proxy):
    _ = open_stored(address, cache).sequence_lengths
    side = json.loads(side_of(cache).read_text())
    del side["lengths_crc32"]
    side_of(cache).write_text(json.dumps(side))
    assert open_stored(address, cache).sequence_lengths.tolist() == local.sequence_lengths.tolist()
    assert whole_fetches(proxy, local.index.ends.size_bytes) == 2


@pytest.mark.parametrize("head", [b"MMIDIDX\x00\x01" + bytes(60), None])
def test_an_object_that_is_no_index_leaves_no_copy(bucket, local, cache, head):
    raw = Path(local.index.path).read_bytes()
    address = bucket.put("web/corpus.idx", raw[:1000] if head is None else head)
    with pytest.raises(FormatError, match=r"s3://.*web/corpus.idx: (the magic|5000 lengths must end in the file)"):
        StoredIndex(address, str(cache)).fetch(stamp_of_object(address))
    assert [path.name for path in cache.rglob("*") if path.is_file()] == ["lock"]


def test_a_mark_makes_and_renames_no_name(monkeypatch, address, cache):
    event = threading.Event()
    monkeypatch.setattr("trackbed.files.writeback.flush_file_system", lambda folder: event.wait(60))
    _ = open_stored(address, cache).sequence_lengths
    before = {path: path.stat().st_ino for path in cache.rglob("*")}
    event.set()
    await_marks()
    assert {path: path.stat().st_ino for path in cache.rglob("*")} == before
    assert json.loads(side_of(cache).read_text())["is_on_disk"] is True


def test_a_copy_that_is_removed_before_the_flush_stays_removed(monkeypatch, address, cache):
    event = threading.Event()
    monkeypatch.setattr("trackbed.files.writeback.flush_file_system", lambda folder: event.wait(60))
    _ = open_stored(address, cache).sequence_lengths
    shutil.rmtree(cache)
    event.set()
    await_marks()
    assert not cache.exists()
