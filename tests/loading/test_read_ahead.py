"""Items made ahead, by whoever is quicker."""

import itertools
import threading
import time

import pytest

from trackbed.loading.read_ahead import ReadAhead


class Makers:
    """Counts up, and notes which thread made each number."""

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
    time.sleep(0.02)  # for what would be one too many
    assert len(makers.names) == count


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_thread_makes_so_many_and_no_more(makers, depth):
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


def test_whoever_comes_back_at_once_makes_most_items_himself(makers):
    line = ReadAhead(makers, 2)
    taken = [next(line) for _ in range(20_000)]
    line.close()
    assert taken == list(range(20_000))
    assert makers.names.count("trackbed-ahead") < 10_000
