"""Children of groups: their keys, their connections, and the end of their parent."""

import gc
import threading
import time

import pytest
from torch.distributed import TCPStore

from tests.comm.counting import CountingStore
from tests.support.contracts.group import on_two_threads, result_of
from trackbed.comm import run_ranks
from trackbed.comm.sealed_store import SealedStore
from trackbed.comm.store import MemoryStore, StoreTampered
from trackbed.comm.torch_store import share_store

TAMPERED = "another process has changed the rendezvous store"


class KeptStore(MemoryStore):
    """Store that keeps the first value of each key, as a stranger could."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def set(self, key, value):
        self.kept.setdefault(self._prefix + key, value)
        super().set(key, value)

    def set_first(self, key, value):
        self.kept.setdefault(self._prefix + key, value)
        return super().set_first(key, value)


def test_the_keys_of_a_child_lie_below_its_name():
    store = KeptStore()

    def work(group):
        group.child("side").barrier()
        group.child("other").child("side").barrier()

    run_ranks(2, work, connect=lambda: store)
    assert {key.rpartition("/rank/")[0] for key in store.kept if "/rank/" in key} == {
        "child/side",
        "child/other/child/side",
    }
    assert all(key.startswith("child/") or key == "0/outcome" or key == "0/flag" for key in store.kept)


def test_creating_a_child_costs_no_request():
    shared, connections = MemoryStore(), []

    def connect():
        connections.append(CountingStore(shared))
        return connections[-1]

    def work(group):
        group.child("side").child("side")
        requests = [connection.requests.total() for connection in connections]
        group.barrier()
        return sum(requests)

    assert run_ranks(1, work, connect=connect) == [0]


def test_a_child_may_be_used_before_its_parent_and_by_more_ranks():
    def work(group):
        found = group.child("side").all_gather(group.rank)
        if group.rank == 0:
            group.child("of one rank alone")
        return found, group.all_gather(-group.rank)

    assert run_ranks(3, work) == [([0, 1, 2], [0, -1, -2])] * 3


@pytest.mark.parametrize("secret", [None, b"secret"])
def test_no_rank_waits_in_a_child_for_one_whose_function_has_returned(secret):
    def work(group):
        child = group.child("side")
        if group.rank == 1:
            return None
        return str(result_of(child.barrier))

    began = time.monotonic()
    text = "rank 1 has left: its function has returned"
    assert run_ranks(3, work, secret=secret) == [text, None, text]
    assert time.monotonic() - began < 10


def test_a_rank_that_leaves_in_the_middle_of_a_step_of_a_child_is_waited_for_until_the_step_ends():
    has_left = threading.Event()

    def work(group):
        child = group.child("side")

        def step():
            with child.guarded("working"):
                if group.rank == 1:
                    has_left.wait(30)

        if group.rank == 1:
            return on_two_threads(lambda: (group.leave("has left"), has_left.set()), lambda: str(result_of(step)))[1]
        return str(result_of(step))

    assert run_ranks(3, work) == ["rank 1 has left"] * 3


def test_a_long_job_with_a_child_does_not_fill_the_store():
    store, sizes = MemoryStore(), []

    def work(group):
        child = group.child("side")
        for turn in range(200):
            with group.guarded("building"), child.guarded("building"):
                child.counter("it")()
                child.all_gather(turn)
            group.barrier()
            if group.rank == 0:
                sizes.append(len(store))
            group.barrier()

    run_ranks(4, work, connect=lambda: store)
    assert min(sizes[-20:]) <= max(sizes[:20])
    assert len(store) < 40  # as many for the child as for its parent


def test_children_have_threads_of_their_own_that_end_with_the_group():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def threads():
        return {thread for thread in threading.enumerate() if thread.name == "trackbed-store"}

    def work(group):
        before = threads()
        group.barrier()
        parents = threads() - before
        group.child("side").barrier()
        return len(parents), len(threads() - before - parents)

    before = threads()
    connect = lambda: share_store(server, "children", timeout_seconds=30)  # noqa: E731
    assert run_ranks(1, work, connect=connect) == [(2, 2)]  # one for requests, one that waits
    deadline = time.monotonic() + 10
    while threads() - before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert threads() <= before


def test_a_blocked_request_of_a_group_does_not_delay_its_child():
    """A request of the parent hangs, as if the server were stopped: the child goes on over its own connection."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    release = threading.Event()

    def work(group):
        child = group.child("side")
        group.barrier()
        child.barrier()
        blocked = group._participant.store._worker.submit(lambda: release.wait(30))
        found = [child.all_gather(turn) for turn in range(5)]
        was_blocked = not blocked.done()
        child.barrier()
        release.set()
        return found, was_blocked

    connect = lambda: share_store(server, "children", timeout_seconds=30)  # noqa: E731
    assert run_ranks(2, work, connect=connect) == [([[turn] * 2 for turn in range(5)], True)] * 2


@pytest.mark.parametrize(("path", "other"), [("", "child/side/"), ("child/side/", ""), ("child/a/", "child/b/")])
def test_a_sealed_value_cannot_be_moved_between_a_group_and_its_children(path, other):
    store = MemoryStore()
    SealedStore(store, b"secret", path=path).set("rank/0", b"value")
    assert SealedStore(store, b"secret", path=path).get("rank/0") == b"value"
    with pytest.raises(StoreTampered, match="'rank/0' must have been written with the secret"):
        SealedStore(store, b"secret", path=other).get("rank/0")


def test_values_of_a_parent_are_not_trusted_in_its_child():
    """A stranger copies the first record of rank 1 to the child, where it plays that rank."""
    store = KeptStore()

    def work(group):
        group.all_gather("of the parent")
        if group.rank == 1:
            return None
        store.set("child/side/rank/1", store.kept["rank/1"])
        store.set("child/side/0/flag", b"")
        store.add("child/side/0/count", 1)
        return str(result_of(lambda: group.child("side").all_gather("of the child")))

    found = run_ranks(2, work, connect=lambda: store, secret=b"secret", timeout_seconds=2)
    assert TAMPERED in found[0]


def test_the_values_of_a_child_are_sealed_with_the_secret_and_the_names_of_its_ancestors():
    store = KeptStore()

    def work(group):
        child = group.child("side")
        for one in (group, child, child.child("below")):
            with one.guarded("building"):
                one.all_gather(1)

    run_ranks(2, work, connect=lambda: store, secret=b"secret")
    assert {"child/side/rank/0", "child/side/child/below/rank/0"} < store.kept.keys()
    written = MemoryStore()
    for key, value in store.kept.items():
        written.set(key, value)
        SealedStore(written, b"secret").get(key)
