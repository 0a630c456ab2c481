"""Tests of the prefetching iterator."""

import itertools
import random
import signal
import threading
import time

import pytest

from trackbed.loading.read_ahead import ReadAhead


class Makers:
    """Iterator that counts up and records which thread computed each number."""

    def __init__(self):
        self.names = []

    def __call__(self):
        for number in itertools.count():
            self.names.append(threading.current_thread().name)
            yield number


@pytest.fixture
def makers():
    return Makers()


def wait_for(count, makers):
    deadline = time.monotonic() + 30
    while len(makers.names) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)  # time for one too many
    assert len(makers.names) == count


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_thread_prefetches_depth_items_and_no_more(makers, depth):
    line = ReadAhead(makers, depth)
    wait_for(depth, makers)
    assert [next(line) for _ in range(3 * depth)] == list(range(3 * depth))
    wait_for(4 * depth, makers)
    line.close()
    assert makers.names[:depth] == makers.names[-depth:] == ["trackbed-ahead"] * depth


def test_after_any_number_taken_at_once_the_thread_catches_up(makers):
    line, taken = ReadAhead(makers, 3), 0
    for burst in (1, 2, 3, 4, 50, 1, 1000):
        for _ in range(burst):
            assert next(line) == taken
            taken += 1
        wait_for(taken + 3, makers)
    line.close()


def threads_left():
    """Prefetch threads that are still alive after a grace period.

    Python keeps a thread whose start was interrupted in its list even if it never ran.
    """
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        left = [thread for thread in threading.enumerate() if thread.name == "trackbed-ahead" and thread.is_alive()]
        if not left:
            break
        time.sleep(0.005)
    return left


def was_interrupted(function, seconds):
    """True if Ctrl-C, sent after `seconds`, arrived before `function` returned."""
    armed, came = [True], False

    def happen(*_):
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, happen)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        function()
        armed.clear()
    except KeyboardInterrupt:
        came = True
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    return came


# Python reports and ignores an interrupt that arrives in the callback of a weak reference.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_moment_of_a_start_leaves_no_thread():
    draw, lines = random.Random(5), []  # kept, because an interrupt during garbage collection is ignored

    def start():
        lines.append(ReadAhead(itertools.count, 2))
        lines[-1].close()
        time.sleep(400e-6)

    interrupted = sum(was_interrupted(start, draw.uniform(1e-6, 300e-6)) for _ in range(300))
    assert interrupted > 100
    lines.clear()
    assert threads_left() == []


def test_the_consumer_computes_all_items_if_no_thread_can_be_started(monkeypatch, makers):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        line = ReadAhead(makers, 2)
        assert [next(line) for _ in range(5)] == list(range(5))
        assert line.close()
    assert set(makers.names) == {threading.current_thread().name}


def test_a_consumer_without_pauses_computes_most_items_inline(makers):
    line = ReadAhead(makers, 2)
    taken = [next(line) for _ in range(20_000)]
    line.close()
    assert taken == list(range(20_000))
    assert makers.names.count("trackbed-ahead") < 10_000
