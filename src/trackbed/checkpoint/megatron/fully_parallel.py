"""Wrappers that share the work of a strategy among ranks with copies. Names are Megatron Core 0.16.1's."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from trackbed.checkpoint.exchange import Exchange, parse_exchange
from trackbed.checkpoint.mapping import ShardedObject, ShardedTensor, is_main_replica
from trackbed.checkpoint.meeting import meet, meet_among
from trackbed.checkpoint.megatron.async_requests import AsyncRequest
from trackbed.checkpoint.megatron.distribution import (
    ShardDistribution,
    as_group,
    determine_main_replica_uniform_distribution,
)
from trackbed.checkpoint.megatron.entries import ShardId, object_id, shard_id
from trackbed.checkpoint.megatron.errors import DistributedCheckpointError
from trackbed.checkpoint.megatron.exchange import exchange_by_distribution, exchange_loaded_objects_gather_object
from trackbed.checkpoint.megatron.strategies import TorchDistLoadShardedStrategy
from trackbed.checkpoint.megatron.strategy_base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
)
from trackbed.checkpoint.table import has_elements
from trackbed.checkpoint.tree import Tree, dict_list_map_inplace, extract_matching_values, merge, nested_values
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.plural import number_of

__all__ = [
    "FullyParallelLoadStrategyWrapper",
    "FullyParallelSaveStrategyWrapper",
    "choose_exchange",
    "defer_loading_sharded_items",
    "distribute_main_replicas_with_precomputed_distribution",
    "fill_in_deferred_sharded_items",
    "mark_replicas",
]

T = TypeVar("T", ShardedTensor, ShardedObject)

_chosen_exchange: Final[list[Exchange | None]] = [None]


def choose_exchange(exchange: Exchange | None) -> None:
    """Has all wrappers of this process load in Trackbed's own way.

    Args:
        exchange: see `Exchange`; None for what each wrapper's `exchange_algo` says.

    Raises:
        ArgumentError: it is unknown.
    """
    _chosen_exchange[0] = None if exchange is None else parse_exchange(exchange)


class FullyParallelSaveStrategyWrapper(AsyncSaveShardedStrategy):
    """Has the ranks of a process group share the save of tensors of which they have copies.

    Only descriptions are exchanged. The wrapped strategy saves what has replica id 0, which the wrapper sets to 0 on
    the rank that is to save, and to 1 on the others.

    Args:
        strategy: strategy.
        parallelization_group: process group; by default all ranks.
        do_cache_distribution: True to use the first distribution again, if the state always has the same structure.
        backend: name of the format; by default the strategy's, as of its version.
        version: version of the format.
    """

    def __init__(
        self,
        strategy: SaveShardedStrategy,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,  # noqa: FBT001, FBT002  Megatron Core's signature
        backend: str | None = None,
        version: int | None = None,
    ) -> None:
        super().__init__(backend or strategy.backend, version or strategy.version)
        self.base_strategy = strategy
        self.parallelization_group = as_group(parallelization_group)
        self.do_cache_distribution = do_cache_distribution
        self.cached_distribution: ShardDistribution | None = None
        self.cached_shards: set[ShardId] | None = None
        """Shards of this rank in that distribution; None before the first."""

    def async_save(
        self,
        sharded_state_dict: Any,
        checkpoint_dir: str | Path,
        async_strategy: str | None = None,  # noqa: ARG002  Megatron Core 0.19's, without effect
    ) -> AsyncRequest:
        """Collective over all ranks: distributes the save, and prepares it with the wrapped strategy.

        Raises:
            CheckpointError: a rank failed, or the strategy cannot save in the background.
        """
        if not isinstance(self.base_strategy, AsyncSaveShardedStrategy):
            msg = f"{self.base_strategy}: must be able to save in the background, but is not"
            raise CheckpointError(msg)
        with meet("save", error_type=DistributedCheckpointError):
            self.apply_saving_parallelization(sharded_state_dict)
            return self.base_strategy.async_save(sharded_state_dict, checkpoint_dir)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Collective over all ranks: distributes the save, and makes it with the wrapped strategy.

        Raises:
            CheckpointError: a rank failed.
        """
        with meet("save", error_type=DistributedCheckpointError):
            self.apply_saving_parallelization(sharded_state_dict)
            self.base_strategy.save(sharded_state_dict, checkpoint_dir)

    def apply_saving_parallelization(self, sharded_state_dict: Tree) -> None:
        """Collective over the process group: sets the replica ids of all tensors.

        Args:
            sharded_state_dict: state dictionary, whose entries are changed.
        """
        found = _distribution_of(self, sharded_state_dict, ignore_groups=False)
        distribute_main_replicas_with_precomputed_distribution(sharded_state_dict, self.parallelization_group, found)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True if the wrapped strategy saves objects."""
        return bool(self.base_strategy.can_handle_sharded_objects)


class FullyParallelLoadStrategyWrapper(LoadShardedStrategy):
    """Has the ranks of a process group share the load of tensors of which they want copies, and exchange them.

    Args:
        strategy: strategy.
        parallelization_group: process group; by default all ranks.
        do_cache_distribution: True to use the first distribution again, if the state always has the same structure.
        exchange_algo: "broadcast", "gather_rounds" or "gather_object"; see `exchange_by_distribution`.
    """

    def __init__(
        self,
        strategy: LoadShardedStrategy,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,  # noqa: FBT001, FBT002  Megatron Core's signature
        exchange_algo: str = "broadcast",
    ) -> None:
        super().__init__()
        self.base_strategy = strategy
        self.parallelization_group = as_group(parallelization_group)
        self.do_cache_distribution = do_cache_distribution
        self.exchange_algo = exchange_algo
        self.cached_distribution: ShardDistribution | None = None
        self.cached_shards: set[ShardId] | None = None
        """Shards of this rank in that distribution; None before the first."""

    def load(
        self,
        sharded_state_dict: Any,
        checkpoint_dir: str | Path,
        async_strategy: str | None = None,  # noqa: ARG002
    ) -> Any:
        """Collective over all ranks: loads a share of the tensors and objects, and receives the others.

        1. The ranks exchange what they want, and compute the same distribution.
        2. Each loads its share with the wrapped strategy.
        3. They exchange what they have loaded.

        Args:
            sharded_state_dict: tensors and objects, whose replica ids are changed.
            checkpoint_dir: folder of the checkpoint.
            async_strategy: ignored: there is one way to load.

        Returns:
            The same structure with loaded values, as the wrapped strategy alone would return it.

        Raises:
            CheckpointError: a rank failed.
        """
        if dist.get_world_size() == 1:
            return self.base_strategy.load(sharded_state_dict, checkpoint_dir)
        chosen = _chosen_exchange[0]
        if chosen is not None and isinstance(self.base_strategy, TorchDistLoadShardedStrategy):
            return self.base_strategy.load_with(sharded_state_dict, checkpoint_dir, chosen)
        with meet("load", error_type=DistributedCheckpointError):
            distribution = self.apply_loading_parallelization(sharded_state_dict)
            tensors, rest, own_tensors, other_tensors = self._defer_loading_sharded_tensors(sharded_state_dict)
            if distribution is None:  # this rank is alone in its group: it loads all, whatever the replica ids are
                distribution = ShardDistribution({}, set(), {}, {})
                own_tensors, other_tensors = own_tensors | other_tensors, {}
            objects, rest, own_objects, other_objects = self._defer_loading_sharded_objects(rest)
            if rest:
                msg = "state: must have tensors and objects alone to be loaded by a strategy, but has more"
                raise CheckpointError(msg)
            loaded_objects = self.base_strategy.load(own_objects, checkpoint_dir)
            loaded = self.base_strategy.load(own_tensors, checkpoint_dir)
            all_tensors = exchange_by_distribution(
                loaded, other_tensors, distribution, self.parallelization_group, self.exchange_algo
            )
            _require(other_tensors, all_tensors)
            all_objects = exchange_loaded_objects_gather_object(loaded_objects)
            _require(other_objects, all_objects)
            self.fill_in_deferred_sharded_tensors(tensors, all_tensors)
            self.fill_in_deferred_sharded_objects(objects, all_objects)
            return merge(merge(type(objects)(), objects), tensors)

    @property
    def stream_ckpt_dequant(self) -> bool:
        """0.19's flag of the wrapped strategy; False if it has none."""
        return bool(getattr(self.base_strategy, "stream_ckpt_dequant", False))

    @staticmethod
    def _defer_loading_sharded_objects(sharded_state_dict: Tree) -> tuple[Tree, Tree, Any, Any]:
        return defer_loading_sharded_items(sharded_state_dict, ShardedObject, object_id)

    @staticmethod
    def _defer_loading_sharded_tensors(sharded_state_dict: Tree) -> tuple[Tree, Tree, Any, Any]:
        return defer_loading_sharded_items(sharded_state_dict, ShardedTensor, shard_id)

    @staticmethod
    def fill_in_deferred_sharded_objects(sharded_state_dict: Tree, loaded_objects: Mapping[ShardId, Any]) -> None:
        """Replaces objects in a state dictionary by what was loaded."""
        fill_in_deferred_sharded_items(sharded_state_dict, loaded_objects, ShardedObject, object_id)

    @staticmethod
    def fill_in_deferred_sharded_tensors(
        sharded_state_dict: Tree, loaded_tensors: Mapping[ShardId, torch.Tensor]
    ) -> None:
        """Replaces tensors in a state dictionary by what was loaded."""
        fill_in_deferred_sharded_items(sharded_state_dict, loaded_tensors, ShardedTensor, shard_id)

    def apply_loading_parallelization(self, sharded_state_dict: Tree) -> ShardDistribution | None:
        """Collective over the process group: sets the replica ids of all tensors.

        Args:
            sharded_state_dict: state dictionary, whose entries are changed.

        Returns:
            The distribution; None for a group of one rank.
        """
        found = _distribution_of(self, sharded_state_dict, ignore_groups=True)
        distribute_main_replicas_with_precomputed_distribution(sharded_state_dict, self.parallelization_group, found)
        return found

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True if the wrapped strategy loads objects."""
        return bool(self.base_strategy.can_handle_sharded_objects)

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> Any:
        """Descriptions of tensors from the wrapped strategy."""
        return self.base_strategy.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        """Descriptions of tensors and objects from the wrapped strategy."""
        return self.base_strategy.load_sharded_metadata(checkpoint_dir)

    def check_backend_compatibility(self, loaded_version: Any) -> None:
        """Asks the wrapped strategy."""
        self.base_strategy.check_backend_compatibility(loaded_version)

    def check_version_compatibility(self, loaded_version: Any) -> None:
        """Asks the wrapped strategy."""
        self.base_strategy.check_version_compatibility(loaded_version)


def _distribution_of(
    wrapper: FullyParallelSaveStrategyWrapper | FullyParallelLoadStrategyWrapper, state: Tree, *, ignore_groups: bool
) -> ShardDistribution | None:
    """Distribution for a state: the one from before where that is wanted, if each rank has the same shards as then.

    A shard that it lacks would be lost.
    """
    entries = (entry for entry in nested_values(state) if isinstance(entry, ShardedTensor))
    own = {shard_id(entry) for entry in entries if has_elements(entry)}
    if wrapper.do_cache_distribution:
        with meet_among("distribute", wrapper.parallelization_group) as meeting:
            know = meeting.gather(bytes([own == wrapper.cached_shards]))  # all groups decide alike
        if all(map(any, know)):
            return wrapper.cached_distribution
    found = determine_main_replica_uniform_distribution(state, wrapper.parallelization_group, ignore_groups)
    if wrapper.do_cache_distribution:
        wrapper.cached_distribution, wrapper.cached_shards = found, own
    return found


def distribute_main_replicas_with_precomputed_distribution(
    sharded_state_dict: Tree, parallelization_group: Any, precomputed_distribution: ShardDistribution | None
) -> None:
    """Sets the replica id of each tensor to 0 on the rank that is to save or load it, and to 1 on all others.

    See `mark_replicas` for an example.

    Args:
        sharded_state_dict: state dictionary, whose entries are changed.
        parallelization_group: process group of the distribution; None for all ranks.
        precomputed_distribution: distribution; may be None for a group of one rank, which changes nothing.

    Raises:
        ArgumentError: there is no distribution for several ranks.
    """
    if dist.get_world_size(parallelization_group) <= 1:
        return
    if precomputed_distribution is None:
        msg = "precomputed_distribution: must be given for a group of several ranks, but is None"
        raise ArgumentError(msg)
    mark_replicas(sharded_state_dict, dist.get_rank(parallelization_group), precomputed_distribution)


def mark_replicas(state: Tree, rank: int, distribution: ShardDistribution) -> None:
    """Sets the replica ids of a rank's tensors.

    Args:
        state: state dictionary, whose entries are changed.
        rank: rank in the process group of the distribution.
        distribution: distribution.

    >>> def state_of(rank):
    ...     return {key: ShardedTensor.from_rank_offsets(key, torch.ones(2), replica_id=(0, 0, rank)) for key in "ABC"}
    >>> mains = {(key, (0,), None): rank for rank, key in enumerate("ABC")}
    >>> distribution = ShardDistribution(mains, set(mains), {}, {shard: [0, 1, 2] for shard in mains})
    >>> for rank in range(3):
    ...     state = state_of(rank)
    ...     mark_replicas(state, rank, distribution)
    ...     print(rank, {key: entry.replica_id for key, entry in state.items()})
    0 {'A': 0, 'B': 1, 'C': 1}
    1 {'A': 1, 'B': 0, 'C': 1}
    2 {'A': 1, 'B': 1, 'C': 0}
    """
    for entry in nested_values(state):
        if isinstance(entry, ShardedTensor):
            name = shard_id(entry)
            is_there = has_elements(entry) and name in distribution.shards_in_this_group
            is_own = is_there and distribution.main_rank_for_shard[name] == rank
            entry.replica_id = 0 if is_own else 1


def defer_loading_sharded_items(
    sharded_state_dict: Tree, item_type: type[T], shard_id_func: Callable[[T], ShardId]
) -> tuple[Tree, Tree, dict[ShardId, T], dict[ShardId, T]]:
    """Divides a state dictionary by the ranks that load its entries.

    Args:
        sharded_state_dict: state dictionary.
        item_type: type of entries.
        shard_id_func: returns the name of an entry.

    Returns:
        The entries of the type, in the structure of the state; all else; entries that this rank loads, by name; and
        those that others load. Tensors without elements are in neither.
    """
    items, rest = extract_matching_values(sharded_state_dict, lambda value: isinstance(value, item_type))
    own: dict[ShardId, T] = {}
    others: dict[ShardId, T] = {}
    for item in filter(has_elements, nested_values(items)):
        (own if is_main_replica(item.replica_id) else others)[shard_id_func(item)] = item
    return items, rest, own, others


def fill_in_deferred_sharded_items(
    sharded_state_dict: Tree,
    loaded_items: Mapping[ShardId, Any],
    item_type: type[T],
    shard_id_func: Callable[[T], ShardId],
) -> None:
    """Replaces entries of a type in a state dictionary by loaded values.

    Raises:
        CheckpointError: there is no value for one.
    """

    def fill(value: Any) -> Any:
        if not isinstance(value, item_type):
            return value
        if isinstance(value, ShardedTensor) and not has_elements(value):
            value.init_data("cpu")
            return value.data
        name = shard_id_func(value)
        if name not in loaded_items:
            msg = f"{name[0]}: must have been loaded by a rank, but was not"
            raise CheckpointError(msg)
        return loaded_items[name]

    dict_list_map_inplace(fill, sharded_state_dict)


def _require(wanted: Mapping[ShardId, Any], found: Mapping[ShardId, Any]) -> None:
    """Checks that everything is there.

    Raises:
        CheckpointError: it is not.
    """
    missing = [name for name in wanted if name not in found]
    if missing:
        more = number_of(len(missing) - 1, "other")
        msg = f"{missing[0][0]}: must have been loaded by a rank, but was not, like {more}"
        raise CheckpointError(msg)
