"""Counters in shared memory, on which processes sleep."""

import json
import subprocess
import sys
import threading
import time

import pytest

from trackbed.comm.shared_memory import COUNTER_BYTES, SharedCounters, SharedMemory

COUNT = """
import json, sys
from trackbed.comm.shared_memory import SharedCounters
from trackbed.comm.shared_memory import SharedMemory
counters = SharedCounters(SharedMemory.attach(json.loads(sys.argv[1])))
for count in range(1, 200):
    counters.wait(0, 1, count, lambda done: None)
    counters.set(1, count)
"""


def quiet(done):
    """A poll that does nothing."""


@pytest.fixture
def memory():
    return SharedMemory.create(4 * COUNTER_BYTES)


def test_counters_begin_at_zero_and_do_not_touch_each_other(memory):
    counters = SharedCounters(memory)
    assert [counters.has_reached(index, 0) for index in range(4)] == [True] * 4
    counters.set(2, 5)
    assert [counters.has_reached(index, 5) for index in range(4)] == [False, False, True, False]
    assert [counters.has_reached(2, count) for count in (4, 5, 6)] == [True, True, False]


def test_counts_wrap_around(memory):
    counters = SharedCounters(memory)
    for count in (2**31 - 1, 2**32 - 1, 2**32, 2**32 + 1):
        assert not counters.has_reached(0, count)
        counters.set(0, count)
        counters.wait(0, 1, count, quiet)
        assert counters.has_reached(0, count)
        assert counters.has_reached(0, count - 1)
        assert not counters.has_reached(0, count + 1)


def test_a_wait_ends_when_the_last_counter_has_reached_the_count(memory):
    counters = SharedCounters(memory)
    ended = threading.Event()
    waiter = threading.Thread(target=lambda: (counters.wait(1, 3, 2**32 + 2, quiet), ended.set()))
    for index in range(1, 4):
        counters.set(index, 2**32 - 1)
    waiter.start()
    for index in (3, 1):
        counters.set(index, 2**32 + 2)
    assert not ended.wait(0.1)
    counters.set(2, 2**32 + 3)
    assert ended.wait(10)
    waiter.join()


def test_a_waiter_sleeps(memory):
    counters = SharedCounters(memory)
    threading.Timer(0.6, lambda: counters.set(0, 1)).start()
    began, spent = time.monotonic(), time.thread_time()
    counters.wait(0, 1, 1, quiet)
    assert time.monotonic() - began > 0.5
    assert time.thread_time() - spent < 0.1


def test_other_threads_run_while_one_waits(memory):
    counters = SharedCounters(memory)
    threading.Timer(0.2, lambda: counters.set(0, 1)).start()
    counters.wait(0, 1, 1, quiet)  # with the interpreter's lock held, the timer would never run


def test_an_exception_of_the_poll_ends_the_wait(memory):
    polls = []

    def poll(done):
        polls.append(done)
        if len(polls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SharedCounters(memory).wait(0, 4, 1, poll)
    assert polls == [0, 0, 0]


def test_processes_count_for_each_other(memory):
    child = subprocess.Popen([sys.executable, "-c", COUNT, json.dumps(memory.offer())])
    counters = SharedCounters(memory)
    for count in range(1, 200):
        counters.set(0, count)
        counters.wait(1, 1, count, quiet)
    assert child.wait(10) == 0
