"""One rank of a test with real processes: `rank.py HOW MODE WHO TIMEOUT`. Writes its result as lines of JSON.

HOW is the source of its group: "environment"; or "torch", a process group over gloo; or "subgroup", a part of that.
In the middle of a step, rank WHO fails in the way of MODE. With " and child" at the end of HOW, a child of the group
does the same at the same time, on a thread, and its result is reported as "child".
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from trackbed.errors import CacheError, CollectiveError


def make_group(how, timeout):
    if how == "environment":
        from trackbed.comm.launch import group_from_environment

        return group_from_environment(timeout)
    import torch.distributed as dist

    from trackbed.comm.torch_group import TorchGroup, current_group

    dist.init_process_group("gloo")
    if how == "subgroup":
        # Ranks 0 and 2 of four, and 1 and 3, in the other order.
        pairs = [dist.new_group([0, 2]), dist.new_group([3, 1])]
        return TorchGroup(pairs[dist.get_rank() % 2], timeout_seconds=timeout)
    assert current_group() is current_group()
    return TorchGroup(timeout_seconds=timeout)


def misbehave(mode):
    if mode == "raise":
        raise CacheError("/x/y: must be whole, but is not")
    if mode == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if mode == "disconnect and die":
        disconnect()
        time.sleep(0.3)
    if mode in ("kill", "disconnect and die"):
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if mode == "hang":
        time.sleep(60)


def disconnect():
    """Ends all connections, as the system does for a process that is killed, a little before it tells of its end."""
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def work(group, mode, who, report):
    gathered = group.all_gather(os.getpid())
    report(pids=gathered)
    with group.guarded("building the indices") as step:
        began = time.monotonic()
        if mode == "interrupt while waiting" and group.rank == who:
            report(failed=time.time() + 0.2)
            threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
            return
        while time.monotonic() - began < 0.5 or mode == "raise":
            time.sleep(0.02)
            step.poll(0)
            if group.rank == who and time.monotonic() - began > 0.3:
                report(failed=time.time())
                misbehave(mode)
    group.barrier()


def attempt(group, mode, who, report):
    try:
        work(group, mode, who, report)
    except CollectiveError as error:
        report(raised=str(error), at=time.time(), cause=repr(error.__cause__))
    except KeyboardInterrupt:
        report(raised="KeyboardInterrupt", at=time.time(), cause="None")
    else:
        report(raised=None)


def report(**found):
    print(json.dumps(found), flush=True)


def main():
    how, mode, who, timeout = sys.argv[1:]
    # A process that is started in the background ignores SIGINT by default.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    group = make_group(how.removesuffix(" and child"), float(timeout))
    report(rank=group.rank, size=group.size)
    threads, reports = [], {}
    if how.endswith(" and child"):

        def report_of_child(**found):
            reports.update(found)
            if "failed" in found:
                report(**found)  # the process may be about to die

        threads.append(threading.Thread(target=attempt, args=(group.child("side"), mode, int(who), report_of_child)))
    for thread in threads:
        thread.start()
    attempt(group, mode, int(who), report)
    for thread in threads:
        thread.join()
        report(child=reports)


if __name__ == "__main__":
    main()
