"""Exchange of tensors and objects that some ranks of a process group have loaded, and others want.

All functions are collective over the process group, which is None for all ranks.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from trackbed.checkpoint.ranks import Meeting, meet_among
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor
from trackbed.comm.torch import device_for
from trackbed.errors import CheckpointError
from trackbed.megatron.checkpoints.distribution import ShardDistribution
from trackbed.megatron.checkpoints.entries import ShardId

Tensors = dict[ShardId, torch.Tensor]


def is_float8tensor(tensor: torch.Tensor) -> bool:
    """True for a tensor of 8 bits of Transformer Engine."""
    return hasattr(tensor, "dequantize") and hasattr(tensor, "_quantizer")


def exchange_by_distribution(
    loaded_tensors: Tensors,
    unloaded_shards: Mapping[ShardId, ShardedTensor],
    shard_distribution: ShardDistribution,
    parallelization_group: Any = None,
    exchange_algo: str = "broadcast",
) -> Tensors:
    """Exchanges tensors.

    Args:
        loaded_tensors: those that this rank has loaded.
        unloaded_shards: those that it wants besides, with or without data to be filled.
        shard_distribution: distribution of all.
        parallelization_group: process group.
        exchange_algo: "broadcast", "gather_rounds" or "gather_object".

    Returns:
        Tensors that this rank has loaded or wants.

    Raises:
        NotImplementedError: there is no such way.
        CheckpointError: a rank failed.
    """
    exchange = exchange_function(exchange_algo)
    return exchange(loaded_tensors, unloaded_shards, shard_distribution, parallelization_group)


def exchange_function(exchange_algo: str) -> Callable[..., Tensors]:
    """Function that exchanges tensors in a way."""
    functions = {
        "broadcast": exchange_loaded_tensors_broadcast,
        "gather_object": exchange_loaded_tensors_gather_object,
        "gather_rounds": exchange_loaded_tensors_gather_rounds,
    }
    if exchange_algo not in functions:
        raise NotImplementedError(f"exchange_algo: must be one of {', '.join(functions)}, found {exchange_algo!r}")
    return functions[exchange_algo]


@torch.no_grad()
def exchange_loaded_tensors_broadcast(
    loaded_tensors: Tensors,
    unloaded_shards: Mapping[ShardId, ShardedTensor],
    shard_distribution: ShardDistribution,
    parallelization_group: Any = None,
) -> Tensors:
    """Exchanges tensors by one broadcast each. See `exchange_by_distribution`."""
    found = dict(loaded_tensors)
    rank, device = dist.get_rank(parallelization_group), device_for(parallelization_group)
    with _series_of_collectives(parallelization_group) as meeting:
        for name, source in _exchanged(shard_distribution):
            if rank == source:
                tensor = _plain(found[name])
                found[name] = tensor
                wanted_on = tensor.device
                tensor = tensor.to(device)
            else:
                tensor, original = get_empty_tensor_for_exchange(
                    name, unloaded_shards, shard_distribution.shard_to_metadata, found, device
                )
                wanted_on = device if original is None else original
            sent = tensor if tensor.is_contiguous() else tensor.contiguous()
            meeting.wait(dist.broadcast(sent, group=parallelization_group, group_src=source, async_op=True))
            if sent is not tensor and rank != source:
                tensor.copy_(sent)
            if rank != source and name in found:
                _put(found, name, tensor, unloaded_shards[name], wanted_on)
    return found


@torch.no_grad()
def exchange_loaded_tensors_gather_rounds(
    loaded_tensors: Tensors,
    unloaded_shards: Mapping[ShardId, ShardedTensor],
    shard_distribution: ShardDistribution,
    parallelization_group: Any = None,
) -> Tensors:
    """Exchanges tensors by an all-gather for one tensor of each rank at a time. See `exchange_by_distribution`.

    Tensors of a round are padded to one size, which backends such as gloo need.
    """
    found = dict(loaded_tensors)
    rank, device = dist.get_rank(parallelization_group), device_for(parallelization_group)
    size = dist.get_world_size(parallelization_group)
    described = shard_distribution.shard_to_metadata
    with _series_of_collectives(parallelization_group) as meeting:
        for dtype in sorted({entry.dtype for entry in described.values()}, key=str):
            names_of: list[list[ShardId]] = [[] for _ in range(size)]
            for name, source in _exchanged(shard_distribution):
                if described[name].dtype == dtype:
                    names_of[source].append(name)
            for names in zip_longest(*names_of):
                counts = [0 if name is None else torch.Size(described[name].local_shape).numel() for name in names]
                buffers = [torch.empty(max(counts), dtype=dtype, device=device) for _ in names]
                own = names[rank]
                if own is not None:
                    found[own] = _plain(found[own])
                    buffers[rank][: counts[rank]] = found[own].reshape(-1).to(device)
                meeting.wait(
                    dist.all_gather(buffers, buffers[rank].clone(), group=parallelization_group, async_op=True)
                )
                for source, (name, count) in enumerate(zip(names, counts, strict=True)):
                    if name is not None and source != rank and name in unloaded_shards:
                        entry = unloaded_shards[name]
                        entry.init_data(device)
                        part = buffers[source][:count].view(tuple(entry.local_shape))
                        _put(found, name, part, entry, _data_of(entry).device)
    return found


def exchange_loaded_tensors_gather_object(
    loaded_tensors: Tensors,
    unloaded_shards: Mapping[ShardId, ShardedTensor],
    shard_distribution: ShardDistribution,
    parallelization_group: Any = None,
) -> Tensors:
    """Exchanges tensors by an all-gather of pickles, which takes the memory of all tensors on every rank."""
    return _gather_disjoint(loaded_tensors, parallelization_group)


def exchange_loaded_objects_gather_object(loaded_objects: dict[ShardId, Any]) -> dict[ShardId, Any]:
    """Collective over all ranks: returns the objects that they have loaded.

    Raises:
        CheckpointError: two ranks have loaded the same one.
    """
    return _gather_disjoint(loaded_objects, None)


@contextmanager
def _series_of_collectives(group: Any) -> Iterator[Meeting]:
    """Has all ranks begin and end a series of collectives together.

    A rank that fails afterwards keeps no other one from taking part in all of them, so that the next save or load finds
    the process group as it was.
    """
    with meet_among("load", group) as meeting:
        meeting.group.barrier()
        yield meeting
        meeting.group.barrier()


def _gather_disjoint(own: dict[ShardId, Any], group: Any) -> dict[ShardId, Any]:
    with meet_among("load", group) as meeting:
        contents = meeting.gather(pickle.dumps(own), group)
    found: dict[ShardId, Any] = {}
    for rank, loaded in enumerate(map(pickle.loads, contents)):
        twice = found.keys() & loaded.keys()
        if twice:
            raise CheckpointError(
                f"Duplicate shard ids loaded by different ranks: {sorted(twice)[0]}, by rank {rank} and one before it"
            )
        found |= loaded
    return found


def get_empty_tensor_for_exchange(
    name: ShardId,
    needed_shards: Mapping[ShardId, ShardedTensor],
    unneeded_shards: Mapping[ShardId, ShardedTensor],
    loaded_tensors: Tensors,
    device: "torch.device | str" = "cpu",
) -> tuple[torch.Tensor, torch.device | None]:
    """Returns a tensor to be filled, and the device where the state has it; None if this rank does not need it.

    Args:
        name: name of the shard.
        needed_shards: shards that this rank needs.
        unneeded_shards: descriptions of all.
        loaded_tensors: tensors by name, to which one that is needed is added.
        device: device of the exchange.
    """
    entry = needed_shards.get(name)
    if entry is None:
        described = unneeded_shards[name]
        return torch.empty(tuple(described.local_shape), dtype=described.dtype, device=device), None
    entry.init_data(device)
    tensor = _data_of(entry)
    place = tensor.device
    if place.type != torch.device(device).type:
        tensor = torch.empty_like(tensor, device=device)
    loaded_tensors[name] = tensor
    return tensor, place


def _data_of(entry: ShardedTensor) -> torch.Tensor:
    """Data of an entry that has some."""
    if entry.data is None:
        raise CheckpointError(f"{entry.key}: must have data, but has none")
    return entry.data


def _put(found: Tensors, name: ShardId, tensor: torch.Tensor, entry: ShardedTensor, device: Any) -> None:
    """Adds a tensor that has arrived: in the data of its entry, where that has the type of the tensor."""
    data = _data_of(entry)
    if data is tensor:
        found[name] = tensor
    elif data.dtype == tensor.dtype and not is_float8tensor(data):
        data.copy_(tensor)
        found[name] = data
    else:
        found[name] = tensor.to(device)


def _exchanged(distribution: ShardDistribution) -> Iterator[tuple[ShardId, int]]:
    """Yields shards that several ranks want, and the rank in the group that has each, in order."""
    for name, source in distribution.main_rank_for_shard.items():
        ranks = distribution.all_ranks_for_shard[name]
        if len(ranks) > 1:
            yield name, source
        elif ranks[0] != source:
            raise CheckpointError(
                f"{name[0]}: the only rank that wants it, {ranks[0]}, must load it, but rank {source} does"
            )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of 8 bits of Transformer Engine in its nominal type; another one as it is."""
    return tensor.dequantize() if is_float8tensor(tensor) else tensor
