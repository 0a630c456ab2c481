"""Choice of the rank that saves or loads each shard that several have: Megatron Core's, to the order of the keys."""

import heapq
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from trackbed.checkpoint.plan.table import has_elements
from trackbed.checkpoint.ranks import meet_among
from trackbed.checkpoint.state.sharded_base import is_main_replica
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor
from trackbed.checkpoint.state.tree import Tree, nested_values
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
    found = {}
    for shard in order:
        heap = heaps.setdefault(ranks_of[shard], [])
        if not heap:
            heap.extend(sorted((loads[rank], rank) for rank in set(ranks_of[shard])))
        load, rank = heap[0]
        while load != loads[rank]:
            heapq.heapreplace(heap, (loads[rank], rank))
            load, rank = heap[0]
        found[shard] = rank
        loads[rank] += shard_to_size[shard]
    return found


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
