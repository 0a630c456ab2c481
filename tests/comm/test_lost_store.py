"""A store that is lost: a rank waits for one answer, however many steps it is in."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from torch.distributed import PrefixStore

from tests.support.contracts.group import result_of
from tests.support.tiers import slow_but
from trackbed.comm import run_ranks, torch_store
from trackbed.comm.store import StoreUnreachable
from trackbed.comm.torch_store import TimeoutStore, connect_to, share_store
from trackbed.errors import CollectiveError

pytestmark = pytest.mark.dist

TIMEOUT_SECONDS = 4.0
SERVER = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


@pytest.fixture
def server():
    """A process that hosts a store, and its port."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def end(process, how):
    """Stops or kills a process, and waits until it has no thread that runs."""
    process.send_signal(how)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED if how == signal.SIGSTOP else os.WEXITED | os.WNOWAIT)


def inside(groups, work):
    """Calls `work()` inside one step of each group."""
    if not groups:
        work()
        return
    with groups[0].guarded("working"):
        inside(groups[1:], work)


def leave_after(action, group, child, take):
    """Ends the innermost step in one of several ways."""
    with group.guarded("the last step") as step:
        if action == "raise":
            raise ValueError("no")
        if action == "interrupt":
            raise KeyboardInterrupt
        {"barrier": group.barrier, "poll": lambda: step.poll(0), "counter": take, "child": child.barrier}[action]()


@pytest.mark.parametrize(
    ("action", "how"),
    slow_but(
        [
            ("barrier", signal.SIGSTOP),
            ("interrupt", signal.SIGSTOP),
            ("counter", signal.SIGSTOP),
            ("child", signal.SIGKILL),
        ],
        [
            *((action, signal.SIGSTOP) for action in ("barrier", "poll", "raise", "interrupt", "counter", "child")),
            *((action, signal.SIGKILL) for action in ("barrier", "raise", "child")),
        ],
    ),
)
def test_nested_steps_wait_for_one_answer(server, action, how):
    process, port = server
    all_are_there = threading.Barrier(2, action=lambda: end(process, how))

    def work(group):
        child, take, lost_at = group.child("side"), group.counter("numbers"), []
        child.barrier()

        def act():
            group.barrier()
            all_are_there.wait(30)
            lost_at.append(time.monotonic())
            leave_after(action, group, child, take)

        error = result_of(lambda: inside([group, child, group, group], act))
        group.leave("has left")
        return error, time.monotonic() - lost_at[0]

    def connect():
        return share_store(connect_to("127.0.0.1", port, timeout_seconds=20), "", timeout_seconds=TIMEOUT_SECONDS)

    for error, seconds in run_ranks(2, work, connect=connect, timeout_seconds=TIMEOUT_SECONDS):
        assert isinstance(error, KeyboardInterrupt if action == "interrupt" else CollectiveError)
        if action != "interrupt":
            assert "its host (usually rank 0) cannot be reached" in str(error)
        assert seconds < 0.75 * TIMEOUT_SECONDS


def test_a_store_that_has_not_answered_is_not_asked_again(server):
    process, port = server
    base = connect_to("127.0.0.1", port, timeout_seconds=20)
    store = TimeoutStore(PrefixStore("", base), lambda: base, request_timeout_seconds=0.5)
    below = store.below("child")
    end(process, signal.SIGSTOP)
    first = result_of(lambda: store.get("key"))
    process.send_signal(signal.SIGCONT)
    began = time.monotonic()
    for request in (lambda: store.set("key", b""), lambda: store.add("key", 1), lambda: below.has(["key"])):
        assert str(result_of(request)) == str(first) == "no answer for 0.5 s"
    assert time.monotonic() - began < 0.2


def test_a_store_that_has_gone_is_told_long_before_a_long_timeout(server, monkeypatch):
    """The launcher was killed: the store refuses every further connection, as that of a child group."""
    process, port = server
    monkeypatch.setattr(torch_store, "_MOST_CONNECT_SECONDS", 1.0)
    all_are_there = threading.Barrier(2, action=process.kill)

    def connect():
        return share_store(connect_to("127.0.0.1", port, timeout_seconds=20), "", timeout_seconds=1800)

    def work(group):
        group.barrier()
        all_are_there.wait(30)
        began = time.monotonic()
        error = result_of(lambda: group.child("side").barrier())
        return error, time.monotonic() - began

    for error, seconds in run_ranks(2, work, connect=connect, timeout_seconds=1800):
        assert isinstance(error, CollectiveError)
        assert seconds < 20


def test_a_host_that_has_ended_is_not_waited_for(server):
    """A connection through a network may stay open when the host is gone: this one is stopped instead."""
    process, port = server
    store = share_store(connect_to("127.0.0.1", port, timeout_seconds=60), "group", timeout_seconds=60)
    store.set("key", b"value")
    end(process, signal.SIGSTOP)
    store.has_host_ended = lambda: True
    began = time.monotonic()
    with pytest.raises(StoreUnreachable, match="its process has ended"):
        store.get("key")
    with pytest.raises(StoreUnreachable, match="its process has ended"):
        store.set("key", b"other")
    assert time.monotonic() - began < 5


def test_a_watch_that_no_thread_can_wait_for_asks_for_its_key(server, monkeypatch):
    _, port = server
    base = connect_to("127.0.0.1", port, timeout_seconds=20)
    store = TimeoutStore(PrefixStore("", base), lambda: base, request_timeout_seconds=10)
    store.set("other", b"")

    def start(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    watch = store.watch("key")
    assert not watch.wait(0.1)
    store.set("key", b"")
    assert watch.wait(10)
    store.delete("key")
    assert watch.has_fired()


def test_connections_to_a_host_that_has_ended_are_refused_at_once(server):
    process, port = server
    store = share_store(connect_to("127.0.0.1", port, timeout_seconds=30), "p", timeout_seconds=600)
    children = [store.below(name) for name in ("a", "b", "c")]
    for child in children:
        assert child.add("n", 1) == 1
    end(process, signal.SIGKILL)
    started = time.monotonic()
    for child in children:
        with pytest.raises(StoreUnreachable):
            child.add("n", 1)
        with pytest.raises(StoreUnreachable):
            child.below("d")
    assert time.monotonic() - started < 10  # torch's own connections wait for two minutes each
