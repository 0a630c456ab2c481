"""Threads for calls that may block."""

import threading

import pytest

from trackbed.daemon_threads import DaemonThreads, call_on_thread


@pytest.fixture
def at_the_end(monkeypatch):
    """As at the end of the interpreter, from Python 3.12 on."""

    def start(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_calls_are_made_here_where_no_thread_starts(at_the_end):
    with DaemonThreads("test", num_threads=2) as threads:
        assert threads.submit(lambda: threading.current_thread()).result(1) is threading.current_thread()
        failed = threads.submit(lambda: 1 / 0)
    assert isinstance(failed.exception(1), ZeroDivisionError)
    assert call_on_thread(lambda: 5, "test").result(1) == 5


def test_calls_are_made_by_the_threads_that_have_started_before():
    with DaemonThreads("test", num_threads=2) as threads:
        threads.submit(lambda: None).result(1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("no")))
            found = threads.submit(lambda: threading.current_thread().name)
        assert found.result(1) == "test"
