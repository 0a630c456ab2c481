"""Choice of the rank that saves or loads each shard that several have, and exchange of what was loaded.

The choice is Megatron Core's, to the order of the keys.

All functions are collective over the process group, which is None for all ranks.
"""

import heapq
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from trackbed.checkpoint.plan.shard_table import has_elements
from trackbed.checkpoint.ranks import Meeting, meet_among
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor, is_main_replica
from trackbed.checkpoint.state.tree import Tree, nested_values
from trackbed.comm.torch_group import device_for
from trackbed.errors import CheckpointError
from trackbed.megatron.checkpoints.entries import ShardId, shard_id

T = TypeVar("T")


class ShardDistribution(NamedTuple):
    """Shards of the ranks of a process group."""

    main_rank_for_shard: dict[ShardId, int]
    """Rank in the group that saves or loads each shard."""
    shards_in_this_group: set[ShardId]
    """Shards that are saved or loaded by the group."""
    shard_to_metadata: dict[ShardId, ShardedTensor]
    """A description of each shard, without data."""
    all_ranks_for_shard: dict[ShardId, list[int]]
    """Ranks in the group that have each shard."""


def shard_size(sh_ten: ShardedTensor) -> int:
    """Number of bytes of a shard."""
    return prod(sh_ten.local_shape) * sh_ten.dtype.itemsize


def distribute_shards_to_ranks(
    shard_to_ranks: Mapping[T, Iterable[int]],
    shard_to_size: Mapping[T, int],
    num_ranks: int,
    cross_parallelization_group_loads: Iterable[T] = (),
) -> dict[T, int]:
    """Gives each shard to one of the ranks that have it, such that all have about the same number of bytes.

    Shards are taken in this order: those with a main replica in the group first, then those that fewer ranks have, then
    larger ones, then by their names. Each goes to the rank with the fewest bytes so far, the first of several.

    Args:
        shard_to_ranks: ranks that have each shard.
        shard_to_size: bytes of each shard.
        num_ranks: number of ranks.
        cross_parallelization_group_loads: shards without a main replica in the group.

    Returns:
        Rank of each shard, in the order in which they were taken.
    """
    ranks_of = {shard: tuple(ranks) for shard, ranks in shard_to_ranks.items()}
    later = set(cross_parallelization_group_loads)
    order = sorted(
        ranks_of,
        key=lambda shard: (shard in later, len(ranks_of[shard]), -shard_to_size[shard], shard),
    )
    loads = [0] * num_ranks
    # Shards of the same ranks share a heap. Its entries may be out of date, but never too high.
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    rank_of = {}
    for shard in order:
        heap = heaps.setdefault(ranks_of[shard], [])
        if not heap:
            heap.extend(sorted((loads[rank], rank) for rank in set(ranks_of[shard])))
        load, rank = heap[0]
        while load != loads[rank]:
            heapq.heapreplace(heap, (loads[rank], rank))
            load, rank = heap[0]
        rank_of[shard] = rank
        loads[rank] += shard_to_size[shard]
    return rank_of


def determine_main_replica_uniform_distribution(
    sharded_state_dict: Tree,
    parallelization_group: Any,
    ignore_groups: bool = False,
) -> ShardDistribution | None:
    """Collective over a process group: distributes its shards among its ranks.

    Args:
        sharded_state_dict: state dictionary of this rank.
        parallelization_group: process group; None for all ranks.
        ignore_groups: True for all shards that ranks of the group have, as for a load; False for those of which the
            group has a main replica.

    Returns:
        The distribution; None for a group of one rank.
    """
    entries = [entry for entry in nested_values(sharded_state_dict) if isinstance(entry, ShardedTensor)]
    own = [entry.without_data() for entry in entries if has_elements(entry)]
    with meet_among("distribute", parallelization_group) as meeting:
        # Ranks that are alone in their group take part too: those of other groups wait for all.
        contents = meeting.gather(pickle.dumps(own), parallelization_group)
    if len(contents) == 1:
        return None
    of_ranks: list[list[ShardedTensor]] = [pickle.loads(content) for content in contents]
    described: dict[ShardId, ShardedTensor] = {}
    mains: dict[ShardId, ShardedTensor] = {}
    for entry in (entry for entries in of_ranks for entry in entries):
        described.setdefault(shard_id(entry), entry)
        if is_main_replica(entry.replica_id):
            mains.setdefault(shard_id(entry), entry)
    ranks_of: defaultdict[ShardId, list[int]] = defaultdict(list)
    for rank, entries in enumerate(of_ranks):
        for entry in entries:
            main = mains.get(shard_id(entry))
            # A copy of another box at the same place is not what the main replica is.
            if ignore_groups or main is None or main.local_shape == entry.local_shape:
                ranks_of[shard_id(entry)].append(rank)
    described = described if ignore_groups else described | mains
    chosen = set(described) if ignore_groups else set(mains)
    ranks_of_chosen = {name: ranks for name, ranks in ranks_of.items() if name in chosen}
    sizes = {name: shard_size(entry) for name, entry in described.items()}
    main_ranks = distribute_shards_to_ranks(ranks_of_chosen, sizes, len(of_ranks), chosen - mains.keys())
    return ShardDistribution(main_ranks, chosen, described, ranks_of_chosen)


