"""Saves or loads checkpoints under Megatron Core's module paths, on one rank.

    checkpoint_rank.py trackbed|megatron save|load TPxPP FOLDER

The same program runs on Trackbed and on Megatron Core, and checks what it loads, which either may have saved, on any
number of ranks. Rank `tp + TP * pp` has a part of each layer of a pipeline stage. Prints, as JSON, what the two must
have in common besides: how they list the checkpoints, the order of fields, and that of calls.
"""

import inspect
import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist

NUM_LAYERS = 4
NUM_ROWS = 13
COMMON = {"args": {3: [1, [2, {"x": [4.5]}], []], 0: {"lr": 1e-3}, "0": None}, "step": 7}


class Layout:
    """Place of a rank, and what it has of a model."""

    def __init__(self, tensor_parallel, pipeline_parallel, rank):
        self.size = tensor_parallel * pipeline_parallel
        self.tensor_parallel, self.tp, self.pp, self.rank = (
            tensor_parallel,
            rank % tensor_parallel,
            rank // tensor_parallel,
            rank,
        )
        per_stage = NUM_LAYERS // pipeline_parallel
        self.layers = range(self.pp * per_stage, (self.pp + 1) * per_stage)

    def cut(self, tensor, axis):
        """Part of a tensor that this rank has."""
        return tensor.chunk(self.tensor_parallel, axis)[self.tp].clone()


def numbers(*shape, first=0):
    return torch.arange(float(first), first + math.prod(shape)).view(shape)


def state_of(dc, layout, *, is_empty=False):
    """State dictionary of a rank; with zeros, and objects without data, for one to be loaded into."""

    def box(key, tensor, *offsets, **options):
        return dc.ShardedTensor.from_rank_offsets(
            key, torch.zeros_like(tensor) if is_empty else tensor, *offsets, **options
        )

    tp = (layout.tp, layout.tensor_parallel)
    return {
        # On the first stage, with copies on the others.
        "embedding": box("embedding", layout.cut(numbers(8, 3), 0), (0, *tp), replica_id=(layout.pp, 0, 0)),
        "layers": {layer: layer_of(box, layout, layer, tp) for layer in layout.layers},
        "copies": {
            str(number): box(
                f"copies/{number}", torch.full((10 * number,), 0.5 + number).bfloat16(), replica_id=layout.rank
            )
            for number in range(1, 6)
        },
        "uneven": [[uneven_of(dc, layout, is_empty=is_empty)]],
        "scalar": box("scalar", torch.tensor(2.5), replica_id=layout.rank),
        "objects": [
            dc.ShardedObject("object", None if is_empty else {"place": place}, (2, 2), divmod(place, 2))
            for place in range(layout.rank, 4, layout.size)
        ],
        "local": dc.LocalNonpersistentObject(layout.rank),
        **({} if is_empty else COMMON),
    }


def layer_of(box, layout, layer, tp):
    """One layer, which is an element of the first axis of stored tensors."""
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    stage, first = (0, layer, NUM_LAYERS), 1000 * layer
    gate, up = (layout.cut(numbers(8, 3, first=first + part), 0) for part in (0, 500))
    fused = box("layers.fc1", torch.cat([gate, up]), stage, (1, *tp), prepend_axis_num=1)
    return [
        box("layers.fc2", layout.cut(numbers(3, 8, first=first), 1), stage, (2, *tp), prepend_axis_num=1),
        apply_swiglu_sharded_factory(fused, (stage,)),
        box("layers.norm", numbers(5, first=first).long(), stage, replica_id=(0, layout.tp, 0), prepend_axis_num=1),
    ]


