"""Processes that were forked from one that has made requests make theirs through a helper program."""

import contextlib
import os
import signal
import time

import numpy as np
import psutil
import pytest
from torch.utils.data import DataLoader

from tests.support.processes.forked import run_in_fork
from tests.support.stores.servers import seconds_of
from trackbed.cancellation import polling
from trackbed.errors import ArgumentError, FormatError, StoreError
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
    stamps_of_objects,
)

DATA = bytes(range(256)) * 40


@pytest.fixture
def a(bucket):
    """A range of an object, after this process has made a request."""
    address = bucket.put("web/a.bin", DATA)
    return ObjectRange(address, stamp_of_object(address), 100, 300)


def helpers():
    """The helper programs of this process and of its children."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            found += [one] if "stores.helper" in " ".join(one.cmdline()) else []
    return found


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until(condition, seconds=5):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def wait_until_all_threads_ended(pid):
    """Until a child of this process can be waited for, which is left to its owner."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_ranges_heads_and_stamps(a, bucket):
    addresses = [a.address, bucket.put("empty", b""), bucket.address("none")]

    def ask():
        heads = fetch_heads(addresses, 50)
        return (
            [bytes(raw) for raw in fetch([a, a._replace(start=300), a._replace(start=0, stop=1)])],
            [(heads[0][0], bytes(heads[0][1])), (heads[1][0], bytes(heads[1][1])), repr(heads[2])],
            [repr(one) for one in stamps_of_objects(addresses)],
            read_object(a.address, most_bytes=20_000),
            np.frombuffer(fetch([a])[0], np.uint16)[:2].tolist(),
            len(helpers()),
        )

    *expected, without_helper = ask()
    *found, with_helper = run_in_fork(ask)
    assert found == expected
    assert found[0] == [DATA[100:300], b"", DATA[:1]]
    assert (without_helper, with_helper) == (0, 1)


def test_files_and_listings(a, bucket, tmp_path):
    data = np.random.default_rng(1).bytes(20 << 20)
    (tmp_path / "large").write_bytes(data)

    def work():
        done = []
        put_file(bucket.address("b/large"), tmp_path / "large", progress=done.append)
        with (tmp_path / "copy").open("wb") as file:
            fetch_to_file(
                bucket.address("b/large"),
                stamp_of_object(bucket.address("b/large")),
                file.fileno(),
                progress=done.append,
            )
        put_bytes(bucket.address("b/small"), b"1")
        delete_object(a.address)
        return put_if_absent(bucket.address("b/small"), b"2"), list(list_objects(bucket.address("b"))), done[-1]

    assert run_in_fork(work) == (False, [(bucket.text("b/large"), len(data)), (bucket.text("b/small"), 1)], len(data))
    assert (tmp_path / "copy").read_bytes() == data
    assert bucket.keys() == ["b/large", "b/small"]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda a, path: stamp_of_object(a.address._replace(key="none")), FileNotFoundError, "no such object"),
        (lambda a, path: fetch([a._replace(stamp=a.stamp._replace(tag='"x"'))]), StoreError, "must be the one"),
        (lambda a, path: fetch([a._replace(stop=1 << 40)]), ArgumentError, "must be within"),
        (lambda a, path: put_file(a.address, path), FormatError, "must be a regular file"),
    ],
)
def test_errors_are_those_of_any_process(call, error, words, a, tmp_path):
    for run in (run_in_fork, lambda function: function()):
        with pytest.raises(error, match=words):
            run(lambda: call(a, tmp_path))


class Objects:
    """A dataset that fetches each sample from a store."""

    def __init__(self, ranges):
        self.ranges = ranges

    def __len__(self):
        return len(self.ranges)

    def __getitem__(self, index):
        (raw,) = fetch([self.ranges[index]])
        return bytes(raw)


def test_workers_of_a_dataloader(a):
    ranges = [a._replace(start=start, stop=start + 5) for start in range(64)]
    assert fetch(ranges[:1]) == [DATA[:5]]
    loader = DataLoader(Objects(ranges), batch_size=4, num_workers=2, collate_fn=list)
    for _ in range(2):
        assert [raw for batch in loader for raw in batch] == [DATA[start : start + 5] for start in range(64)]
    assert wait_until(lambda: helpers() == [])


def forked_child(work):
    """Starts `work` in a forked child, and returns the child's process id and what `work` gives first."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work(lambda number: os.write(sender, number.to_bytes(8, "little")))
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        return child, int.from_bytes(pipe.read(8), "little")


@pytest.mark.parametrize("how", ["killed", "ends"])
def test_a_helper_ends_with_its_process(how, a):
    def work(report):
        fetch([a])
        report(helpers()[0].pid)
        if how == "killed":
            time.sleep(60)

    child, helper = forked_child(work)
    if how == "killed":
        assert alive(helper)
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert wait_until(lambda: not alive(helper))


def test_a_helper_ends_in_the_middle_of_a_request(a, deaf_store):
    def work(report):
        def poll(_done):
            if helpers():
                report(helpers()[0].pid)

        with polling(poll):
            fetch([a])

    child, helper = forked_child(work)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert wait_until(lambda: not alive(helper))


def test_a_child_of_a_forked_process_has_a_helper_of_its_own(a):
    def work():
        first = bytes(fetch([a])[0])
        own = [one.pid for one in helpers()]
        second, its = run_in_fork(lambda: (bytes(fetch([a])[0]), [one.pid for one in helpers()]))
        return first == second == bytes(fetch([a])[0]), own != its, len(own), len(its)

    assert run_in_fork(work) == (True, True, 1, 1)


def test_a_helper_that_was_killed_is_started_again(a):
    def work():
        fetch([a])
        helper = helpers()[0].pid
        os.kill(helper, signal.SIGKILL)
        wait_until_all_threads_ended(helper)
        return bytes(fetch([a])[0])

    assert run_in_fork(work) == DATA[100:300]


def test_a_helper_that_is_killed_in_a_request_is_an_error(a, proxy):
    def work():
        fetch([a])
        helper = helpers()[0].pid
        proxy_is_slow = polling(lambda _done: [os.kill(one.pid, signal.SIGKILL) for one in helpers()])
        with proxy_is_slow, pytest.raises(StoreError, match="helper program of this forked process must answer"):
            fetch([a])
        wait_until_all_threads_ended(helper)
        return bytes(fetch([a])[0])

    assert run_in_fork(lambda: bytes(fetch([a])[0])) == DATA[100:300]
    proxy.delay_seconds = 0.5
    assert run_in_fork(work) == DATA[100:300]


def test_a_wait_in_a_forked_process_ends(a, deaf_store, monkeypatch):
    def cancelled():
        started = time.monotonic()

        def poll(_done):
            if time.monotonic() - started > 1.5:
                raise KeyError("another rank has failed")

        with polling(poll):
            fetch([a])

    found, seconds = seconds_of(lambda: run_in_fork(cancelled))
    assert isinstance(found, KeyError)
    assert seconds < 3
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "0.5")
    found, seconds = seconds_of(lambda: run_in_fork(lambda: fetch([a])))
    assert isinstance(found, StoreError)
    assert "web/a.bin: the store must answer in time" in str(found)
    assert seconds < 3
