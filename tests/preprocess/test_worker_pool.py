import contextlib
import math
import operator
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trackbed.errors import TrackbedError
from trackbed.preprocess.worker_pool import map_in_order

BUSY_PARENT = """
import operator, time
from trackbed.preprocess.worker_pool import map_in_order
from multiprocessing import active_children
results = map_in_order(time.sleep, [0.0, 0.0] + [60.0] * 4, workers=2)
next(results), next(results)
print(*[child.pid for child in active_children()], flush=True)
next(results)
"""


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(pids, seconds=5.0):
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [pid for pid in pids if is_alive(pid)]


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_jobs(workers):
    jobs = [0.2, 0.0, 0.1, 0.0, 0.0]
    assert list(map_in_order(operator.neg, jobs, workers=workers)) == [-0.2, 0.0, -0.1, 0.0, 0.0]


def test_a_slow_first_job_does_not_change_the_order():
    jobs = [0.3, *[0.0] * 20]
    assert list(map_in_order(time.sleep, jobs, workers=2)) == [None] * 21


def test_without_jobs_there_are_no_results():
    assert list(map_in_order(operator.neg, [], workers=2)) == []


def test_results_larger_than_a_pipe_come_through():
    assert [len(result) for result in map_in_order(bytes, [5_000_000] * 3, workers=2)] == [5_000_000] * 3


def test_an_error_in_a_job_is_raised_here():
    results = map_in_order(math.sqrt, [4, -1, 9], workers=2)
    assert next(results) == 2
    with pytest.raises(ValueError, match=r"math domain error|expected a nonnegative input"):
        next(results)


def test_an_unexpected_error_names_its_job():
    results = map_in_order(len, ["ab", 7], workers=2)
    assert next(results) == 2
    with pytest.raises(RuntimeError, match=r"^7: TypeError: object of type 'int' has no len"):
        next(results)


def test_a_worker_that_is_killed_is_an_error_that_names_its_job():
    jobs = [signal.SIGCHLD, signal.SIGCHLD, signal.SIGKILL]
    with pytest.raises(
        TrackbedError, match=r"^9: a worker process must survive .* killed by signal 9 .* out of memory"
    ):
        list(map_in_order(signal.raise_signal, [int(job) for job in jobs], workers=2))


def test_a_worker_that_exits_is_an_error_that_names_its_job():
    with pytest.raises(TrackbedError, match=r"^3: a worker process must survive this job, found it ended with exit"):
        list(map_in_order(os._exit, [3, 3], workers=2))


def test_workers_end_with_the_iterator_even_if_they_are_busy():
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    if not children.exists():
        pytest.skip("this kernel does not list the children of a process")
    others = children.read_text().split()
    results = map_in_order(time.sleep, [0.0, *[60.0] * 3], workers=2)
    next(results)
    pids = [int(pid) for pid in children.read_text().split() if pid not in others]
    start = time.monotonic()
    results.close()
    assert time.monotonic() - start < 5
    trackers = [
        pid for pid in pids if is_alive(pid) and b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert [pid for pid in pids if is_alive(pid)] == trackers


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_do_not_outlive_their_parent_however_it_ends(number):
    parent = subprocess.Popen([sys.executable, "-c", BUSY_PARENT], stdout=subprocess.PIPE, text=True)
    with parent:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.send_signal(number)
        parent.wait()
        assert wait_until_gone(workers) == []


def test_ctrl_c_raises_in_the_parent_and_ends_the_workers_quietly():
    parent = subprocess.Popen(
        [sys.executable, "-c", BUSY_PARENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with parent:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        os.killpg(parent.pid, signal.SIGINT)
        errors = parent.stderr.read()
        parent.wait()
    assert wait_until_gone(workers) == []
    assert errors.count("Traceback") == 1
    assert "KeyboardInterrupt" in errors


def test_a_worker_in_a_long_call_of_the_tokenizers_library_ends_with_its_parent(tokenizer_file):
    program = f"""
import functools
from trackbed.preprocess import open_tokenizer
from trackbed.preprocess.worker_pool import map_in_order
from multiprocessing import active_children
tokenizer = open_tokenizer({str(tokenizer_file)!r})
text = "the cat sat on the mat " * 1_000_000
results = map_in_order(tokenizer.tokenize_batch, [["a"], ["a"], [text], [text]], workers=2)
next(results), next(results)
print(*[child.pid for child in active_children()], flush=True)
next(results)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        time.sleep(0.5)
        parent.kill()
        assert wait_until_gone(workers, seconds=3) == []
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
