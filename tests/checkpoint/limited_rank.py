"""One rank of a save, of which rank 1 may write only small files: `limited_rank.py FOLDER KIND`. Writes its error."""

import datetime as dt
import json
import os
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import trackbed
from trackbed.errors import TrackbedError


def main():
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    method = f"file://{folder}/ranks" if kind == "file" else "env://"
    dist.init_process_group("gloo", method, rank=rank, world_size=size, timeout=dt.timedelta(seconds=60))
    if rank == 1:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    shard = trackbed.ShardedTensor.from_rank_offsets("weight", torch.ones(1 << 20), (0, rank, size))
    try:
        trackbed.save({"weight": shard}, folder / "step-1")
        text = None
    except TrackbedError as error:
        text = str(error)
    dist.barrier()  # the rank that made the partial folder removes it
    print(json.dumps([text, sorted(path.name for path in folder.iterdir())]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
