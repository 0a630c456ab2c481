"""Requests to a store, with and without faults on the way."""

import math
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import pytest

from tests.support.stores.servers import ACCESS_KEY, SECRET_KEY, seconds_of
from trackbed.cancellation import polling
from trackbed.errors import ArgumentError, StoreError
from trackbed.files.stores import (
    ObjectRange,
    ObjectStamp,
    fetch,
    fetch_heads,
    fetch_to_file,
    list_objects,
    parse_address,
    read_object,
    requests,
    stamp_of_object,
    stamps_of_objects,
)

DATA = bytes(range(256)) * 40
KEY = "web/a.bin"


@pytest.fixture
def a(bucket):
    """Address of an object."""
    return bucket.put(KEY, DATA)


def ranges_of(address, *ranges):
    stamp = stamp_of_object(address)
    return [ObjectRange(address, stamp, start, stop) for start, stop in ranges]


def test_ranges_are_the_bytes_of_their_objects(bucket, a):
    b = bucket.put("web/b.bin", DATA[::-1])
    wanted = [*ranges_of(a, (0, 10), (5000, 5001), (7, 7)), *ranges_of(b, (100, len(DATA)))]
    found = fetch(wanted, in_flight=2)
    assert found == [DATA[:10], DATA[5000:5001], b"", DATA[::-1][100:]]
    assert np.frombuffer(found[0], np.uint8).tolist() == list(range(10))


def test_the_order_of_answers_is_that_of_the_ranges(proxy, a):
    proxy.delay_seconds = 0.05
    wanted = ranges_of(a, *((start, start + 3) for start in range(200)))
    found, seconds = seconds_of(lambda: fetch(wanted))
    assert found == [DATA[start : start + 3] for start in range(200)]
    assert seconds < 200 * 0.05 / 2  # one after the other they take 10 s


@pytest.mark.parametrize("ends", [(-1, 5), (5, 4), (0, len(DATA) + 1)])
def test_a_range_outside_of_the_object_is_refused_before_a_request(ends, a, proxy):
    wanted = ranges_of(a, (0, 5), ends)
    proxy.log.clear()
    with pytest.raises(ArgumentError, match=r"web/a.bin: a range must be within \[0, 10240\)"):
        fetch(wanted)
    assert proxy.log == []


def test_a_range_of_nothing_needs_no_request(a):
    assert fetch([ObjectRange(a, ObjectStamp(10, '"x"'), 3, 3)]) == [b""]
    assert fetch([]) == []


@pytest.mark.parametrize("call", [lambda a: fetch([], in_flight=0), lambda a: fetch_heads([a], 0)])
def test_numbers_below_one_are_refused(call, a):
    with pytest.raises(ArgumentError, match="must be at least 1, found 0"):
        call(a)


def test_heads_have_stamp_and_first_bytes_of_one_answer(bucket, a, proxy):
    addresses = [a, bucket.put("small", b"12345"), bucket.put("empty", b"")]
    found = fetch_heads(addresses, 100)
    assert found == list(zip(stamps_of_objects(addresses), [DATA[:100], b"12345", b""], strict=True))
    assert proxy.counts["GET", f"{bucket.name}/{KEY}", "bytes=0-99"] == 1
    assert proxy.counts["HEAD", f"{bucket.name}/{KEY}", None] == 1  # by the comparison above


def test_an_error_stands_in_the_place_of_an_object(bucket, a):
    addresses = [a, bucket.address("none"), a]
    for found in (fetch_heads(addresses, 10), stamps_of_objects(addresses)):
        assert found[0] == found[2]
        assert isinstance(found[1], FileNotFoundError)
        assert bucket.text("none") in str(found[1])


def test_an_object_that_was_replaced_is_refused(bucket, a):
    (old,) = ranges_of(a, (0, 10))
    bucket.put(KEY, DATA[::-1])
    with pytest.raises(StoreError, match=r"web/a.bin: the object must be the one that was opened"):
        fetch([old])
    assert fetch(ranges_of(a, (0, 10))) == [DATA[::-1][:10]]
    bucket.delete(KEY)
    with pytest.raises(FileNotFoundError, match=r"web/a.bin"):
        fetch([old])


