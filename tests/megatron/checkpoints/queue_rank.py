"""A gloo rank that saves through Megatron Core's queue of asynchronous requests: `queue_rank.py FOLDER`.

Prints what it has found.
"""

import hashlib
import json
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trackbed.checkpoint import ShardedObject, ShardedTensor
from trackbed.errors import CheckpointError
from trackbed.megatron.checkpoints import async_requests, serialization
from trackbed.megatron.checkpoints.async_requests import AsyncCallsQueue
from trackbed.megatron.checkpoints.fully_parallel import FullyParallelSaveStrategyWrapper
from trackbed.megatron.checkpoints.strategies import TorchDistSaveShardedStrategy


def state(value):
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.full((4000, 4), float(value))
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, size)),
        "copies": ShardedTensor.from_rank_offsets("copies", torch.full((9000,), float(value)), replica_id=rank),
        "object": ShardedObject("object", {"value": value}, (1,), (0,), replica_id=rank),
        "step": value,
    }


def overwrite(entries):
    for key in ("rows", "copies"):
        entries[key].data.fill_(-1.0)


def saver():
    return FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), dist.group.WORLD)


def hashes(folder):
    """Hash of each file, but those with the save's id."""
    names = sorted(path.name for path in folder.iterdir())
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in names
        if name.endswith((".distcp", ".pt", "metadata.json", ".metadata"))
    }


def loaded(folder):
    found = serialization.load(state(0.0), folder)
    values = {float(found["rows"].max()), float(found["rows"].min()), float(found["copies"].sum() / 9000)}
    return values | {found["object"]["value"], found["step"]}


def main():
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    found = {}
    gate, write = threading.Event(), async_requests.write_shards
    failing = []

    def held(*arguments, **options):
        gate.wait(20)
        if failing:
            failing.pop()
            raise OSError("the disk is gone")
        return write(*arguments, **options)

    async_requests.write_shards = held
    queue = AsyncCallsQueue(persistent=True)
    for number in range(2):
        entries = state(number)
        request = serialization.save(entries, folder / str(number), saver(), async_sharded_save=True)
        called = []

        def with_barrier(called=called):
            dist.barrier()
            called.append(1)

        request.add_finalize_fn(with_barrier)
        assert queue.schedule_async_request(request) == number
        overwrite(entries)
    found["before"] = [queue.maybe_finalize_async_calls(), queue.get_num_unfinalized_calls(), list(called)]
    found["files before"] = [path.name for path in folder.iterdir() if "partial" not in path.name]
    gate.set()
    finalized, polls = [], 0
    while queue.get_num_unfinalized_calls():
        time.sleep(0.02 * rank)  # ranks poll at different speeds
        finalized.append(queue.maybe_finalize_async_calls())
        polls += 1
    found["finalized"] = [number for numbers in finalized for number in numbers]
    found["polls"], found["called"] = polls, called
    found["values"] = [sorted(loaded(folder / str(number))) for number in range(2)]
    serialization.save(state(1), folder / "at once", saver())
    found["same files"] = hashes(folder / "at once") == hashes(folder / "1")
    if rank == 1:
        failing.append(1)
    queue.schedule_async_request(serialization.save(state(2), folder / "2", saver(), async_sharded_save=True))
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    except CheckpointError as error:
        found["error"] = str(error)
    queue.schedule_async_request(serialization.save(state(3), folder / "3", saver(), async_sharded_save=True))
    queue.close()
    found["next"] = sorted(loaded(folder / "3"))
    dist.barrier()
    found["left"] = sorted(path.name for path in folder.iterdir())
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
