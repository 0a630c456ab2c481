"""The client against Ceph's radosgw, which checks signatures and conditions as S3 does."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from trackbed.errors import StoreError
from trackbed.files.stores import (
    ObjectRange,
    delete_object,
    fetch,
    fetch_heads,
    fetch_to_file,
    list_objects,
    put_bytes,
    put_file,
    put_if_absent,
    read_object,
    stamp_of_object,
)

pytestmark = pytest.mark.slow


def test_objects_are_written_listed_and_read(ceph_bucket, tmp_path):
    data = np.random.default_rng(1).bytes((40 << 20) + 7)
    (tmp_path / "large").write_bytes(data)
    large, empty = ceph_bucket.address("a/large"), ceph_bucket.address("a/empty")
    put_file(large, tmp_path / "large")
    put_bytes(empty, b"")
    assert dict(list_objects(ceph_bucket.address("a"))) == {large.text: len(data), empty.text: 0}
    (stamp, first), nothing = fetch_heads([large, empty], 4096)
    assert (stamp, first, nothing[1]) == (stamp_of_object(large), data[:4096], b"")
    assert fetch([ObjectRange(large, stamp, 5, 20 << 20)]) == [data[5 : 20 << 20]]
    with (tmp_path / "copy").open("wb") as file:
        fetch_to_file(large, stamp, file.fileno())
    assert (tmp_path / "copy").read_bytes() == data
    put_bytes(large, b"another")
    with pytest.raises(StoreError, match="must be the one that was opened"):
        fetch([ObjectRange(large, stamp, 5, 50)])
    delete_object(large)
    assert ceph_bucket.keys() == ["a/empty"]


def test_one_of_many_writers_is_the_first(ceph_bucket):
    seal = ceph_bucket.address("seal")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: put_if_absent(seal, str(number).encode()), range(8)))
    assert sum(found) == 1
    assert read_object(seal, most_bytes=10)[1] == str(found.index(True)).encode()


def test_a_wrong_secret_is_refused_without_being_repeated(ceph_bucket, monkeypatch):
    address = ceph_bucket.put("a", b"1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    with pytest.raises(
        StoreError, match=r"/a: the store must grant the request, found: status 403 Forbidden"
    ) as caught:
        read_object(address, most_bytes=10)
    assert "secret" not in str(caught.value)
    with pytest.raises(StoreError, match="status 403 Forbidden, SignatureDoesNotMatch"):
        stamp_of_object(address)  # the answer to HEAD has no reason


def test_the_servers_listen_on_loopback_only(ceph_bucket):
    daemons = [one for one in psutil.Process().children() if one.name() in ("ceph-mon", "ceph-osd", "radosgw")]
    assert len(daemons) == 3
    for daemon in daemons:
        addresses = {one.laddr.ip for one in daemon.net_connections() if one.status == psutil.CONN_LISTEN}
        assert addresses == {"127.0.0.1"}, daemon.name()
