"""One rank of a test with real processes: `failing_rank.py TRIALS TIMEOUT`. Writes its results as lines of JSON.

TRIALS is a list in JSON of [kind of failure, rank that fails, collectives]. Each trial trains a model in a process
group of its own; the rank fails in the fourth step, or at the start.
"""

import datetime as dt
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from trackbed.megatron import DistributedDataParallel, DistributedDataParallelConfig

WIDTH, STEPS, FAILS_IN = 40, 5, 3


class Boom(Exception):
    pass


def raise_boom(*_):
    raise Boom("the original message")


def new_model(layers=6):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


def train(kind, is_failing, collectives, group, note, started):
    model = new_model(5 if is_failing and kind == "another model" else 6)
    config = DistributedDataParallelConfig(
        bucket_size=5000 if is_failing and kind == "other options" else 3000,
        overlap_grad_reduce=True,
        use_distributed_optimizer=True,
        check_for_nan_in_grad=True,
        collectives=collectives,
    )
    if kind in ("another model", "other options"):
        note()
    wrapper = DistributedDataParallel(None, config, model, process_group=group)
    with wrapper.guarded():
        for step in range(STEPS):
            fails = is_failing and step == FAILS_IN
            if fails and kind == "one step less":
                note()
                break
            if step == FAILS_IN:
                started.append(time.time())
            wrapper.zero_grad_buffer()
            if fails:
                note()
                if kind == "exception":
                    raise_boom()
                if kind.startswith("kill"):
                    os.kill(os.getpid(), signal.SIGKILL)
                if kind == "hang":
                    time.sleep(60)
                if kind == "exception in backward":
                    model[2].weight.register_hook(raise_boom)
            if kind == "kill, which NCCL reports" and step == FAILS_IN:
                time.sleep(0.1)
                raise dist.DistBackendError("NCCL error: remote process exited or there was a network error")
            x = torch.ones(4, WIDTH)
            y = model[3:](x) if fails and kind == "missing gradient" else wrapper(x)
            if fails and kind in ("nan", "inf"):
                y = y * float(kind)
            if fails and kind == "one backward too many":
                y.sum().backward(retain_graph=True)
            y.sum().backward()
            if fails and kind == "out of order":
                wrapper.finish_grad_sync()
            wrapper.finish_grad_sync()
            wrapper.start_param_sync()


def main():
    trials, timeout = json.loads(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=timeout))
    for number, (kind, who, collectives) in enumerate(trials):
        group = dist.new_group(timeout=dt.timedelta(seconds=timeout))
        noted, started = [], []

        def note(noted=noted):
            noted.append(time.time())

        result = {"trial": number, "error": None}
        try:
            train(kind, dist.get_rank() == who, collectives, group, note, started)
        except Exception as error:
            result.update(error=type(error).__name__, text=str(error), cause=repr(error.__cause__))
        print(json.dumps({**result, "started": started, "failed": noted, "raised": time.time()}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # gloo's operations that are left would end the process with an error


if __name__ == "__main__":
    main()
