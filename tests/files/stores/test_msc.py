"""Addresses of multi-storage-client, on its profile of files and on one of S3."""

import json
import sys

import pytest

from tests.support.processes.forked import run_in_fork
from tests.support.stores.servers import ACCESS_KEY, SECRET_KEY
from trackbed.errors import ArgumentError, StoreError
from trackbed.files.stores import (
    ObjectRange,
    fetch,
    fetch_heads,
    fetch_to_file,
    list_objects,
    parse_address,
    read_object,
    stamp_of_object,
)

DATA = bytes(range(256)) * 40


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """Writes a configuration file with the profile "here"."""

    def write(**profile):
        path = tmp_path / "msc.json"
        path.write_text(json.dumps({"profiles": {"here": profile}}))
        monkeypatch.setenv("MSC_CONFIG", str(path))

    return write


@pytest.fixture(params=["file", "s3"])
def here(request, configure, tmp_path):
    """Writes objects of the profile "here"."""
    pytest.importorskip("multistorageclient")
    if request.param == "file":
        configure(storage_provider={"type": "file", "options": {"base_path": str(tmp_path / "data")}})

        def put(key, raw):
            path = tmp_path / "data" / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".new").write_bytes(raw)
            path.with_suffix(".new").replace(path)

    else:
        bucket = request.getfixturevalue("bucket")
        options = {"base_path": bucket.name, "endpoint_url": bucket.endpoint, "region_name": "us-east-1"}
        keys = {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY}
        credentials = {"type": "S3Credentials", "options": keys}
        configure(storage_provider={"type": "s3", "options": options}, credentials_provider=credentials)
        put = bucket.put
    put("web/a.bin", DATA)
    return put


A = parse_address("msc://here/web/a.bin")


def test_objects_are_read(here, tmp_path):
    here("web/empty", b"")
    stamp = stamp_of_object(A)
    assert stamp.size_bytes == len(DATA)
    wanted = [ObjectRange(A, stamp, start, stop) for start, stop in ((0, 10), (7, 7), (100, len(DATA)))]
    assert fetch(wanted) == [DATA[:10], b"", DATA[100:]]
    assert fetch_heads([A, parse_address("msc://here/web/empty")], 50)[1][1] == b""
    assert read_object(A, most_bytes=20_000) == (stamp, DATA)
    assert sorted(list_objects(parse_address("msc://here/web"))) == [
        ("msc://here/web/a.bin", len(DATA)),
        ("msc://here/web/empty", 0),
    ]
    with (tmp_path / "copy").open("wb") as file:
        fetch_to_file(A, stamp, file.fileno())
    assert (tmp_path / "copy").read_bytes() == DATA
    assert run_in_fork(lambda: bytes(fetch(wanted)[2])) == DATA[100:]


def test_an_object_that_was_replaced_is_refused(here):
    old = ObjectRange(A, stamp_of_object(A), 0, 10)
    here("web/a.bin", DATA[::-1] + b"1")
    with pytest.raises(StoreError, match=r"msc://here/web/a.bin: the object must be the one that was opened"):
        fetch([old])


def test_an_object_that_is_not_there_is_an_error(here):
    with pytest.raises(FileNotFoundError, match="msc://here/none"):
        stamp_of_object(parse_address("msc://here/none"))


def test_a_profile_that_is_not_there_is_an_error(here):
    with pytest.raises(ArgumentError, match=r'msc://other/a: the environment must .* "other" not found'):
        stamp_of_object(parse_address("msc://other/a"))


@pytest.mark.parametrize(
    ("kind", "folder", "words"),
    [
        ("s3", "bucket/sub/", "; s3://bucket/sub/web/a.bin is the same object"),
        ("gcs", "bucket", "; gs://bucket/web/a.bin is the same object"),
        ("file", "/data", "; file:///data/web/a.bin is the same object"),
        ("oci", "bucket", "$"),
    ],
)
def test_without_the_library_the_error_says_what_to_do(kind, folder, words, configure, monkeypatch):
    configure(storage_provider={"type": kind, "options": {"base_path": folder}})
    monkeypatch.setitem(sys.modules, "multistorageclient", None)
    with pytest.raises(ArgumentError, match=f"must be installed for msc: pip install multi-storage-client.*{words}"):
        stamp_of_object(A)
