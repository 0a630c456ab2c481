"""Objects with arrays, sent through a pipe and through shared memory."""

import errno
import functools
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from trackbed.preprocess.messages import NUM_SLOTS, SharedSlots, receive, send
from trackbed.preprocess.worker_pool import map_in_order


@pytest.fixture
def ends():
    one, other = multiprocessing.Pipe()
    with one, other:
        yield one, other


def sent(ends, message, slots=None, slot=None):
    with ThreadPoolExecutor(1) as pool:
        took = pool.submit(send, ends[0], message, slots, slot)
        found = receive(ends[1], slots)
    assert took.result() == (found.slot is not None)
    return found


def message():
    return {"text": "x" * 20_000, "arrays": [np.arange(3, dtype=np.uint16), np.zeros(0), np.arange(1_000_000)]}


def check(found):
    wanted = message()
    assert found["text"] == wanted["text"]
    for have, want in zip(found["arrays"], wanted["arrays"], strict=True):
        assert have.dtype == want.dtype
        np.testing.assert_array_equal(have, want)


def test_arrays_come_through_the_pipe_and_are_the_receivers_own(ends):
    found, slot = sent(ends, message())
    check(found)
    assert slot is None
    found["arrays"][2][:] = 1


@pytest.mark.parametrize("slot", [0, NUM_SLOTS - 1])
def test_arrays_come_through_a_slot(ends, slot):
    slots = SharedSlots.create()
    found, used = sent(ends, message(), slots, slot)
    check(found)
    assert used == slot
    assert all(array.flags.aligned for array in found["arrays"])
    sent(ends, [np.ones(3, dtype=np.uint16)], slots, slot)
    assert found["arrays"][0].tolist() == [1, 1, 1]


def test_what_does_not_fit_a_slot_or_has_none_goes_through_the_pipe(ends):
    slots = SharedSlots.create()
    large = np.arange(5 << 20)
    for slot in (None, 3):
        found, used = sent(ends, [large], slots, slot)
        assert used is None
        np.testing.assert_array_equal(found[0], large)


def test_without_memory_files_or_free_memory_there_are_no_slots(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert SharedSlots.create() is None
    monkeypatch.delattr(os, "memfd_create")
    assert SharedSlots.create() is None


def test_results_are_right_until_the_next_one_is_asked_for():
    """More results than there are slots wait for the first one, which takes longest."""
    jobs = [2_000_000, *[1000 + number for number in range(5 * NUM_SLOTS)], 6_000_000, 10]
    work = functools.partial(np.linspace, 0.0, 1.0)
    for job, result in zip(jobs, map_in_order(work, jobs, workers=2), strict=True):
        np.testing.assert_array_equal(result, work(job))
