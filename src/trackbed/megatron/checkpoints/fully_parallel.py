"""Wrappers that share the work of a strategy among ranks with copies. Names are Megatron Core 0.16.1's."""

import logging
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from trackbed.checkpoint.plan.exchange import Exchange, parse_exchange
from trackbed.checkpoint.plan.shard_table import has_elements
from trackbed.checkpoint.ranks import Meeting, meet, meet_among
from trackbed.checkpoint.state.sharded_object import ShardedObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor, is_main_replica
from trackbed.checkpoint.state.tree import Tree, extract_matching_values, merge, nested_values
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.megatron.checkpoints.async_requests import AsyncRequest
from trackbed.megatron.checkpoints.checkpoint_error import DistributedCheckpointError
from trackbed.megatron.checkpoints.entries import ShardId, dict_list_map_inplace, object_id, shard_id
from trackbed.megatron.checkpoints.shard_exchange import (
    ShardDistribution,
    as_group,
    determine_main_replica_uniform_distribution,
    exchange_by_distribution,
    exchange_function,
    exchange_loaded_objects_gather_object,
    num_ranks_of,
)
from trackbed.megatron.checkpoints.strategies import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from trackbed.megatron.checkpoints.strictness import check_main_replicas
from trackbed.plural import number_of

logger = logging.getLogger(__name__)

T = TypeVar("T", ShardedTensor, ShardedObject)

_Box = tuple[ShardId, tuple[int, ...]]
"""Name and shape of a box."""

_chosen_exchange: Final[list[Exchange | None]] = [None]


def choose_exchange(exchange: Exchange | None) -> None:
    """Has all wrappers of this process load in Trackbed's own way.

    Args:
        exchange: see `Exchange`; None for what each wrapper's `exchange_algo` says.
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
        do_cache_distribution: bool = False,
        backend: str | None = None,
        version: int | None = None,
    ) -> None:
        super().__init__(backend or strategy.backend, version or strategy.version)
        self.base_strategy = strategy
        self.parallelization_group = as_group(parallelization_group)
        self.do_cache_distribution = do_cache_distribution
        self.cached_distribution: ShardDistribution | None = None
        self.cached_shards: set[_Box] | None = None
        """Boxes of this rank in that distribution; None before the first."""

    def async_save(
        self,
        sharded_state_dict: Any,
        checkpoint_dir: str | Path,
        async_strategy: str | None = None,
    ) -> AsyncRequest:
        """Collective over all ranks: distributes the save, and prepares it with the wrapped strategy.

        Raises:
            CheckpointError: a rank failed, or the strategy cannot save in the background.
        """
        if not isinstance(self.base_strategy, AsyncSaveShardedStrategy):
            raise CheckpointError(f"{self.base_strategy}: must be able to save in the background, but is not")
        with meet("save", error_type=DistributedCheckpointError):
            self._distribute(sharded_state_dict, checks=not self._base_checks())
            return self.base_strategy.async_save(sharded_state_dict, checkpoint_dir)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """Collective over all ranks: distributes the save, and makes it with the wrapped strategy.

        Returns:
            What the wrapped strategy returns.

        Raises:
            CheckpointError: a rank failed. Where the strategy failed on this rank, the error is of its class too.
        """
        with meet("save", error_type=DistributedCheckpointError):
            self._distribute(sharded_state_dict, checks=not self._base_checks())
            result: Any = self.base_strategy.save(sharded_state_dict, checkpoint_dir)
            return result

    def apply_saving_parallelization(self, sharded_state_dict: Tree) -> None:
        """Collective over all ranks, but where a distribution is used again: sets the replica ids of all tensors.

        Args:
            sharded_state_dict: state dictionary, whose entries are changed.

        Raises:
            CheckpointError: a rank has a copy of something of which no rank of any process group has a main replica; or
                a distribution is used again, and this rank has another structure than that was made for.
        """
        self._distribute(sharded_state_dict, checks=True)

    def _base_checks(self) -> bool:
        """True if the wrapped strategy checks that no copy is left out."""
        return type(self.base_strategy) is TorchDistSaveShardedStrategy

    def _distribute(self, state: Tree, *, checks: bool) -> None:
        def determine() -> ShardDistribution | None:
            with meet("distribute", error_type=DistributedCheckpointError):
                if checks:
                    check_main_replicas(state)
                return determine_main_replica_uniform_distribution(state, self.parallelization_group)

        found = _distribution_of(self, state, determine)
        distribute_main_replicas_with_precomputed_distribution(state, self.parallelization_group, found)

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
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
    ) -> None:
        super().__init__()
        self.base_strategy = strategy
        self.parallelization_group = as_group(parallelization_group)
        self.do_cache_distribution = do_cache_distribution
        self.exchange_algo = exchange_algo
        self.cached_distribution: ShardDistribution | None = None
        self.cached_shards: set[_Box] | None = None
        """Boxes of this rank in that distribution; None before the first."""

    def load(
        self,
        sharded_state_dict: Any,
        checkpoint_dir: str | Path,
        async_strategy: str | None = None,
    ) -> Any:
        """Collective over the process group: loads a share of the tensors and objects, and receives the others.

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
            CheckpointError: a rank failed. Where the strategy failed on this rank, the error is of its class too.
        """
        if num_ranks_of(None) == 1:
            return self.base_strategy.load(sharded_state_dict, checkpoint_dir)
        with meet_among("load", self.parallelization_group, error_type=DistributedCheckpointError) as meeting:
            if meeting.size == 1:
                return self.base_strategy.load(sharded_state_dict, checkpoint_dir)
            chosen = _chosen_exchange[0]
            if chosen is not None and isinstance(self.base_strategy, TorchDistLoadShardedStrategy):
                return self.base_strategy.load_with(sharded_state_dict, checkpoint_dir, chosen)
            return self._load_shares(sharded_state_dict, checkpoint_dir, meeting)

    def _load_shares(self, state: Tree, folder: str | Path, meeting: Meeting) -> Tree:
        """Collective over the ranks: loads what is this rank's to load, and exchanges it."""
        exchange_function(self.exchange_algo)  # before any rank can fail for another reason
        distribution = self.apply_loading_parallelization(state)
        tensors, rest, own_tensors, other_tensors = self._defer_loading_sharded_tensors(state)
        if distribution is None:  # this rank is alone in its group: it loads all, whatever the replica ids are
            distribution = ShardDistribution({}, set(), {}, {})
            own_tensors, other_tensors = own_tensors | other_tensors, {}
        objects, rest, own_objects, other_objects = self._defer_loading_sharded_objects(rest)
        if rest:
            raise CheckpointError("state: must have tensors and objects alone to be loaded by a strategy, but has more")
        if meeting.size < num_ranks_of(None):
            for name in _without_main_replica(own_objects, other_objects, meeting):
                own_objects[name] = other_objects.pop(name)
        loaded_objects = self.base_strategy.load(own_objects, folder)
        loaded = self.base_strategy.load(own_tensors, folder)
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
        """Collective over the process group, but where a distribution is used again: sets the tensors' replica ids.

        Args:
            sharded_state_dict: state dictionary, whose entries are changed.

        Returns:
            The distribution; None for a group of one rank.

        Raises:
            CheckpointError: a distribution is used again, and this rank has another structure than that was made for.
        """
        group = self.parallelization_group

        def determine() -> ShardDistribution | None:
            return determine_main_replica_uniform_distribution(sharded_state_dict, group, ignore_groups=True)

        found = _distribution_of(self, sharded_state_dict, determine)
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


