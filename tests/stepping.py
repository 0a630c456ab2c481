"""A build in a process that is killed, or stopped for a while, at its n-th system call of a kind."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TESTS = str(Path(__file__).parent)
NUMBERS = itertools.count()
CALLS = ("mkdir", "linkat", "renameat2", "rename", "unlink")
"""System calls that change what other processes see."""
WAYS = ("unnamed", "named")
"""Whether files have no name until they appear, or a partial name, as on a file system that other hosts see too."""

PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from small_entries import SmallKind, build_all, entry, lazy, seeds_in
from trackbed.cache import Request, commit

folder, way, seeds = Path(sys.argv[1]), sys.argv[2], [int(seed) for seed in sys.argv[4].split(",")]
if way == "named":
    commit.is_on_this_machine = lambda _: False
kind = SmallKind()
entries = [entry(folder, seed=seed, stem=stem) for seed, stem in zip(seeds, sys.argv[5:], strict=True)]
wanted = [lazy(Request(one, kind, seed)) for seed, one in zip(seeds, entries, strict=True)]
print("begins", flush=True)
build_all(wanted)
assert [seeds_in(one) for one in wanted] == [{seed} for seed in seeds]
"""


def start(folder, way, entries, *tracing):
    """Start the build of entries, seeds by stem; with the options of a tracer, under it."""
    traced = ["strace", "-f", "-o", f"{folder}.{next(NUMBERS)}.calls", *tracing] if tracing else []
    seeds = ",".join(map(str, entries.values()))
    command = [*traced, sys.executable, "-B", "-W", "ignore", "-c", PROGRAM, str(folder), way, TESTS, seeds, *entries]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    """What it printed on stderr; the process has ended."""
    _, errors = process.communicate(timeout=120)
    return errors


def count_calls(folder, way, entries):
    """How often a build that nobody disturbs makes each of the calls."""
    process = start(folder, way, entries, "-e", f"trace={','.join(CALLS)}")
    errors = finish(process)
    if "ptrace" in errors:
        pytest.skip(f"this machine does not let tests trace: {errors.splitlines()[0]}")
    assert process.returncode == 0, errors
    (log,) = folder.parent.glob(f"{folder.name}.*.calls")
    names = [line.split()[1].split("(")[0] for line in log.read_text().splitlines()]
    return {call: names.count(call) for call in CALLS if call in names}


def steps(folder, way, entries):
    """Each call of such a build: its name, and its number among those of that name."""
    counts = count_calls(folder, way, entries)
    return [(call, number) for call, count in counts.items() for number in range(1, count + 1)]


def kill_at(folder, way, entries, call, number):
    """Run a build that is killed before that call."""
    process = start(folder, way, entries, "-e", f"trace={call}", "-e", f"inject={call}:signal=SIGKILL:when={number}")
    errors = finish(process)
    assert process.returncode == -signal.SIGKILL, errors


def pause_at(folder, way, entries, call, number, meanwhile):
    """Run a build that waits at that call until `meanwhile` has returned. Returns whether it came to that call."""
    process = start(folder, way, entries, "-e", f"trace={call}", "-e", f"inject={call}:signal=SIGSTOP:when={number}")
    with process:
        assert process.stdout.readline() == "begins\n"
        (traced,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        deadline = time.monotonic() + 60
        while process.poll() is None and not _is_stopped(traced):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        has_come = process.poll() is None
        if has_come:
            meanwhile()
            os.kill(int(traced), signal.SIGCONT)
        errors = finish(process)
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