def uneven_of(dc, layout, *, is_empty):
    """A shard of a tensor that is cut in parts of different sizes."""
    start, stop = (NUM_ROWS * number // layout.size for number in (layout.rank, layout.rank + 1))
    data = numbers(NUM_ROWS, 2)[start:stop].clone()
    places = (tuple(data.shape), (NUM_ROWS, 2), (start, 0), None)
    return dc.ShardedTensor("uneven", torch.zeros_like(data) if is_empty else data, data.dtype, *places)


def check(loaded, dc, layout):
    """Compares what was loaded with what was saved."""
    wanted = state_of(dc, layout)
    loaded.pop("content_metadata", None)
    assert loaded.keys() == wanted.keys(), loaded.keys()
    compare(loaded, wanted, "")


def compare(found, wanted, path):
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), (path, found)
        for key, value in wanted.items():
            compare(found[key], value, f"{path}/{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), (path, found)
        for number, value in enumerate(wanted):
            compare(found[number], value, f"{path}/{number}")
    elif isinstance(getattr(wanted, "data", None), torch.Tensor):
        assert found.dtype == wanted.data.dtype, path
        assert torch.equal(found, wanted.data), (path, found, wanted.data)
    else:
        assert found == getattr(wanted, "data", getattr(wanted, "obj", wanted)), (path, found)


def listing_of(entries):
    """Descriptions of the entries of a checkpoint."""
    names = ("key", "local_shape", "global_shape", "global_offset", "axis_fragmentations", "replica_id", "dtype")
    names += ("prepend_axis_num", "allow_shape_mismatch", "flattened_range", "has_regular_grid")
    return sorted(
        [name, type(entry).__name__, *(repr(getattr(entry, field, None)) for field in names), entry.data is None]
        for name, entry in entries.items()
    )


def order_of_calls(request_type):
    """Fields of a request, and the order in which it calls its functions."""
    calls = []
    request = request_type(
        lambda *arguments, **options: calls.append(["write", *arguments, options]),
        (1, 2, 3),
        [lambda: calls.append("first")],
        {"option": 4},
        lambda: calls.append("preload") or "loaded",
    )
    request.add_finalize_fn(lambda: calls.append("second"))
    frozen = request.freeze()
    try:
        frozen.add_finalize_fn(print)
    except RuntimeError:
        calls.append("refused")
    request.add_finalize_fn(lambda: calls.append("third"))
    frozen.execute_sync()
    return [list(request_type._fields), repr(request_type._field_defaults), request.is_frozen, frozen.is_frozen, calls]


def save_all(dc, fully_parallel, layout, folder, group):
    """Saves the checkpoints of a program."""
    strategy = dc.serialization.get_default_save_sharded_strategy
    folders = {name: folder / name for name in ("plain", "shared", *(["grouped"] if group is not None else []))}
    if layout.rank == 0:
        for path in folders.values():
            path.mkdir()
    dist.barrier()
    dc.save(state_of(dc, layout), str(folders["plain"]), content_metadata={"version": 3})
    wrapper = fully_parallel.FullyParallelSaveStrategyWrapper(strategy())
    options = {"async_sharded_save": True}
    if "async_strategy" in inspect.signature(dc.save).parameters:  # from 0.19 on; the default needs another package
        options["async_strategy"] = "mcore"
    request = dc.save(state_of(dc, layout), str(folders["shared"]), wrapper, **options)
    was_complete = []
    request.add_finalize_fn(lambda: was_complete.append((folders["shared"] / "metadata.json").exists()))
    request.execute_sync()
    assert was_complete == [True]
    if group is not None:
        # Each group has tensors whose main replica is in the other.
        wrapper = fully_parallel.FullyParallelSaveStrategyWrapper(strategy(), group)
        dc.save(state_of(dc, layout), str(folders["grouped"]), wrapper)


def load_all(program, dc, fully_parallel, layout, folder, group):
    """Loads all checkpoints in all ways. Returns how they are listed."""
    listings = {}
    for path in sorted(folder.iterdir()):
        name = str(path)
        check(dc.load(state_of(dc, layout, is_empty=True), name), dc, layout)
        _, missing, unexpected = dc.load(state_of(dc, layout, is_empty=True), name, strict="return_all")
        assert (missing, unexpected) == (set(), set())
        # Megatron Core's gather_rounds fails with gloo.
        ways = ("broadcast", "gather_object", *(["gather_rounds"] if program == "trackbed" else []))
        for way, ranks in ((way, ranks) for way in ways for ranks in dict.fromkeys((None, group))):
            strategy = dc.serialization.get_default_load_sharded_strategy(name)
            strategy = fully_parallel.FullyParallelLoadStrategyWrapper(strategy, ranks, False, way)
            check(dc.load(state_of(dc, layout, is_empty=True), name, strategy), dc, layout)
        tensors = dc.load_tensors_metadata(name)
        # From 0.19 on, Megatron Core saves the common state as an object, which Trackbed lists in its checkpoints, too.
        entries = dc.serialization.load_sharded_metadata(name)
        entries = {key: entry for key, entry in entries.items() if entry.key != "common_state"}
        listings[path.name] = [
            listing_of(tensors),
            listing_of(entries),
            dc.load_content_metadata(name),
        ]
        found = dc.load_plain_tensors(name)
        # Megatron Core returns the common state too, which its documentation denies.
        assert {key for key, value in found.items() if isinstance(value, torch.Tensor)} == tensors.keys()
        assert torch.equal(found["uneven"], numbers(NUM_ROWS, 2))
        assert torch.equal(found["layers.fc2"], torch.stack([numbers(3, 8, first=1000 * i) for i in range(NUM_LAYERS)]))
        for layer in range(NUM_LAYERS):
            halves = [numbers(8, 3, first=1000 * layer + first) for first in (0, 500)]
            assert torch.equal(found["layers.fc1"][layer], torch.cat(halves))
    return listings


def main(program, action, shape, folder):
    """Runs one rank."""
    if program == "trackbed":
        import trackbed.megatron

        trackbed.megatron.install()
    import cuda_shim  # noqa: F401  Megatron Core names CUDA everywhere
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing.strategies import async_utils, fully_parallel

    names = (dc.save, dc.ShardedTensor, fully_parallel.FullyParallelSaveStrategyWrapper, async_utils.AsyncRequest)
    for function in names:
        assert function.__module__.partition(".")[0] == program, function
    dist.init_process_group("gloo")
    layout = Layout(*map(int, shape.split("x")), dist.get_rank())
    assert layout.size == dist.get_world_size()
    group = None
    if layout.size == 4:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = groups[layout.rank // 2]
    found = None
    if action == "save":
        save_all(dc, fully_parallel, layout, folder, group)
    else:
        found = load_all(program, dc, fully_parallel, layout, folder, group)
    fields = fully_parallel.ShardDistribution
    result = [found, order_of_calls(async_utils.AsyncRequest), fields._fields, repr(fields._field_defaults)]
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":  # Megatron Core starts processes that import this file
    main(*sys.argv[1:4], Path(sys.argv[4]))
