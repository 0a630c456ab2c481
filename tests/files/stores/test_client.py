"""Requests to a store, with and without faults on the way."""

import http.server
import socket
import struct
import threading
import time
import urllib.error
import urllib.request

import boto3
import pytest
from moto.server import ThreadedMotoServer

from trackbed.cancellation import polling
from trackbed.errors import ArgumentError, StoreError
from trackbed.files.stores import ObjectStamp, fetch_ranges, is_address, parse_address, stamp_of_object

DATA = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def server():
    found = ThreadedMotoServer("127.0.0.1", 0)
    found.start()
    yield "http://{}:{}".format(*found.get_host_and_port())
    found.stop()


@pytest.fixture
def endpoint(server, monkeypatch):
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "8")
    return server


@pytest.fixture
def bucket(endpoint):
    client = boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1"
    )
    client.create_bucket(Bucket="corpus")
    client.put_object(Bucket="corpus", Key="web/a.bin", Body=DATA)
    return client


ADDRESS = parse_address("s3://corpus/web/a.bin")


def test_ranges_are_the_bytes_of_the_object(bucket):
    stamp = stamp_of_object(ADDRESS)
    assert stamp.size_bytes == len(DATA)
    ranges = [(0, 10), (5000, 5001), (7, 7), (100, len(DATA))]
    assert fetch_ranges(ADDRESS, stamp, ranges) == [DATA[start:stop] for start, stop in ranges]


def test_an_object_that_was_replaced_is_refused(bucket):
    stamp = stamp_of_object(ADDRESS)
    bucket.put_object(Bucket="corpus", Key="web/a.bin", Body=DATA[::-1])
    with pytest.raises(StoreError, match=r"s3://corpus/web/a.bin: the object must be the one that was opened"):
        fetch_ranges(ADDRESS, stamp, [(0, 10)])
    assert fetch_ranges(ADDRESS, stamp_of_object(ADDRESS), [(0, 10)]) == [DATA[::-1][:10]]


def test_an_object_that_is_not_there_is_an_error_at_once(bucket):
    started = time.monotonic()
    with pytest.raises(FileNotFoundError, match=r"s3://corpus/none"):
        stamp_of_object(parse_address("s3://corpus/none"))
    assert time.monotonic() - started < 2


def test_a_range_outside_of_the_object_is_an_error(bucket):
    stamp = stamp_of_object(ADDRESS)
    with pytest.raises(StoreError, match=r"s3://corpus/web/a.bin"):
        fetch_ranges(ADDRESS, stamp, [(len(DATA) - 5, len(DATA) + 5)])


@pytest.fixture
def deaf(endpoint, monkeypatch):
    """A server that accepts connections and does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{listening.getsockname()[1]}")
        yield


@pytest.mark.parametrize("seconds", ["0.5", "2"])
def test_a_store_that_does_not_answer_is_given_up_in_time(seconds, deaf, monkeypatch):
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", seconds)
    started = time.monotonic()
    with pytest.raises(StoreError, match=r"s3://corpus/web/a.bin: the store must answer in time"):
        stamp_of_object(ADDRESS)
    assert time.monotonic() - started < float(seconds) + 1


def test_a_wait_ends_when_the_caller_is_cancelled(deaf):
    started = time.monotonic()

    def poll(_done):
        if time.monotonic() - started > 0.3:
            raise KeyError("another rank has failed")

    with pytest.raises(KeyError, match="another rank"), polling(poll):
        stamp_of_object(ADDRESS)
    assert time.monotonic() - started < 1


def test_addresses_are_told_from_paths():
    assert [is_address(name) for name in ("s3://a/b", "gs://a/b", "/a/b", "a/b", "file:///a")] == [
        True,
        True,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("s3://user:secret@bucket/a", "found one with a username"),
        ("https://host/a?X-Amz-Signature=secret", "found one with a query"),
        ("https://host/a#secret", "found one with a fragment"),
    ],
)
def test_what_may_be_a_secret_is_refused_without_being_repeated(text, words):
    with pytest.raises(ArgumentError, match=words) as caught:
        parse_address(text)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"), [("ftp://a/b", "scheme must be one of"), ("s3:///b", "must have the form s3://bucket/key")]
)
def test_other_addresses_are_refused(text, words):
    with pytest.raises(ArgumentError, match=words):
        parse_address(text)


def test_a_range_of_nothing_needs_no_request():
    assert fetch_ranges(ADDRESS, ObjectStamp(10, '"x"'), [(3, 3)]) == [b""]


class Proxy:
    """Passes requests on to a server, and answers some of them as `faults` says."""

    def __init__(self, target):
        self.target, self.faults, self.requests = target, [], 0
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.answer(b"")

            def do_HEAD(self):
                self.answer(b"")

            def log_message(self, *_arguments):
                pass

            def answer(self, _body):
                proxy.requests += 1
                fault = proxy.faults.pop(0) if proxy.faults else None
                headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                request = urllib.request.Request(proxy.target + self.path, headers=headers, method=self.command)
                try:
                    found = urllib.request.urlopen(request, timeout=5)
                except urllib.error.HTTPError as error:
                    found = error
                with found:
                    body, status = found.read(), found.status
                    fields = {name.title(): value for name, value in found.headers.items()}
                if fault == "reset":
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.close_connection = True
                    self.connection.close()
                    return
                if fault == "stall":
                    time.sleep(3)
                if isinstance(fault, int):
                    status, body, fields = fault, b"", {"Content-Length": "0"}
                fields = {
                    name: value
                    for name, value in fields.items()
                    if name.lower() not in ("connection", "transfer-encoding")
                }
                if fault == "range":
                    fields["Content-Range"] = f"bytes 0-{len(body) - 1}/{len(DATA)}"
                if fault == "tag":
                    fields["Etag"] = '"another"'
                if self.command == "GET":
                    fields["Content-Length"] = str(len(body))
                self.send_response(status)
                for name, value in fields.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)
                    if fault == "cut":
                        self.close_connection = True

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_arguments):
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def proxy(bucket, endpoint, monkeypatch):
    found = Proxy(endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", found.url)
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.mark.parametrize("faults", [[500], [503, 500], ["reset"], ["cut"], ["stall"], ["range"], ["reset", 503, "cut"]])
def test_what_passes_is_tried_again(faults, proxy):
    stamp = stamp_of_object(ADDRESS)
    proxy.faults[:] = faults
    assert fetch_ranges(ADDRESS, stamp, [(1000, 3000)]) == [DATA[1000:3000]]
    assert proxy.requests == 2 + len(faults)


@pytest.mark.parametrize(
    ("fault", "words"), [(403, "the store must give the object"), ("tag", "must be the one that was opened")]
)
def test_what_does_not_pass_is_an_error_at_once(fault, words, proxy):
    stamp = stamp_of_object(ADDRESS)
    proxy.faults[:] = [fault]
    with pytest.raises(StoreError, match=words):
        fetch_ranges(ADDRESS, stamp, [(1000, 3000)])
    assert proxy.requests == 2
    assert fetch_ranges(ADDRESS, stamp, [(1000, 3000)]) == [DATA[1000:3000]]


def test_faults_that_do_not_end_are_an_error_in_time(proxy, monkeypatch):
    stamp = stamp_of_object(ADDRESS)
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "2")
    proxy.faults[:] = [503] * 100
    started = time.monotonic()
    with pytest.raises(StoreError, match=r"s3://corpus/web/a.bin: the store must answer in time, found: .*503"):
        fetch_ranges(ADDRESS, stamp, [(0, 5)])
    assert time.monotonic() - started < 3
