"""Object stores for tests: moto's S3 server, a bucket per test, and a proxy that injects faults and counts requests.

`conftest.py` imports the fixtures, for all folders.
"""

import asyncio
import hashlib
import http.client
import http.server
import logging
import os
import re
import socket
import struct
import threading
import time
import uuid
from collections import Counter
from urllib.parse import unquote, urlsplit

import pytest

from trackbed.files.stores import parse_address

ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key"


@pytest.fixture(scope="session")
def moto_endpoint():
    """Address of moto's S3 server, one per process of the test session."""
    pytest.importorskip("obstore")
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


def use_endpoint(monkeypatch, endpoint):
    """Sets the environment that names an S3 server, and a timeout that suits tests."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in (
        ("AWS_ACCESS_KEY_ID", ACCESS_KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET_KEY),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", endpoint),
        ("TRACKBED_STORE_TIMEOUT", "8"),
    ):
        monkeypatch.setenv(name, value)


class S3Bucket:
    """A new bucket.

    `client` is boto3's, to look at the bucket without the code under test.
    """

    def __init__(self, endpoint):
        import boto3
        from botocore.config import Config

        self.endpoint, self.name = endpoint, f"corpus-{uuid.uuid4().hex[:12]}"
        self.client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}),
        )
        self.client.create_bucket(Bucket=self.name)

    @classmethod
    def wait(cls, endpoint, seconds=30):
        """Waits until a server that has just started makes a bucket and takes an object."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                cls(endpoint).put("a", b"1")
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return

    def address(self, key):
        return parse_address(self.text(key))

    def text(self, key):
        return f"s3://{self.name}/{key}"

    def put(self, key, data):
        """Writes an object, and returns its address."""
        self.client.put_object(Bucket=self.name, Key=key, Body=data)
        return self.address(key)

    def put_empty(self, keys):
        """Writes many empty objects, past moto's HTTP server, which takes 5 ms for each."""
        from moto.core import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends

        for key in keys:
            s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(self.name, key, b"")

    def get(self, key):
        return self.client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def delete(self, key):
        self.client.delete_object(Bucket=self.name, Key=key)

    def keys(self):
        return [one["Key"] for one in self.client.list_objects_v2(Bucket=self.name).get("Contents", [])]


@pytest.fixture
def bucket(moto_endpoint, monkeypatch):
    """A new bucket of moto's server, which the environment names."""
    use_endpoint(monkeypatch, moto_endpoint)
    return S3Bucket(moto_endpoint)


@pytest.fixture(params=["moto", pytest.param("ceph", marks=pytest.mark.slow)])
def any_bucket(request, monkeypatch):
    """A new bucket of each kind of server, which the environment names."""
    endpoint = request.getfixturevalue(f"{request.param}_endpoint")
    use_endpoint(monkeypatch, endpoint)
    return S3Bucket(endpoint)


class FolderPlace:
    """A folder below which checkpoints lie."""

    def __init__(self, folder):
        self.folder = folder

    def text(self, name):
        """Path of what has a name."""
        return str(self.folder / name)

    def publish(self, folder):
        """Returns where to read a folder that a test has written."""
        return folder


class BucketPlace(S3Bucket):
    """A new bucket in which checkpoints lie."""

    def publish(self, folder):
        """Returns where to read a folder that a test has written: the address of a copy."""
        name = uuid.uuid4().hex
        for path in folder.iterdir():
            self.put(f"{name}/{path.name}", path.read_bytes())
        return self.text(name)


@pytest.fixture(params=["folder", "moto", pytest.param("ceph", marks=pytest.mark.slow)])
def place(request, tmp_path, monkeypatch):
    """A place for checkpoints of each kind."""
    if request.param == "folder":
        return FolderPlace(tmp_path)
    endpoint = request.getfixturevalue(f"{request.param}_endpoint")
    use_endpoint(monkeypatch, endpoint)
    return BucketPlace(endpoint)


