"""One of two gloo ranks, the second of which sees another file system at a path: `unseen_folder_rank.py FOLDER`."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from trackbed.checkpoint import ShardedTensor, load, save
from trackbed.errors import CheckpointError

CLONE_NEWNS = 0x20000


def refused(function, *arguments):
    try:
        function(*arguments)
    except CheckpointError as error:
        return str(error)
    return None


def main():
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    if rank == 0:
        dcp.save({"w": torch.ones(4)}, checkpoint_id=folder / "plain", no_dist=True)
    if rank == 1:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)
    dist.init_process_group("gloo")
    # Rank 1 has nothing to write or to read.
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))} if rank == 0 else {}
    print(json.dumps([refused(save, state, folder / "new"), refused(load, state, folder / "plain")]))
    if rank == 0:
        print(json.dumps(sorted(path.name for path in folder.iterdir())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
