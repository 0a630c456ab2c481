"""Requests of collectives: a constant number for each rank, in groups of any size, and none while they wait."""

import time

import pytest

from tests.comm.counting import CountingStore
from trackbed.comm import run_ranks
from trackbed.comm.store import MemoryStore
from trackbed.errors import CollectiveError

MAX_REQUESTS = 12
MEETING_REQUESTS = 5
"""Requests of the first collective of a group for the processes of the ranks on this host."""
LOOK_REQUESTS = 3
"""Requests of a rank that looks who else is on this host, in a first collective that takes longer than a second."""
TIMEOUT_SECONDS = 600
"""So that ranks which wait check for silent ones after 10 seconds at the earliest."""


def step(group):
    with group.guarded("building") as step:
        step.poll(0)


COLLECTIVES = {
    "all_gather": lambda group: group.all_gather(group.rank),
    "combine": lambda group: group.combine(group.rank, sum),
    "broadcast": lambda group: group.broadcast(group.rank),
    "agree": lambda group: group.agree("it", 1),
    "barrier": lambda group: group.barrier(),
    "counter": lambda group: (group.counter("it")(), group.barrier()),
    "step": step,
}


def requests_of(size, collective, *, turns=10):
    """Returns the highest number of requests that a rank made for `turns` collectives."""
    shared, connections = MemoryStore(), []

    def connect():
        connections.append(CountingStore(shared))
        return connections[-1]

    def work(group):
        for _ in range(turns):
            collective(group)

    run_ranks(size, work, connect=connect, timeout_seconds=TIMEOUT_SECONDS)
    return max(connection.requests.total() for connection in connections)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_requests_of_a_rank_do_not_grow_with_their_number(name):
    most = {size: requests_of(size, COLLECTIVES[name]) for size in (2, 16, 256)}
    assert all(requests <= 10 * MAX_REQUESTS for requests in most.values()), most


def wait_for_rank_1(group, *, seconds):
    if group.rank == 1:
        time.sleep(seconds)
    group.barrier()


def test_waiting_costs_no_requests():
    def requests(seconds):
        def work(group):
            wait_for_rank_1(group, seconds=0.1)
            wait_for_rank_1(group, seconds=seconds)

        return requests_of(3, work, turns=1)

    assert requests(1.2) <= requests(0.1)


def test_waiting_for_the_first_collective_looks_who_is_on_this_host():
    def work(group):
        wait_for_rank_1(group, seconds=1.2)

    assert requests_of(3, work, turns=1) <= MAX_REQUESTS + MEETING_REQUESTS + LOOK_REQUESTS


def test_polling_costs_an_occasional_write():
    def work(group):
        with group.guarded("building") as step:
            began = time.monotonic()
            while time.monotonic() - began < 1.5:
                step.poll(0)

    assert requests_of(2, work, turns=1) <= MAX_REQUESTS + 2


def test_a_long_job_does_not_fill_the_store():
    store, sizes = MemoryStore(), []

    def work(group):
        for turn in range(200):
            try:
                with group.guarded("building"):
                    group.barrier()
                    group.counter("it")()
                    if turn % 3 == 0 and group.rank == turn % 4:
                        raise ValueError(turn)
                    group.all_gather(turn)
            except CollectiveError:
                pass
            group.agree("the turn", turn)
            if group.rank == 0:
                sizes.append(len(store))
            group.barrier()

    run_ranks(4, work, connect=lambda: store)
    assert min(sizes[-20:]) <= max(sizes[:20])  # the number of keys at one moment is random
    assert len(store) < 20
