"""Saves or loads checkpoints under Megatron Core's module paths, on one rank. Prints "ok".

    checkpoint_rank.py trackbed|megatron save|load FOLDER

The same program runs on Trackbed and on Megatron Core. It saves two checkpoints, "plain" and one with the save shared
among ranks, and checks what it loads, whoever has saved it.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

NUM_LAYERS = 4


def state_of(dc, rank, size, *, is_empty=False):
    """State dictionary of a rank; with zeros, and objects without data, for one to be loaded into."""

    def data(tensor):
        return torch.zeros_like(tensor) if is_empty else tensor

    box, per_rank = dc.ShardedTensor.from_rank_offsets, NUM_LAYERS // size
    return {
        "rows": box("rows", data(torch.arange(6.0).view(2, 3) + 10 * rank), (0, rank, size)),
        "columns": box("columns", data(torch.arange(8, dtype=torch.int64).view(4, 2) + 100 * rank), (1, rank, size)),
        "copies": {
            str(number): box(
                f"copies/{number}", data(torch.full((10 * number,), 0.5 + number).bfloat16()), replica_id=rank
            )
            for number in range(1, 6)
        },
        "layers": [
            box("layers", data(torch.arange(5.0) + layer), (0, layer, NUM_LAYERS), prepend_axis_num=1)
            for layer in range(rank * per_rank, (rank + 1) * per_rank)
        ],
        "scalar": box("scalar", data(torch.tensor(2.5)), replica_id=rank),
        "object": dc.ShardedObject("object", None if is_empty else {"rank": rank}, (size,), (rank,)),
        "step": 7,
        "local": dc.LocalNonpersistentObject(rank),
    }


def check(loaded, dc, rank, size):
    """Compares what was loaded with what was saved."""
    wanted = state_of(dc, rank, size)
    for key in ("rows", "columns", "scalar"):
        assert torch.equal(loaded[key], wanted[key].data), key
    assert loaded["copies"].keys() == wanted["copies"].keys()
    for key, entry in wanted["copies"].items():
        assert torch.equal(loaded["copies"][key], entry.data), key
    for found, entry in zip(loaded["layers"], wanted["layers"], strict=True):
        assert torch.equal(found, entry.data)
    assert (loaded["object"], loaded["step"], loaded["local"]) == ({"rank": rank}, 7, rank)


def main(program, action, folder):
    """Runs one rank."""
    if program == "trackbed":
        import trackbed.megatron

        trackbed.megatron.install()
    else:
        import cuda_shim  # noqa: F401  Megatron Core names CUDA everywhere
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing.serialization import (
        get_default_load_sharded_strategy,
        get_default_save_sharded_strategy,
    )
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
        FullyParallelSaveStrategyWrapper,
    )

    for function in (dc.save, dc.ShardedTensor, FullyParallelSaveStrategyWrapper):
        assert function.__module__.partition(".")[0] == program, function
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    plain, shared = (str(folder / name) for name in ("plain", "shared"))
    if action == "save":
        if rank == 0:
            for name in (plain, shared):
                Path(name).mkdir()
        dist.barrier()
        dc.save(state_of(dc, rank, size), plain, content_metadata={"version": 3})
        dc.save(state_of(dc, rank, size), shared, FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy()))
    else:
        for name in (plain, shared):
            check(dc.load(state_of(dc, rank, size, is_empty=True), name), dc, rank, size)
            _, missing, unexpected = dc.load(state_of(dc, rank, size, is_empty=True), name, strict="return_all")
            assert (missing, unexpected) == (set(), set())
            # Megatron Core's gather_rounds fails with gloo.
            for way in ("broadcast", "gather_object", *(["gather_rounds"] if program == "trackbed" else [])):
                strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(name), None, False, way)
                check(dc.load(state_of(dc, rank, size, is_empty=True), name, strategy), dc, rank, size)
        assert dc.load_content_metadata(plain) == {"version": 3}
        tensors = dc.load_tensors_metadata(plain)
        assert {key: tuple(entry.global_shape) for key, entry in tensors.items()} == {
            "rows": (2 * size, 3),
            "columns": (4, 2 * size),
            "layers": (NUM_LAYERS, 5),
            "scalar": (),
            **{f"copies/{number}": (10 * number,) for number in range(1, 6)},
        }
        assert dc.load_plain_tensors(plain)["layers"].tolist() == [
            [layer + i for i in range(5)] for layer in range(NUM_LAYERS)
        ]
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps("ok"))


if __name__ == "__main__":  # Megatron Core starts processes that import this file
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
