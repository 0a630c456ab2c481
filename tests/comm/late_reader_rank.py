"""One of three processes that end after a collective, of which the last one is late to read its outcome."""

import json
import os
import time
from datetime import timedelta

import torch.distributed as dist

from trackbed.comm.rendezvous import Rendezvous
from trackbed.comm.torch_group import current_group
from trackbed.errors import CollectiveError


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    group = current_group()
    group.barrier()
    if group.rank == 2:
        read = Rendezvous._read_outcome

        def read_late(self, wait_seconds):
            time.sleep(1.0)  # the other processes end meanwhile
            return read(self, wait_seconds)

        Rendezvous._read_outcome = read_late
    if group.rank == 0:
        time.sleep(0.3)  # so that it is the last to arrive
    try:
        group.barrier()
        print(json.dumps("left"), flush=True)
    except CollectiveError as error:
        print(json.dumps(str(error)), flush=True)
    if group.rank == 0:
        dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
