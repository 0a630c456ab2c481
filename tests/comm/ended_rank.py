"""One of several processes, one of which ends by itself. Prints what the others are told, and after how long.

`ended_rank.py WAY ENDING`: WAY is how the others wait, and ENDING how the last rank ends.
"""

import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

import trackbed
from trackbed.comm.rendezvous import Rendezvous
from trackbed.comm.torch_group import TorchGroup, current_group
from trackbed.errors import TrackbedError

TIMEOUT = 60


def end(ending):
    time.sleep(0.3)
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


def barrier(group, is_last, ending):
    if is_last:
        end(ending)
    group.barrier()


def step(group, is_last, ending):
    with group.guarded("a step") as step:
        if is_last:
            end(ending)
        while True:
            step.poll(0)
            time.sleep(0.05)


def first_collective_of_another_group(group, is_last, ending):
    """What a group of the job has found out serves one that has not met yet."""
    if is_last:
        end(ending)
    TorchGroup(dist.group.WORLD).barrier()


def gathered_before(group, is_last, ending):
    """A value that was sent counts; what comes after it does not come."""
    if not is_last:
        time.sleep(1.0)
    elif os.fork() == 0:  # the child ends the parent while that waits
        time.sleep(0.5)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    assert group.all_gather(group.rank) == list(range(group.size))
    group.barrier()


def arrived(group, is_last, ending, *, is_counted):
    """A rank ends between its arrival and its count, or as the last one between its count and the outcome."""
    if is_last:
        arrive = Rendezvous._arrive

        def arrive_and_end(rendezvous):
            if is_counted:
                time.sleep(0.3)
                arrive(rendezvous)
            else:
                rendezvous.participant.arrive(rendezvous.name, rendezvous.arrival)
            end(ending)

        Rendezvous._arrive = arrive_and_end
    group.barrier()
    group.barrier()


def save(group, is_last, ending):
    if is_last:
        end(ending)
    trackbed.save({"a": 1}, sys.argv[3])


def backward(group, is_last, ending, *, guarded=False, collectives="auto"):
    config = trackbed.DistributedDataParallelConfig(collectives=collectives, overlap_grad_reduce=True)
    model = trackbed.DistributedDataParallel(torch.nn.Linear(4, 4), config)
    for number in range(3):
        with model.guarded() if guarded else nullcontext():
            model.zero_grad()
            if is_last and number == 1:
                end(ending)
            model(torch.ones(2, 4)).sum().backward()


WAYS = {
    "barrier": barrier,
    "step": step,
    "another group": first_collective_of_another_group,
    "gathered": gathered_before,
    "arrived": lambda *arguments: arrived(*arguments, is_counted=False),
    "counted": lambda *arguments: arrived(*arguments, is_counted=True),
    "save": save,
    "backward": backward,
    "guarded backward": lambda *arguments: backward(*arguments, guarded=True),
    "torch backward": lambda *arguments: backward(*arguments, collectives="torch"),
}


IMPORTED = {"save": ["save"], "backward": ["DistributedDataParallel", "DistributedDataParallelConfig"]}


def main():
    for name in IMPORTED.get(sys.argv[1], IMPORTED["backward"] if "backward" in sys.argv[1] else ()):
        getattr(trackbed, name)  # which imports it, before the time is taken
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    group = current_group()
    group.barrier()
    is_last = group.rank == group.size - 1
    began = time.monotonic()
    try:
        WAYS[sys.argv[1]](group, is_last, sys.argv[2])
    except TrackbedError as error:
        print(json.dumps([str(error), time.monotonic() - began]), flush=True)
        time.sleep(1.0)  # another rank that looks only now would name this one, too
    os._exit(0)


if __name__ == "__main__":
    main()
