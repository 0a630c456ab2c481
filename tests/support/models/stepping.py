"""A process, of a build or of any program, that is killed or stopped for a while at its n-th system call of a kind."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import ROOT

NUMBERS = itertools.count()
CALLS = ("mkdir", "linkat", "renameat2", "rename", "unlink")
"""System calls that change what other processes see."""
WAYS = ("unnamed", "named")
"""Whether files have no name until they appear, or a partial name, as on a file system that other hosts see too."""

PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from tests.support.files.small_entries import SmallKind, build_all, entry, lazy, seeds_in
from trackbed.cache import commit

folder, way, seeds = Path(sys.argv[1]), sys.argv[2], [int(seed) for seed in sys.argv[4].split(",")]
if way == "named":
    commit.is_on_this_machine = lambda _: False
kind = SmallKind()
entries = [entry(folder, seed=seed, stem=stem) for seed, stem in zip(seeds, sys.argv[5:], strict=True)]
wanted = [lazy(kind.request(one, seed)) for seed, one in zip(seeds, entries, strict=True)]
print("begins", flush=True)
build_all(wanted)
assert [seeds_in(one) for one in wanted] == [{seed} for seed in seeds]
"""


def start(folder, way, entries, *tracing):
    """Start the build of entries, seeds by stem; with the options of a tracer, under it."""
    seeds = ",".join(map(str, entries.values()))
    return start_program(PROGRAM, [str(folder), way, str(ROOT), seeds, *entries], log_of(folder), *tracing)


def log_of(folder):
    """New path for the log of a tracer."""
    return Path(f"{folder}.{next(NUMBERS)}.calls")


def start_program(program, arguments, log, *tracing):
    """Start a Python program; with the options of a tracer, under it."""
    traced = ["strace", "-f", "-o", str(log), *tracing] if tracing else []
    command = [*traced, sys.executable, "-B", "-W", "ignore", "-c", program, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    """What it printed on stderr; the process has ended."""
    _, errors = process.communicate(timeout=120)
    return errors


def steps(folder, way, entries):
    """Each call of a build that is not disturbed: its name, and its number among those of that name."""
    return steps_of(lambda *tracing: start(folder, way, entries, *tracing), CALLS)


def steps_of(start, calls):
    """Each of these calls of a program that `start` starts under a tracer: its name, and its number of that name."""
    process = start("-e", f"trace={','.join(calls)}")
    log = Path(process.args[process.args.index("-o") + 1])
    errors = finish(process)
    if "ptrace" in errors:
        pytest.skip(f"this machine does not let tests trace: {errors.splitlines()[0]}")
    assert process.returncode == 0, errors
    names = [line.split()[1].split("(")[0] for line in log.read_text().splitlines()]
    return [(call, number) for call in calls for number in range(1, names.count(call) + 1)]


def kill_at(folder, way, entries, call, number):
    """Run a build that is killed before that call."""
    kill_program_at(lambda *tracing: start(folder, way, entries, *tracing), call, number)


def kill_program_at(start, call, number):
    """Run a program that is killed before that call."""
    process = start("-e", f"trace={call}", "-e", f"inject={call}:signal=SIGKILL:when={number}")
    errors = finish(process)
    assert process.returncode == -signal.SIGKILL, errors


def fail_program_at(start, call, number, error):
    """Run a program in which that call fails. Returns what it printed on stderr."""
    process = start("-e", f"trace={call}", "-e", f"inject={call}:error={error}:when={number}")
    errors = finish(process)
    assert process.returncode != 0
    return errors


def pause_at(folder, way, entries, call, number, meanwhile):
    """Run a build that waits at that call until `meanwhile` has returned. Returns whether it came to that call."""
    process = start(folder, way, entries, "-e", f"trace={call}", "-e", f"inject={call}:signal=SIGSTOP:when={number}")
    with process:
        try:
            assert process.stdout.readline() == "begins\n"
            traced = (
                Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            )  # none if it has ended
            deadline = time.monotonic() + 60
            while traced and process.poll() is None and not _is_stopped(traced[0]):
                assert time.monotonic() < deadline
                time.sleep(0.005)
            has_come = bool(traced) and process.poll() is None
            if has_come:
                meanwhile()
                os.kill(int(traced[0]), signal.SIGCONT)
            errors = finish(process)
        except BaseException:  # the tracer waits for a stopped process for ever
            for one in (*Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split(), process.pid):
                os.kill(int(one), signal.SIGKILL)
            raise
    assert process.returncode == 0, errors
    return has_come


def _is_stopped(pid):
    """True if all threads of a process stay stopped, and are not just held by the tracer."""
    for _ in range(5):
        with contextlib.suppress(OSError):  # it has ended
            texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
            if not texts or not all(text.rpartition(")")[2].split()[0] in "Tt" for text in texts):
                return False
        time.sleep(0.004)
    return True