def test_an_object_that_is_not_there_is_an_error_at_once(bucket):
    found, seconds = seconds_of(lambda: stamp_of_object(bucket.address("none")))
    assert isinstance(found, FileNotFoundError)
    assert found.filename == bucket.text("none")
    assert seconds < 2


def test_an_address_without_a_key_is_refused(bucket):
    with pytest.raises(ArgumentError, match="must have a key"):
        stamp_of_object(parse_address(f"s3://{bucket.name}"))


@pytest.mark.parametrize("seconds", ["0.5", "1"])
def test_a_store_that_does_not_answer_is_given_up_in_time(seconds, bucket, deaf_store, monkeypatch):
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", seconds)
    for call in (
        lambda: stamp_of_object(bucket.address(KEY)),
        lambda: fetch([ObjectRange(bucket.address(KEY), ObjectStamp(5, '"x"'), 0, 5)] * 200),
    ):
        found, taken = seconds_of(call)
        assert isinstance(found, StoreError)
        assert f"{bucket.text(KEY)}: the store must answer in time" in str(found)
        assert taken < float(seconds) + 1


def test_a_long_wait_is_told_once(bucket, deaf_store, monkeypatch, caplog):
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "3")
    monkeypatch.setattr(requests, "_SILENT_SECONDS", 0.5)
    monkeypatch.setattr(requests, "_told", -math.inf)
    with caplog.at_level("WARNING"), pytest.raises(StoreError):
        stamp_of_object(bucket.address("a"))
    (record,) = caplog.records
    assert "/a: no answer of the store for 0 s" in record.getMessage()
    assert record.getMessage().endswith("is the endpoint right?")


def test_many_objects_of_a_store_that_does_not_answer_take_one_timeout(bucket, deaf_store, monkeypatch):
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "1")
    found, seconds = seconds_of(lambda: stamps_of_objects([bucket.address(f"{n}") for n in range(300)]))
    assert all(isinstance(one, StoreError) and f"{bucket.text(n)}: " in str(one) for n, one in enumerate(found))
    assert seconds < 2


def test_a_wait_ends_when_the_caller_is_cancelled(bucket, deaf_store):
    started = time.monotonic()

    def poll(_done):
        if time.monotonic() - started > 0.3:
            raise KeyError("another rank has failed")

    with pytest.raises(KeyError, match="another rank"), polling(poll):
        stamp_of_object(bucket.address(KEY))
    assert time.monotonic() - started < 1


def test_ctrl_c_ends_a_wait(bucket, deaf_store):
    program = (
        "from trackbed.files.stores import *; print('waits', flush=True); "
        f"stamp_of_object(parse_address('{bucket.text(KEY)}'))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "waits\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    (_, errors), seconds = seconds_of(process.communicate)
    assert "KeyboardInterrupt" in errors
    assert seconds < 2


@pytest.mark.parametrize(
    "faults", [[500], [503, 500], ["reset"], ["reset body"], ["cut"], ["overlong"], ["range"], ["reset", 503, "cut"]]
)
def test_what_passes_is_tried_again(faults, proxy, a):
    wanted = ranges_of(a, (1000, 3000))
    proxy.faults[:] = faults
    assert fetch(wanted) == [DATA[1000:3000]]
    assert len(proxy.log) == 2 + len(faults)


@pytest.mark.parametrize("fault", ["stall", "stall body"])
def test_a_stalled_attempt_ends_early_enough_to_be_tried_again(fault, proxy, a, monkeypatch):
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "2")
    proxy.stall_seconds = 30
    wanted = ranges_of(a, (1000, 3000))
    proxy.faults[:] = [fault]
    found, seconds = seconds_of(lambda: fetch(wanted))
    assert found == [DATA[1000:3000]]
    assert seconds < 1.5


@pytest.mark.parametrize(
    ("fault", "words"),
    [(403, "the store must grant the request, found: status 403"), ("tag", "must be the one that was opened")],
)
def test_what_does_not_pass_is_an_error_at_once(fault, words, proxy, a):
    wanted = ranges_of(a, (1000, 3000))
    proxy.faults[:] = [fault]
    with pytest.raises(StoreError, match=words):
        fetch(wanted)
    assert len(proxy.log) == 2
    assert fetch(wanted) == [DATA[1000:3000]]


