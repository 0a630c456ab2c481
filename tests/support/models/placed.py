"""A model of which each rank has a part: tensor parallelism, stacked layers, factories, stages of a pipeline.

`saved` trains it on threads, and saves it with its optimizer; `whole_tensors` says what must then be stored.
"""

import zlib

import torch
from torch import nn

import trackbed
from trackbed.comm import run_ranks

LAYERS, WIDTH = 4, 12


def halves(classes, entry_of):
    """Makes the factory of a parameter whose two halves lie in two parts of the stored tensor, as of a gated layer."""

    def build(key, tensor, replica_id, _):
        return [entry_of(key, half, number, replica_id) for number, half in enumerate(torch.chunk(tensor, 2))]

    return lambda key, data, replica_id: classes.ShardedTensorFactory(key, data, build, torch.cat, replica_id)


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.gated = nn.Linear(WIDTH, 2 * 6 // size, bias=False)
        self.down = nn.Linear(6 // size, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)


class Part(nn.Module):
    """What one rank of tensor parallelism, in one stage of a pipeline, has of a model."""

    def __init__(self, rank=0, size=1, stage=0, num_stages=1):
        super().__init__()
        self.place = rank, size, stage, num_stages
        self.scale = 0
        self.layers = nn.ModuleList([Block(size) for _ in range(LAYERS // num_stages)])
        if stage == 0:
            self.embedding = nn.Embedding(10 // size, WIDTH)
        if stage == num_stages - 1:
            self.head = nn.Linear(WIDTH, 3)

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]

    def entries(self, copy=0, classes=trackbed.checkpoint):
        """As Megatron Core's `sharded_state_dict()`: equal layers are stacked, but for their norms."""
        rank, size, stage, num_stages = self.place
        box = classes.ShardedTensor.from_rank_offsets
        own = self.state_dict(keep_vars=True)
        extra = classes.ShardedObject("extra", own.pop("_extra_state"), (1,), (0,), (stage, rank, copy))
        found = {"_extra_state": extra}
        for name, value in own.items():
            data, parts = value, name.split(".")
            if parts[0] == "embedding":
                found[name] = box(name, data, (0, rank, size), replica_id=(0, 0, copy))
            elif parts[0] == "head" or "norm" in name:
                number = int(parts[1]) + stage * LAYERS // num_stages if "norm" in name else 0
                key = name if parts[0] == "head" else f"layers.{number}.norm.{parts[-1]}"
                found[name] = box(key, data, replica_id=(0, rank, copy))
            else:
                layer = (0, int(parts[1]) + stage * LAYERS // num_stages, LAYERS)
                key = f"layers.{parts[2]}.weight"
                if "down" in name:
                    cut, more = (2, rank, size), {"replica_id": (0, 0, copy), "prepend_axis_num": 1}
                    found[name] = box(key, data, layer, cut, **more)
                else:

                    def entry_of(key, half, number, replica_id, layer=layer):
                        cut, more = (1, rank + number * size, 2 * size), {"prepend_axis_num": 1}
                        return box(key, half, layer, cut, replica_id=replica_id, **more)

                    found[name] = halves(classes, entry_of)(key, data, (0, 0, copy))
        return found


def all_places(num_tensor, num_stages):
    return [(rank, num_tensor, stage, num_stages) for stage in range(num_stages) for rank in range(num_tensor)]


def new(place, group, seed, dtype):
    model = Part(*place)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(seed + zlib.crc32(name.encode())))
    model = model.to(dtype)
    config = trackbed.DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=50)
    wrapper = trackbed.DistributedDataParallel(model, config, process_group=group)
    return wrapper, trackbed.DataParallelOptimizer(torch.optim.AdamW(wrapper.parameters(), lr=0.01 * seed), wrapper)


def states_of_ranks(place, group, dtype, reports):
    """Trains on one rank of the copies of a place, and returns the state to be saved."""
    model, optimizer = new(place, group, 1, dtype)
    model.module.scale = 7
    for step in range(2):
        optimizer.zero_grad()
        for name, parameter in model.module.named_parameters():
            is_cut = "norm" not in name and "head" not in name
            seed = zlib.crc32(name.encode()) + (place[0] if is_cut else 0) + 10 * place[2] + 100 * step + group.rank
            gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            (parameter * gradient.to(dtype)).sum().backward()
        optimizer.step()
    state = trackbed.sharded_state(model, optimizer, entries=model.module.entries(group.rank))
    reports[place, group.rank] = optimizer.full_state_dict()
    return {**state, "step": 2}


def saved(folder, num_tensor, num_stages, num_copies, dtype=torch.bfloat16):
    """Saves from tensor-parallel ranks, stages and copies. Returns full states by place."""
    reports, states = {}, []
    for place in all_places(num_tensor, num_stages):
        states += run_ranks(num_copies, lambda group, place=place: states_of_ranks(place, group, dtype, reports))
    run_ranks(len(states), lambda group: trackbed.save(states[group.rank], folder, group=group))
    return {place: state for (place, rank), state in reports.items() if rank == 0}


def whole_tensors(reports, num_tensor):
    """Oracle: each stored tensor of the optimizer, put together by hand."""
    found = {}
    for (rank, _, stage, num_stages), report in reports.items():
        for name, fields in report["state"].items():
            parts = name.split(".")
            layer = int(parts[1]) + stage * LAYERS // num_stages if parts[0] == "layers" else 0
            for field, value in fields.items():
                if field == "step":
                    continue
                start = f"optimizer.state.{'param' if field == 'main_param' else field}."
                if parts[0] == "embedding":
                    target = found.setdefault(f"{start}{name}", torch.full((10, WIDTH), torch.nan))
                    size = 10 // num_tensor
                    target[rank * size : (rank + 1) * size] = value
                elif "norm" in name:
                    found[f"{start}layers.{layer}.norm.{parts[-1]}"] = value
                elif parts[0] == "head":
                    found[f"{start}{name}"] = value
                elif "down" in name:
                    target = found.setdefault(f"{start}layers.down.weight", torch.full((LAYERS, WIDTH, 6), torch.nan))
                    size = 6 // num_tensor
                    target[layer, :, rank * size : (rank + 1) * size] = value
                else:
                    target = found.setdefault(f"{start}layers.gated.weight", torch.full((LAYERS, 12, WIDTH), torch.nan))
                    size = 6 // num_tensor
                    for number, half in enumerate(torch.chunk(value, 2)):
                        low = (number * num_tensor + rank) * size
                        target[layer, low : low + size] = half
    return found
