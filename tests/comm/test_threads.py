"""Tests of ranks that are threads, and of worker threads."""

import threading
import time

import pytest

from trackbed.comm import run_ranks
from trackbed.comm.blocking_calls import Worker
from trackbed.errors import ArgumentError, CollectiveError


def test_results_are_in_rank_order():
    assert run_ranks(5, lambda group: group.rank**2) == [0, 1, 4, 9, 16]


def test_the_original_exception_is_raised_and_not_those_of_other_ranks():
    error = ValueError("no")

    def work(group):
        if group.rank == 2:
            raise error
        group.barrier()

    with pytest.raises(ValueError) as caught:
        run_ranks(3, work)
    assert caught.value is error


def test_of_collective_errors_the_one_with_a_cause_is_raised():
    def work(group):
        with group.guarded("building"):
            if group.rank == 1:
                raise ValueError("no")

    with pytest.raises(CollectiveError, match="building: rank 1: ValueError: no") as caught:
        run_ranks(3, work)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_rank_that_waits_long_says_for_whom_unless_that_one_works(is_there, caplog, monkeypatch):
    monkeypatch.setattr("trackbed.comm.watchdog.FIRST_CHECK_SECONDS", 0.1)
    monkeypatch.setattr("trackbed.comm.watchdog.LATE_SECONDS", 0.5)
    seconds = 2.0

    def work(group):
        is_last = group.rank == 1
        if is_last and not is_there:
            time.sleep(seconds)
        with group.guarded("save", max_heartbeat_gap_seconds=0.1) as step:
            end = time.monotonic() + seconds
            while is_last and is_there and time.monotonic() < end:
                step.poll(0)
                time.sleep(0.02)

    run_ranks(3, work, timeout_seconds=5)
    words = "waits for rank 1: every rank must make this call, not only some, as under `if rank == 0:`"
    assert len([record for record in caplog.records if words in record.message]) == (not is_there)


def test_no_rank_waits_for_one_whose_function_has_returned():
    found = []

    def work(group):
        if group.rank:
            with pytest.raises(CollectiveError) as caught:
                group.barrier()
            found.append(str(caught.value))

    began = time.monotonic()
    run_ranks(3, work)
    assert time.monotonic() - began < 10
    assert set(found) == {"rank 0 has left: its function has returned"}


def test_an_empty_group_is_rejected():
    with pytest.raises(ArgumentError, match="size must be at least 1, but is 0"):
        run_ranks(0, lambda group: None)


@pytest.mark.parametrize("timeout_seconds", [0, -1, float("nan")])
def test_a_timeout_must_be_positive(timeout_seconds):
    with pytest.raises(ArgumentError, match="timeout_seconds must be above 0"):
        run_ranks(1, lambda group: None, timeout_seconds=timeout_seconds)


def test_a_worker_makes_calls_in_order_and_returns_their_exceptions():
    worker = Worker()
    futures = [worker.submit(lambda number=number: 1 // number) for number in (1, 0, 2)]
    assert futures[0].result() == 1
    assert isinstance(futures[1].exception(), ZeroDivisionError)
    assert futures[2].result() == 0


def test_a_caller_can_stop_waiting_for_a_worker():
    worker, release = Worker(), threading.Event()
    future = worker.submit(lambda: release.wait(30))
    with pytest.raises(TimeoutError):
        future.result(0.05)
    release.set()
    assert future.result(30)


def test_a_workers_thread_ends_with_its_last_reference():
    worker = Worker()
    thread = worker.submit(threading.current_thread).result()
    del worker
    thread.join(10)
    assert not thread.is_alive()
