"""One gloo rank of two whose checkpoints have a mirror: `mirrored_rank.py FOLDER MIRROR HOW`.

HOW is "whole", or "die" for a rank 1 that is killed while the second checkpoint is copied. Rank 0 writes a line of
JSON: the error of the copy, and seconds until it came.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from trackbed import Checkpointer, ShardedTensor
from trackbed.checkpointer import mirror as mirror_module

TIMEOUT = 10.0


def main():
    folder, mirror, how = sys.argv[1:]
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    rank, copy = dist.get_rank(), mirror_module.copy_checkpoint

    def copy_or_die(source, target, *arguments):
        if how == "die" and rank == 1 and target.name.endswith("2"):
            os.kill(os.getpid(), signal.SIGKILL)
        return copy(source, target, *arguments)

    mirror_module.copy_checkpoint = copy_or_die
    checkpointer = Checkpointer(folder, mirror=mirror)
    first = (checkpointer.latest() or 0) + 1
    for step in (first, first + 1):
        rows = ShardedTensor.from_rank_offsets("rows", torch.full((1000, 4), float(step)), (0, rank, 2))
        checkpointer.save(step, {"rows": rows, "step": step})
        checkpointer.wait()
        record, started = checkpointer.history[-1], time.monotonic()
        while record.mirrored_seconds is None and record.mirror_error is None:
            time.sleep(0.01)
    checkpointer.poll()
    if rank == 0:
        print(json.dumps([record.mirror_error, time.monotonic() - started]), flush=True)
    if how == "whole":
        checkpointer.close()
    os._exit(0)


if __name__ == "__main__":
    main()
