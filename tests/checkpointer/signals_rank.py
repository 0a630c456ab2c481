"""A gloo rank that makes steps until the file FOLDER/end is there: `signals_rank.py FOLDER PERIOD PLACE`.

PLACE is a folder or an address for its checkpoints. It writes a line for each step at which `poll` is true. Rank 2 is
slow. Ranks wait for each other every PERIOD steps.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from trackbed import Checkpointer


def main():
    folder, period = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    draw = random.Random(rank)
    checkpointer = Checkpointer(sys.argv[3])
    checkpointer.save_on_signal(signal.SIGTERM, signal.SIGUSR1)
    print("ready", flush=True)
    step = 0
    total = torch.zeros(1)
    while True:
        step += 1
        time.sleep(draw.random() * (0.01 if rank < 2 else 0.03))
        if step % period == 0:
            total.fill_(float((folder / "end").exists()))
            dist.all_reduce(total)
        if checkpointer.poll(step):
            print(step, checkpointer.received_signal.name, flush=True)
        if total > 0:
            break
    dist.barrier()
    checkpointer.close()
    print("end", signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
