"""Objects are written whole, or not at all."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.stores.servers import seconds_of
from trackbed.errors import ArgumentError, FormatError, StoreError
from trackbed.files.stores import (
    delete_object,
    delete_objects,
    parse_address,
    put_bytes,
    put_file,
    put_if_absent,
    read_object,
    stamp_of_object,
)

PART = 16 << 20


def test_bytes_replace_an_object(bucket):
    for raw in (b"1", b"", b"23", np.arange(5, dtype=np.uint8)):
        put_bytes(bucket.address("a/b"), raw)
        assert bucket.get("a/b") == bytes(raw)


def test_an_object_that_is_there_is_kept(bucket):
    assert put_if_absent(bucket.address("seal"), b"first")
    assert not put_if_absent(bucket.address("seal"), b"second")
    assert bucket.get("seal") == b"first"


def test_one_of_many_writers_is_the_first(bucket):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: put_if_absent(bucket.address("seal"), str(n).encode()), range(8)))
    assert sum(found) == 1
    assert bucket.get("seal") == str(found.index(True)).encode()


@pytest.mark.parametrize("fault", [500, 503, "reset"])
def test_a_put_is_tried_again(fault, bucket, proxy):
    proxy.faults[:] = [fault]
    put_bytes(bucket.address("a"), b"1")
    proxy.faults[:] = [fault]
    assert put_if_absent(bucket.address("b"), b"2")
    assert (bucket.get("a"), bucket.get("b")) == (b"1", b"2")


def test_an_answer_that_is_lost_leaves_an_object_to_compare(bucket, proxy):
    proxy.faults[:] = ["lost answer"]
    assert not put_if_absent(bucket.address("a"), b"1")
    assert read_object(bucket.address("a"), most_bytes=10)[1] == b"1"


@pytest.mark.parametrize("size", [0, 1000, PART, PART + 1, 3 * PART])
def test_a_file_becomes_an_object(size, bucket, tmp_path):
    data = np.random.default_rng(1).bytes(size)
    (tmp_path / "a").write_bytes(data)
    done = []
    put_file(bucket.address("a"), tmp_path / "a", progress=done.append)
    assert bucket.get("a") == data
    assert done[-1] == size
    assert done == sorted(done)
    if size == 3 * PART:  # S3's tag of an object in parts shows their sizes
        sums = b"".join(hashlib.md5(data[start : start + PART]).digest() for start in range(0, size, PART))
        assert stamp_of_object(bucket.address("a")).tag == f'"{hashlib.md5(sums).hexdigest()}-3"'


def test_the_parts_of_a_file_are_tried_again(bucket, proxy, tmp_path):
    data = np.random.default_rng(1).bytes(3 * PART)
    (tmp_path / "a").write_bytes(data)
    proxy.faults[:] = [500, None, None, "reset", 503]
    put_file(bucket.address("a"), tmp_path / "a")
    assert bucket.get("a") == data


@pytest.mark.parametrize("size", [10, PART + 1])
def test_a_store_that_refuses_is_an_error_at_once(size, bucket, proxy, tmp_path):
    (tmp_path / "a").write_bytes(bytes(size))
    for faults in ([403], [None, 403]):
        proxy.faults[:] = faults if size > PART else [403]
        found, seconds = seconds_of(lambda: put_file(bucket.address("a"), tmp_path / "a"))
        assert isinstance(found, StoreError)
        assert "status 403" in str(found)
        assert bucket.text("a") in str(found)
        assert seconds < 3
    proxy.faults.clear()
    assert bucket.keys() == []


@pytest.mark.parametrize("size", [10, PART + 1])
def test_a_store_that_does_not_answer_is_given_up_in_time(size, bucket, deaf_store, monkeypatch, tmp_path):
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "0.5")
    (tmp_path / "a").write_bytes(bytes(size))
    found, seconds = seconds_of(lambda: put_file(bucket.address("a"), tmp_path / "a"))
    assert isinstance(found, StoreError)
    assert f"{bucket.text('a')}: the store must" in str(found)
    assert seconds < 2


def test_a_file_that_becomes_shorter_is_no_object(bucket, proxy, tmp_path):
    proxy.delay_seconds = 0.2
    path = tmp_path / "a"
    path.write_bytes(bytes(12 * PART))

    def cut(done):
        if done:
            with path.open("r+b") as file:
                file.truncate(PART)

    with pytest.raises(StoreError, match=r"the file must keep its \d+ bytes while it is written to s3://"):
        put_file(bucket.address("a"), path, progress=cut)
    assert bucket.keys() == []


def test_what_is_no_file_is_refused(bucket, tmp_path):
    with pytest.raises(FormatError, match="must be a regular file"):
        put_file(bucket.address("a"), tmp_path)
    with pytest.raises(FileNotFoundError):
        put_file(bucket.address("a"), tmp_path / "none")


def test_an_object_is_removed_once_or_twice(bucket):
    bucket.put("a", b"1")
    for _ in range(2):
        delete_object(bucket.address("a"))
    assert bucket.keys() == []


def test_files_are_written_too(tmp_path):
    address = parse_address(f"file://{tmp_path}/new/a")
    assert put_if_absent(address, b"1")
    assert not put_if_absent(address, b"2")
    assert (tmp_path / "new" / "a").read_bytes() == b"1"
    put_bytes(address, b"3")
    (tmp_path / "large").write_bytes(bytes(range(256)) * (PART // 128))
    put_file(parse_address(f"file://{tmp_path}/new/b"), tmp_path / "large")
    assert (tmp_path / "new" / "b").read_bytes() == (tmp_path / "large").read_bytes()
    for _ in range(2):
        delete_object(address)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["b"]


@pytest.mark.parametrize("scheme", ["http", "https", "msc"])
def test_schemes_that_are_read_only_are_refused(scheme, tmp_path):
    address = parse_address(f"{scheme}://host/a")
    (tmp_path / "a").write_bytes(b"1")
    for call in (
        lambda: put_bytes(address, b"1"),
        lambda: put_if_absent(address, b"1"),
        lambda: put_file(address, tmp_path / "a"),
        lambda: delete_object(address),
    ):
        with pytest.raises(
            ArgumentError, match=f"{scheme}://host/a: an address to write to must have one of the schemes"
        ):
            call()


def test_many_objects_are_removed_at_once_and_those_that_are_not_there_are_passed_over(bucket):
    for number in range(30):
        bucket.put(f"a/{number}", b"1")
    bucket.put("b", b"2")
    delete_objects(bucket.address(f"a/{number}") for number in range(-1, 31))
    assert list(bucket.keys()) == ["b"]
    delete_objects([])
