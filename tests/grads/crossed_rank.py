"""One rank of a job whose ranks are at different operations: `crossed_rank.py FOLDER`. Writes a line of JSON a pair.

The environment variable `PAIRS` has pairs of operations, as JSON: rank 0 is at the first one of each, the others are at
the second.
"""

import datetime as dt
import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from tests.grads.crossing import OPERATIONS, training
from trackbed.errors import TrackbedError

TIMEOUT = dt.timedelta(seconds=60)


def main():
    folder = Path(sys.argv[1])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = dist.TCPStore(*address, size, rank == 0, timeout=TIMEOUT)
    for number, (first, second, collectives) in enumerate(json.loads(os.environ["PAIRS"])):
        store = dist.PrefixStore(f"pair-{number}", shared)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        text, began = None, 0.0
        try:
            with training(folder / f"pair-{number}", collectives=collectives) as run:
                dist.barrier()
                began = time.monotonic()
                OPERATIONS[first if rank == 0 else second](run)
        except TrackbedError as error:
            text = str(error)
        print(json.dumps([rank, text, time.monotonic() - began]), flush=True)
        dist.destroy_process_group()
    os._exit(0)  # gloo would wait for the operations that were given up


if __name__ == "__main__":
    main()