class Proxy:
    """Passes requests on to a server, and changes some of the answers.

    Args:
        target: URL of the server.

    Attributes:
        faults: changes of the next answers, one per request and None for no change: a status; "reset", "reset body",
            "stall", "stall body", "cut", "overlong"; "lost answer"; "range", an answer to another range than asked for;
            "tag", another ETag; "late listing", a listing without objects.
        delay_seconds: time before each answer.
        stall_seconds: length of a stall.
        log: method, key with its bucket, and Range of each request.
        look: called with the headers of each request.
    """

    def __init__(self, target):
        self.faults, self.log, self.look = [], [], lambda headers: None
        self.delay_seconds, self.stall_seconds = 0.0, 3.0
        self.ended = threading.Event()
        proxy, upstream = self, urlsplit(target).netloc

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self):
                super().setup()
                self.upstream = http.client.HTTPConnection(upstream, timeout=30)

            def finish(self):
                self.upstream.close()
                super().finish()

            def log_message(self, *_arguments):
                pass

            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                proxy.log.append((self.command, unquote(urlsplit(self.path).path[1:]), self.headers.get("Range")))
                proxy.look(self.headers)
                fault = proxy.faults.pop(0) if proxy.faults else None
                proxy.ended.wait(proxy.delay_seconds + (proxy.stall_seconds if fault == "stall" else 0))
                if fault == "reset":
                    self.reset()
                elif isinstance(fault, int):
                    self.give(fault, {}, b"", None)
                elif fault == "lost answer":
                    self.ask(fault, body)
                    self.reset()
                else:
                    self.give(*self.ask(fault, body), fault)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

            def ask(self, fault, body):
                headers = {name.title(): value for name, value in self.headers.items()}
                if fault == "range" and "Range" in headers:
                    start, stop = map(int, re.findall(r"\d+", headers["Range"]))
                    headers["Range"] = f"bytes={start + 1}-{stop + 1}"
                self.upstream.request(self.command, self.path, body, headers)
                found = self.upstream.getresponse()
                fields = {name.title(): value for name, value in found.getheaders()}
                content = found.read()
                if fault == "late listing" and "list-type" in self.path:
                    content = re.sub(rb"<Contents>.*?</Contents>", b"", content, flags=re.DOTALL)
                return found.status, fields, content

            def give(self, status, fields, body, fault):
                fields = {
                    name: value for name, value in fields.items() if name not in ("Connection", "Transfer-Encoding")
                }
                if fault == "tag":
                    fields["Etag"] = '"another"'
                if fault == "overlong":
                    body += b"more"
                if self.command != "HEAD":
                    fields["Content-Length"] = str(len(body))
                self.send_response_only(status)
                for name, value in fields.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "HEAD":
                    return
                if fault in ("cut", "reset body", "stall body"):
                    self.wfile.write(body[: len(body) // 2])
                    self.wfile.flush()
                    if fault == "stall body":
                        proxy.ended.wait(proxy.stall_seconds)
                    if fault == "reset body":
                        self.reset()
                    self.close_connection = True
                else:
                    self.wfile.write(body)

            def reset(self):
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.close()

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, *_arguments):
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @property
    def counts(self):
        """Number of requests for each method, key and Range."""
        return Counter(self.log)

    def close(self):
        self.ended.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def proxy(bucket, monkeypatch):
    """A proxy before the server of `bucket`, which the environment names."""
    found = Proxy(bucket.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", found.url)
    yield found
    found.close()


@pytest.fixture
def deaf_store(bucket, monkeypatch):
    """A server that accepts connections and does not answer, named by the environment."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{listening.getsockname()[1]}")
        yield


def seconds_of(call):
    """Runs a call that may raise, and returns its result or error, and its time."""
    started = time.monotonic()
    try:
        found = call()
    except Exception as error:
        found = error
    return found, time.monotonic() - started


class Relay:
    """Passes bytes on to a server, and delays its answers; thousands of requests a second.

    Args:
        endpoint: URL of the server.
        delay_seconds: time that is added to each answer.
    """

    def __init__(self, endpoint, delay_seconds):
        self._target, self._delay = urlsplit(endpoint), delay_seconds
        ready = threading.Event()

        async def serve():
            server = await asyncio.start_server(self._handle, "127.0.0.1", 0, backlog=1024)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            ready.set()
            await server.serve_forever()

        threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
        ready.wait()

    async def _handle(self, reader, writer):
        answers, requests = await asyncio.open_connection(self._target.hostname, self._target.port)
        loop = asyncio.get_running_loop()

        async def pass_requests():
            while data := await reader.read(1 << 16):
                requests.write(data)
            requests.close()

        async def pass_answers():
            while data := await answers.read(1 << 20):
                loop.call_later(self._delay, writer.write, data)
            loop.call_later(self._delay, writer.close)

        await asyncio.gather(pass_requests(), pass_answers(), return_exceptions=True)


@pytest.fixture
def web_server(tmp_path):
    """URL of a web server that answers ranges of the files in `tmp_path`, with an ETag of their contents."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            path = tmp_path / unquote(self.path[1:])
            if not path.is_file():
                return self.give(404, b"", {})
            raw = path.read_bytes()
            tag = f'"{hashlib.sha256(raw).hexdigest()[:16]}"'
            if self.headers.get("If-Match", tag) != tag:
                return self.give(412, b"", {})
            span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if span is None:
                return self.give(200, raw, {"ETag": tag})
            start, stop = int(span[1]), min(int(span[2]) + 1, len(raw))
            if start >= len(raw):
                return self.give(416, b"", {"Content-Range": f"bytes */{len(raw)}"})
            head = {"ETag": tag, "Content-Range": f"bytes {start}-{stop - 1}/{len(raw)}"}
            return self.give(206, raw[start:stop], head)

        do_HEAD = do_GET

        def give(self, status, raw, fields):
            self.send_response_only(status)
            for name, value in {**fields, "Content-Length": str(len(raw))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(raw)

        def log_message(self, *_arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
