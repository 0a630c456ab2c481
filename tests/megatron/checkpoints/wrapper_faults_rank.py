"""One of four gloo ranks that save and load by Megatron Core's wrappers, and of which one fails.

`wrapper_faults_rank.py KINDS`: in how many of three kinds of groups a rank fails in each phase; 1 takes them in turn.
Prints, for each case, what this rank raised, the seconds that it took, and what came of the next save and load.
"""

import json
import shutil
import sys
import tempfile
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trackbed.checkpoint import ShardedObject, ShardedTensor, ShardedTensorFactory
from trackbed.checkpoint.io.boxes import BoxReader
from trackbed.checkpoint.state.tree import nested_values
from trackbed.errors import CheckpointError
from trackbed.megatron.checkpoints import async_requests, fully_parallel, serialization, strategies

GROUPS = {"all": [[0, 1, 2, 3]], "pairs": [[0, 1], [2, 3]], "one alone": [[0, 1, 2], [3]]}
SAVE_PHASES = {
    "distribute": (fully_parallel, "determine_main_replica_uniform_distribution"),
    "mark": (fully_parallel, "mark_replicas"),
    "partial folder": (serialization, "make_partial"),
    "plan": (strategies, "agree_on_plan"),
    "write": (async_requests, "write_shards"),
    "collect": (strategies, "collect"),
}
LOAD_PHASES = {
    "distribute": (fully_parallel, "determine_main_replica_uniform_distribution"),
    "open": (strategies, "open_for_all"),
    "read": (BoxReader, "read_box"),
    "read an object": (BoxReader, "read_object"),
    "exchange": (fully_parallel, "exchange_by_distribution"),
    "exchange objects": (fully_parallel, "exchange_loaded_objects_gather_object"),
}
WAYS = ("broadcast", "gather_rounds", "gather_object")


def state_of(value, build=None):
    rank, size = dist.get_rank(), dist.get_world_size()

    def plain(key, data, replica_id, flattened_range):
        return {"part": ShardedTensor.from_rank_offsets(key, data, replica_id=replica_id)}

    return {
        "rows": ShardedTensor.from_rank_offsets("rows", torch.full((2, 3), value), (0, rank, size)),
        **{f"copy{n}": ShardedTensor.from_rank_offsets(f"copy{n}", torch.full((n + 1,), value), replica_id=rank)
           for n in range(8)},
        # Without elements, at the offset of a box that has some.
        "empty": ShardedTensor("rows", torch.zeros(0, 3), torch.float32, (0, 3), (2 * size, 3), (2 * rank, 0), None),
        "built": ShardedTensorFactory("built", torch.full((4,), value), build or plain, lambda x: x["part"], rank),
        "object": ShardedObject("object", {"value": value}, (size,), (rank,)),
        "step": value,
    }  # fmt: skip


def save(folder, group, **options):
    strategy = fully_parallel.FullyParallelSaveStrategyWrapper(
        strategies.TorchDistSaveShardedStrategy("torch_dist", 1), group
    )
    serialization.save(state_of(**options), folder, strategy)


def load(folder, group, way, **options):
    strategy = fully_parallel.FullyParallelLoadStrategyWrapper(
        strategies.TorchDistLoadShardedStrategy(), group, exchange_algo=way
    )
    return serialization.load(state_of(**options), folder, strategy)


@contextmanager
def failing(place):
    """In the block, a function fails when it is called; None for none."""
    if place is None:
        yield
        return
    owner, name = place
    function = getattr(owner, name)

    def fail(*arguments, **options):
        raise ValueError("it broke")

    setattr(owner, name, fail)
    try:
        yield
    finally:
        setattr(owner, name, function)


def cases(kinds):
    number = 0
    for kind, groups in enumerate(GROUPS):
        for action, phases in (("save", SAVE_PHASES | {"build": None}), ("load", LOAD_PHASES | {"build": None})):
            for phase, place in phases.items():
                who = 0 if phase == "mark" else (0, 3)[number % 2]  # a rank that is alone in its group marks nothing
                if (number - kind) % len(GROUPS) < kinds:
                    yield groups, action, phase, place, who, WAYS[number % 3]
                number += 1


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    found = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(found)
    folder = Path(found[0])
    own = {}
    for name, groups in GROUPS.items():
        for ranks in groups:
            group = dist.new_group(ranks)
            if rank in ranks:
                own[name] = group
    for number, (groups, action, phase, place, who, way) in enumerate(cases(int(sys.argv[1]))):
        path, group = folder / str(number), own[groups]
        save(path, group, value=1.0)

        def broken(*arguments):
            raise ValueError("it broke")

        options = {"build": broken} if phase == "build" and rank == who else {}
        dist.barrier()
        start, text = time.monotonic(), None
        with failing(place if rank == who else None):
            try:
                if action == "save":
                    save(path, group, value=2.0, **options)
                else:
                    load(path, group, way, value=0.0, **options)
            except CheckpointError as error:
                text = str(error)
        seconds = time.monotonic() - start
        after = load(path, group, way, value=0.0)
        tensors = [entry.view(-1) for entry in nested_values(after) if isinstance(entry, torch.Tensor)]
        save(path, group, value=3.0)
        last = load(path, group, way, value=0.0)
        left = [file.name for file in folder.iterdir() if "partial" in file.name] if rank == 0 else []
        print(
            json.dumps(
                {
                    "case": [groups, action, phase, who, way],
                    "who": who,
                    "text": text,
                    "seconds": seconds,
                    "values": [*torch.cat(tensors).unique().tolist(), after["step"], after["object"]["value"]],
                    "last": float(last["copy3"][0]),
                    "empty": list(last["empty"].shape),
                    "left": left,
                }
            ),
            flush=True,
        )
        dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
