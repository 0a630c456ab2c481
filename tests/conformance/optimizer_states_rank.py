"""States of optimizers between Megatron Core and Trackbed: `optimizer_states_rank.py FOLDER`, on two ranks.

Megatron Core's distributed optimizer trains a small GPT and saves itself in its format `fully_reshardable`, with large
buckets and with many; Trackbed loads that. Trackbed trains and saves; Megatron Core's optimizer loads that, and its
`dist_checkpointing` reads the checkpoint FOLDER/parts into tensor-parallel and stacked shards, which are written to
FOLDER. Prints what was found as JSON.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

import trackbed
from tests.conformance.train_megatron import SmallGPT, T, V
from tests.support.models.placed import Part
from trackbed.errors import CheckpointError

CLASSES = SimpleNamespace(
    ShardedTensor=ShardedTensor, ShardedTensorFactory=ShardedTensorFactory, ShardedObject=ShardedObject
)
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}


def entries_of(module):
    """Megatron Core's entries of a model that all ranks have."""
    rank = dist.get_rank()
    return {
        name: ShardedTensor.from_rank_offsets(name, value, replica_id=(0, 0, rank))
        for name, value in module.state_dict(keep_vars=True).items()
        if name != "output.weight"  # that of the embedding
    }


def new_model(seed):
    torch.manual_seed(seed)
    return SmallGPT().to(torch.bfloat16)


def megatrons(bucket_size, seed):
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=bucket_size
    )
    model = DistributedDataParallel(
        TransformerConfig(num_attention_heads=1, num_layers=1), ddp_config=config, module=new_model(seed)
    )
    options = OptimizerConfig(
        optimizer="adam",
        lr=0.01 * seed,
        weight_decay=0.1,
        clip_grad=0.5,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    return model, get_megatron_optimizer(options, [model])


def trackbeds(seed):
    model = new_model(seed)
    config = trackbed.DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=700)
    wrapper = trackbed.DistributedDataParallel(model, config)
    groups = [
        {"params": [one for one in model.parameters() if one.requires_grad and one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in model.parameters() if one.requires_grad and one.dim() <= 1], "weight_decay": 0.0},
    ]
    return wrapper, trackbed.DataParallelOptimizer(torch.optim.AdamW(groups, lr=0.01 * seed), wrapper, max_norm=0.5)


def train(model, optimizer, finish):
    batches = torch.Generator().manual_seed(2 + dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        finish[0]()
        model(torch.randint(V, (2, T + 1), generator=batches)).backward()
        finish[1]()
        optimizer.step()


def states_of_megatron(model, optimizer):
    """This rank's ranges: name, start, stop, and the tensors."""
    names = {param: name for name, param in model.module.named_parameters()}
    inner = optimizer.chained_optimizers[0] if hasattr(optimizer, "chained_optimizers") else optimizer
    found = []
    for ranges in inner.gbuf_ranges:
        for of_buckets in ranges.values():
            for of_bucket in of_buckets:
                for param, place in of_bucket["param_map"].items():
                    tensors = inner._get_main_param_and_optimizer_states(param)
                    found.append((names[param], place["param"].start, place["param"].end, tensors))
    return inner, found


def differing(ranges, states):
    """Names of the ranges that are not those of whole states."""
    return [
        (name, field)
        for name, start, stop, tensors in ranges
        for field, key in (("param", "main_param"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"))
        if not torch.equal(tensors[field].flatten(), states[name][key].flatten()[start:stop])
    ]


def from_megatron(folder, bucket_size):
    """Saved by Megatron Core, loaded by Trackbed. Returns what differs, or the error."""
    model, optimizer = megatrons(bucket_size, 1)
    train(model, optimizer, (model.zero_grad_buffer, model.finish_grad_sync))
    inner, ranges = states_of_megatron(model, optimizer)
    entries = entries_of(model.module)
    (folder).mkdir(exist_ok=True)
    state = {**entries, "optimizer": inner.sharded_state_dict(entries, metadata=METADATA)}
    dist_checkpointing.save(state, str(folder))
    dist.barrier()
    other, fresh = trackbeds(3)
    before = [parameter.clone() for parameter in other.parameters()]
    try:
        trackbed.load_sharded_state(folder, other, fresh, entries=entries_of(other.module))
    except CheckpointError as error:
        return {"error": str(error), "is_unchanged": all(map(torch.equal, before, other.parameters()))}
    states = fresh.full_state_dict()["state"]
    return {
        "buckets": sum(len(of_buckets) for one in inner.gbuf_ranges for of_buckets in one.values()),
        "differs": differing(ranges, states),
        "rates": [group["lr"] for group in fresh.param_groups],
        "steps": sorted({float(state["step"]) for state in states.values()}),
        "model": all(map(torch.equal, model.module.parameters(), other.module.parameters())),
    }


def to_megatron(folder):
    """Saved by Trackbed, loaded by Megatron Core's optimizer. Returns what differs."""
    model, optimizer = trackbeds(1)
    train(model, optimizer, (lambda: None, lambda: None))
    trackbed.save(trackbed.sharded_state(model, optimizer, entries=entries_of(model.module)), folder)
    states = optimizer.full_state_dict()["state"]
    other, fresh = megatrons(1_000_000, 3)
    train(other, fresh, (other.zero_grad_buffer, other.finish_grad_sync))  # it loads no state without one of its own
    inner, _ = states_of_megatron(other, fresh)
    entries = entries_of(other.module)
    wanted = inner.sharded_state_dict(entries, is_loading=True, metadata=METADATA)["param_state"]
    found = dist_checkpointing.load({**entries, "optimizer": {"param_state": wanted}}, str(folder))
    for own in inner.optimizer.state.values():
        own.pop("step", None)  # which torch's Adam has and Transformer Engine's, for which this was written, has not
    inner.load_parameter_state_from_fully_reshardable(found["optimizer"]["param_state"])
    _, ranges = states_of_megatron(other, fresh)
    same = all(torch.equal(found[name], value) for name, value in model.module.state_dict().items() if name in found)
    return {"differs": differing(ranges, states), "model": same}


def into_parts(folder):
    """Reads the checkpoint of a whole model into the shards of two tensor-parallel ranks, whose state it writes."""
    rank = dist.get_rank()
    entries = Part(rank, 2, 0, 1).entries(classes=CLASSES)
    del entries["_extra_state"]
    state = {}
    for name, entry in entries.items():
        state[name] = {}
        for field in ("exp_avg", "exp_avg_sq", "param"):
            more = {"key": f"optimizer.state.{field}.{entry.key}", "data": torch.zeros(entry.data.shape)}
            more |= {} if isinstance(entry, ShardedTensorFactory) else {"dtype": torch.float32}
            state[name][field] = replace(entry, **more)
    found = dist_checkpointing.load(state, str(folder / "parts"))
    states = {
        name: {"main_param" if field == "param" else field: value for field, value in found[name].items()}
        for name in state
    }
    torch.save(states, folder / f"{rank}.pt")


def main():
    import cuda_shim  # noqa: F401  importing it replaces CUDA

    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    found = {
        "large buckets": from_megatron(folder / "one", 1_000_000),
        "buckets": from_megatron(folder / "several", 2500),
        "to megatron": to_megatron(folder / "ours"),
    }
    into_parts(folder)
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