def test_the_first_error_ends_the_other_requests(proxy, a):
    wanted = ranges_of(a, *[(0, 5)] * 500)
    proxy.delay_seconds = 0.05
    proxy.faults[:] = [403]
    with pytest.raises(StoreError, match="status 403"):
        fetch(wanted, in_flight=8)
    time.sleep(0.2)
    assert len(proxy.log) < 50


def test_faults_that_do_not_end_are_an_error_in_time(proxy, a, monkeypatch):
    wanted = ranges_of(a, (0, 5))
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "2")
    proxy.faults[:] = [503] * 100
    found, seconds = seconds_of(lambda: fetch(wanted))
    assert isinstance(found, StoreError)
    assert "web/a.bin: the store must answer in time (TRACKBED_STORE_TIMEOUT), found: status 503" in str(found)
    assert seconds < 3


def test_a_whole_object_is_fetched_into_a_file(bucket, proxy, tmp_path):
    data = np.random.default_rng(1).bytes((40 << 20) + 5)
    address = bucket.put("large", data)
    proxy.faults[:] = [None, "cut", 500, None, "reset body"]
    done = []
    with (tmp_path / "large").open("wb") as file:
        fetch_to_file(address, stamp_of_object(address), file.fileno(), progress=done.append)
        assert file.tell() == 0
    assert (tmp_path / "large").read_bytes() == data
    assert done == [16 << 20, 32 << 20, len(data)]


def test_a_replaced_object_is_not_fetched_into_a_file(bucket, a, tmp_path):
    stamp = stamp_of_object(a)
    bucket.put(KEY, DATA[::-1])
    with (tmp_path / "a").open("wb") as file, pytest.raises(StoreError, match="must be the one that was opened"):
        fetch_to_file(a, stamp, file.fileno())


def test_small_objects_are_read_whole(bucket, a):
    assert read_object(a, most_bytes=len(DATA)) == (stamp_of_object(a), DATA)
    assert read_object(bucket.put("empty", b""), most_bytes=5)[1] == b""
    with pytest.raises(StoreError, match="must have at most 10239 bytes, found 10240"):
        read_object(a, most_bytes=len(DATA) - 1)


def test_listings_have_the_objects_below_a_folder(bucket):
    for key in ("a/1", "a/b/2", "ab", "a/c d%20/\u00e9+", "z"):
        bucket.put(key, key.encode())
    found = dict(list_objects(bucket.address("a")))
    assert found == {bucket.text(key): len(key.encode()) for key in ("a/1", "a/b/2", "a/c d%20/\u00e9+")}
    for text, size in found.items():
        assert stamp_of_object(parse_address(text)).size_bytes == size
    assert len(list(list_objects(parse_address(f"s3://{bucket.name}")))) == 5
    assert list(list_objects(bucket.address("none"))) == []


def test_a_listing_of_pages_continues_after_a_failure(bucket, proxy):
    keys = [f"n/{number:04}" for number in range(2100)]
    bucket.put_empty(keys)
    proxy.log.clear()
    proxy.faults[:] = [503, None, "reset", "cut"]
    assert [text for text, _ in list_objects(bucket.address("n"))] == [bucket.text(key) for key in keys]
    assert len(proxy.log) == 6


def test_a_bucket_that_is_not_there_cannot_be_listed(bucket):
    with pytest.raises((StoreError, FileNotFoundError), match="s3://no-such-bucket"):
        next(list_objects(parse_address("s3://no-such-bucket/a")))


def test_files_are_objects_too(tmp_path):
    (tmp_path / "a b%20.bin").write_bytes(DATA)
    (tmp_path / "empty").write_bytes(b"")
    address = parse_address(f"file://{tmp_path}/a b%20.bin")
    (old,) = ranges_of(address, (5, 50))
    assert fetch([old]) == [DATA[5:50]]
    assert fetch_heads([address, parse_address(f"file://{tmp_path}/empty")], 10)[1][1] == b""
    assert sorted(list_objects(parse_address(f"file://{tmp_path}"))) == [
        (f"file://{tmp_path}/a b%20.bin", len(DATA)),
        (f"file://{tmp_path}/empty", 0),
    ]
    (tmp_path / "empty").replace(tmp_path / "a b%20.bin")
    with pytest.raises(StoreError, match="must be the one that was opened"):
        fetch([old])
    with pytest.raises(FileNotFoundError):
        stamp_of_object(parse_address(f"file://{tmp_path}/none"))