def _without_main_replica(
    main_objects: Mapping[ShardId, Any], copied_objects: Mapping[ShardId, Any], meeting: Meeting
) -> list[ShardId]:
    """Collective over the ranks: names of objects that this rank is to load, as none of them has a main replica.

    Args:
        main_objects: objects of which this rank has the main replica.
        copied_objects: objects of which it has copies.
        meeting: the ranks, which are not all.
    """
    of_ranks = [
        pickle.loads(content) for content in meeting.gather(pickle.dumps((set(main_objects), set(copied_objects))))
    ]
    taken = {name for mains, _ in of_ranks for name in mains}
    taken |= {name for _, copies in of_ranks[: meeting.rank] for name in copies}
    return [name for name in copied_objects if name not in taken]


def _distribution_of(
    wrapper: FullyParallelSaveStrategyWrapper | FullyParallelLoadStrategyWrapper,
    state: Tree,
    determine: Callable[[], ShardDistribution | None],
) -> ShardDistribution | None:
    """Distribution for a state: the one from before, without any other rank, where that is wanted.

    Args:
        wrapper: wrapper.
        state: state of this rank.
        determine: makes a distribution with the other ranks.
    """
    if not wrapper.do_cache_distribution:
        return determine()
    entries = (entry for entry in nested_values(state) if isinstance(entry, ShardedTensor))
    own = {(shard_id(entry), tuple(entry.local_shape)) for entry in entries if has_elements(entry)}
    if wrapper.cached_shards is None:
        wrapper.cached_distribution = determine()
        wrapper.cached_shards = own
    elif own != wrapper.cached_shards:
        key = min(name[0] for name, _ in own ^ wrapper.cached_shards)
        raise DistributedCheckpointError(
            f"{key}: the structure of the state must be the same in each call with do_cache_distribution=True, but "
            "this tensor's shards are others than in the first: make a new wrapper for another structure"
        )
    else:
        logger.debug("%s: the distribution of the first call is used again", type(wrapper).__name__)
    return wrapper.cached_distribution


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
    if num_ranks_of(parallelization_group) <= 1:
        return
    if precomputed_distribution is None:
        raise ArgumentError("precomputed_distribution: must be given for a group of several ranks, but is None")
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
    """Replaces entries of a type in a state dictionary by loaded values."""

    def fill(value: Any) -> Any:
        if not isinstance(value, item_type):
            return value
        if isinstance(value, ShardedTensor) and not has_elements(value):
            value.init_data("cpu")
            return value.data
        name = shard_id_func(value)
        if name not in loaded_items:
            raise CheckpointError(f"{name[0]}: must have been loaded by a rank, but was not")
        return loaded_items[name]

    dict_list_map_inplace(fill, sharded_state_dict)


def _require(wanted: Mapping[ShardId, Any], found: Mapping[ShardId, Any]) -> None:
    """Checks that everything is there."""
    missing = [name for name in wanted if name not in found]
    if missing:
        more = number_of(len(missing) - 1, "other")
        raise CheckpointError(f"{missing[0][0]}: must have been loaded by a rank, but was not, like {more}")