def as_group(parallelization_group: Any) -> Any:
    """The process group, or that of all ranks for None; None for this process alone."""
    return dist.group.WORLD if parallelization_group is None and _is_initialized() else parallelization_group


def num_ranks_of(process_group: Any) -> int:
    """Number of ranks of a process group; of all for None, which is 1 where `torch.distributed` is not initialised."""
    return dist.get_world_size(process_group) if process_group is not None or _is_initialized() else 1


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


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
        loaded_tensors: tensors that this rank has loaded.
        unloaded_shards: further shards that it wants, with or without data to be filled.
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
    exchanged = dict(loaded_tensors)
    rank, device = dist.get_rank(parallelization_group), device_for(parallelization_group)
    with _series_of_collectives(parallelization_group) as meeting:
        for name, source in _exchanged(shard_distribution):
            if rank == source:
                tensor = _plain(exchanged[name])
                exchanged[name] = tensor
                wanted_on = tensor.device
                tensor = tensor.to(device)
            else:
                tensor, original = get_empty_tensor_for_exchange(
                    name, unloaded_shards, shard_distribution.shard_to_metadata, exchanged, device
                )
                wanted_on = device if original is None else original
            sent = tensor if tensor.is_contiguous() else tensor.contiguous()
            meeting.wait(dist.broadcast(sent, group=parallelization_group, group_src=source, async_op=True))
            if sent is not tensor and rank != source:
                tensor.copy_(sent)
            if rank != source and name in exchanged:
                _put(exchanged, name, tensor, unloaded_shards[name], wanted_on)
    return exchanged


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
    exchanged = dict(loaded_tensors)
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
                own_shard = names[rank]
                if own_shard is not None:
                    exchanged[own_shard] = _plain(exchanged[own_shard])
                    buffers[rank][: counts[rank]] = exchanged[own_shard].reshape(-1).to(device)
                meeting.wait(
                    dist.all_gather(buffers, buffers[rank].clone(), group=parallelization_group, async_op=True)
                )
                for source, (name, count) in enumerate(zip(names, counts, strict=True)):
                    if name is not None and source != rank and name in unloaded_shards:
                        entry = unloaded_shards[name]
                        entry.init_data(device)
                        part = buffers[source][:count].view(tuple(entry.local_shape))
                        _put(exchanged, name, part, entry, _data_of(entry).device)
    return exchanged


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
    gathered: dict[ShardId, Any] = {}
    for rank, loaded in enumerate(map(pickle.loads, contents)):
        twice = gathered.keys() & loaded.keys()
        if twice:
            raise CheckpointError(
                f"Duplicate shard ids loaded by different ranks: {sorted(twice)[0]}, by rank {rank} and one before it"
            )
        gathered |= loaded
    return gathered


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


def _put(exchanged: Tensors, name: ShardId, tensor: torch.Tensor, entry: ShardedTensor, device: Any) -> None:
    """Adds a tensor that has arrived: in the data of its entry, where that has the type of the tensor."""
    data = _data_of(entry)
    if data is tensor:
        exchanged[name] = tensor
    elif data.dtype == tensor.dtype and not is_float8tensor(data):
        data.copy_(tensor)
        exchanged[name] = data
    else:
        exchanged[name] = tensor.to(device)


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