class Ranges(BaseHTTPRequestHandler):
    """Serves DATA with ranges and the fields of its class."""

    fields: ClassVar = {}

    def do_GET(self):
        raw, status, head = DATA, 200, {}
        if "Range" in self.headers:
            start, stop = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            raw, status = DATA[start : stop + 1], 206
            head = {"Content-Range": f"bytes {start}-{start + len(raw) - 1}/{len(DATA)}"}
        self.send_response_only(status)
        for name, value in {"Content-Length": len(raw), **head, **self.fields}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(raw)

    do_HEAD = do_GET

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def serve(request):
    servers = []

    def start(handler):
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


CHANGED = "Wed, 21 Oct 2015 07:28:00 GMT"


@pytest.mark.parametrize(
    ("fields", "tag"),
    [
        ({"ETag": '"x"'}, '"x"'),
        ({"ETag": 'W/"x"', "Last-Modified": CHANGED}, "Last-Modified: 2015-10-21T07:28:00+00:00"),
        ({"Last-Modified": CHANGED}, "Last-Modified: 2015-10-21T07:28:00+00:00"),
    ],
)
def test_http_servers_are_read_by_ranges(fields, tag, serve):
    handler = type("Handler", (Ranges,), {"fields": dict(fields)})
    address = parse_address(serve(handler) + "/web/a%20b.bin")
    (old,) = ranges_of(address, (5, 500))
    assert old.stamp == (len(DATA), tag)
    assert fetch([old]) == [DATA[5:500]]
    handler.fields = {"Last-Modified": "Wed, 21 Oct 2015 07:28:01 GMT"}
    with pytest.raises(StoreError, match="must be the one that was opened"):
        fetch([old])


@pytest.mark.parametrize("fields", [{}, {"ETag": 'W/"x"'}])
def test_a_server_that_gives_no_tag_is_refused(fields, serve):
    address = parse_address(serve(type("Handler", (Ranges,), {"fields": fields})) + "/a")
    with pytest.raises(StoreError, match="must give a strong ETag or Last-Modified, found neither"):
        stamp_of_object(address)


def test_an_http_server_without_ranges_is_refused_at_once(serve, tmp_path):
    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_arguments):
            pass

    (tmp_path / "a b").write_bytes(DATA)
    url = serve(partial(Handler, directory=str(tmp_path)))
    found, seconds = seconds_of(lambda: fetch(ranges_of(parse_address(url + "/a%20b"), (0, 5))))
    assert isinstance(found, StoreError)
    assert "Range request not supported" in str(found)
    assert seconds < 2


def test_http_cannot_be_listed():
    with pytest.raises(ArgumentError, match="https://host/a: a listed address must be of a store that has listings"):
        list_objects(parse_address("https://host/a"))


def test_errors_have_no_secrets(bucket, proxy, a, monkeypatch):
    """Of an answer that repeats the request, as those of S3 do for a wrong signature."""
    wanted = ranges_of(a, (0, 5))
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-session-token")
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "0.4")
    for fault in (400, 403, 500, "reset", "stall"):
        proxy.faults[:] = [fault] * 50
        found, _ = seconds_of(lambda: fetch(wanted))
        assert isinstance(found, StoreError)
        while found is not None:
            text = repr(found) + str(found)
            assert not any(word in text for word in (ACCESS_KEY, SECRET_KEY, "session-token", "Signature"))
            found = found.__cause__ or found.__context__


@pytest.mark.parametrize("value", ["0", "-1", "x", "inf", "nan"])
def test_a_timeout_that_is_no_time_is_refused(value, a, monkeypatch):
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", value)
    with pytest.raises(ArgumentError, match="TRACKBED_STORE_TIMEOUT must be a number of seconds above 0"):
        stamp_of_object(a)
