"""Differences between state and checkpoint, and checks of all ranks. Names are Megatron Core 0.16.1's."""

import logging
import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from trackbed.checkpoint.format.config_file import maybe_load_config
from trackbed.checkpoint.plan.shard_table import gather_table, has_elements, join_tables, tabulate
from trackbed.checkpoint.plan.validate import require_main_replicas, require_valid
from trackbed.checkpoint.ranks import Meeting, meet
from trackbed.checkpoint.state.sharded_object import ShardedObject
from trackbed.checkpoint.state.sharded_tensor import ShardedBase, ShardedTensor
from trackbed.checkpoint.state.tree import Tree, diff, extract_matching_values, nested_values
from trackbed.errors import CheckpointError
from trackbed.megatron.checkpoints.strategies import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    StrategyAction,
    get_default_strategy,
)

logger = logging.getLogger(__name__)

Shard = ShardedTensor | ShardedObject


class StrictHandling(Enum):
    """Handling of keys that only one side has: unexpected ones are asked for and not stored, missing ones the reverse.

    Missing keys are found by the values that end in "all", for which the ranks exchange their keys.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: "StrictHandling") -> bool:
        """True if the keys of the checkpoint are needed."""
        return val is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: "StrictHandling") -> bool:
        """True if the keys of all ranks are needed."""
        return val.value.endswith("_all")

    @staticmethod
    def requires_returning_mismatch_keys(val: "StrictHandling") -> bool:
        """True if `load` returns the keys."""
        return val.value.startswith("return_")


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """Returns the value with a name.

    Raises:
        ValueError: there is none.
    """
    try:
        return StrictHandling(strict)
    except ValueError as error:
        names = ", ".join(value.value for value in StrictHandling)
        raise ValueError(f"strict: must be one of {names}, found {strict!r}") from error


def validate_integrity_and_strict_load(
    sharded_state_dict: Tree,
    strict: StrictHandling,
    validate_access_integrity: bool,
    local_metadata: Sequence[Shard] | None = None,
    global_metadata: Sequence[Sequence[Shard]] | None = None,
    ckpt_sharded_metadata: Mapping[str, Shard] | None = None,
) -> tuple[Tree, set[str], set[str]]:
    """Checks what is asked for, by itself and against the checkpoint.

    Args:
        sharded_state_dict: entries of this rank.
        strict: handling of differences.
        validate_access_integrity: True to check the entries of all ranks.
        local_metadata: entries of this rank, without data.
        global_metadata: entries of all ranks.
        ckpt_sharded_metadata: entries of the checkpoint.

    Returns:
        The entries without unexpected ones; missing keys, which are the same on all ranks; and unexpected keys.

    Raises:
        CheckpointError: keys differ and that is to be an error, or the entries of the ranks are not one checkpoint.
    """
    missing: set[str] = set()
    unexpected: set[str] = set()
    if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        if ckpt_sharded_metadata is None:
            raise CheckpointError("ckpt_sharded_metadata: must be given to compare keys, but is None")
        own = list(nested_values(sharded_state_dict)) if local_metadata is None else local_metadata
        others = global_metadata if StrictHandling.requires_global_app_metadata(strict) else None
        missing, unexpected = determine_missing_and_unexpected_keys(ckpt_sharded_metadata, own, others)
        sharded_state_dict = adjust_non_strict_load(sharded_state_dict, unexpected)
        if strict is StrictHandling.IGNORE_ALL:
            missing, unexpected = set(), set()
        elif not StrictHandling.requires_returning_mismatch_keys(strict):
            raises = strict in (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL)
            maybe_report_missing_and_unexpected_keys(missing, unexpected, raises)
    if validate_access_integrity:
        if global_metadata is None:
            raise CheckpointError("global_metadata: must be given to check the entries of all ranks, but is None")
        validate_sharding_integrity(global_metadata)
    return sharded_state_dict, missing, unexpected


def verify_checkpoint_and_load_strategy(
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
) -> tuple[LoadShardedStrategy, LoadCommonStrategy]:
    """Returns the strategies for a checkpoint: those that are given, or those for its format."""
    if not Path(checkpoint_dir).is_dir():
        raise CheckpointError(f"Checkpoint directory {checkpoint_dir} does not exist")
    config = maybe_load_config(checkpoint_dir)
    if config is None:
        raise CheckpointError(f"{checkpoint_dir} is not a distributed checkpoint")
    own = (
        (config.sharded_backend, config.sharded_backend_version),
        (config.common_backend, config.common_backend_version),
    )
    return (
        _chosen(sharded_strategy, StrategyAction.LOAD_SHARDED, own[0]),
        _chosen(common_strategy, StrategyAction.LOAD_COMMON, own[1]),
    )


def _chosen(strategy: Any, action: StrategyAction, stored: tuple[str, int]) -> Any:
    """Strategy that is given, by itself or by its format, or that for the stored format."""
    name = stored if strategy is None else strategy
    chosen = get_default_strategy(action, *name) if isinstance(name, tuple) else name
    chosen.check_backend_compatibility(stored[0])
    chosen.check_version_compatibility(stored[1])
    return chosen


def adjust_non_strict_load(sharded_state_dict: Tree, sharded_keys_to_remove: Collection[str]) -> Tree:
    """Returns the entries without those of some keys."""
    _, kept = extract_matching_values(
        sharded_state_dict, lambda value: isinstance(value, ShardedBase) and value.key in sharded_keys_to_remove
    )
    return kept


def determine_missing_and_unexpected_keys(
    ckpt_sharded_metadata: Mapping[str, Shard],
    local_metadata: Iterable[Shard],
    global_metadata: Iterable[Iterable[Shard]] | None = None,
) -> tuple[set[str], set[str]]:
    """Compares keys.

    Args:
        ckpt_sharded_metadata: entries of the checkpoint.
        local_metadata: entries of this rank.
        global_metadata: entries of all ranks; None not to look for missing keys.

    Returns:
        Keys that no rank asks for, and keys that this rank asks for and the checkpoint lacks.
    """
    stored = {entry.key for entry in ckpt_sharded_metadata.values()}
    unexpected = {entry.key for entry in local_metadata if has_elements(entry)} - stored
    if global_metadata is None:
        return set(), unexpected
    return stored - {entry.key for entries in global_metadata for entry in entries}, unexpected


def maybe_report_missing_and_unexpected_keys(
    missing_keys: Collection[str],
    unexpected_keys: Collection[str],
    raise_error: bool = True,
) -> None:
    """Raises, or logs, that keys differ."""
    differences = []
    if missing_keys:
        differences.append(f"Missing keys (stored, and asked for by no rank): {set(missing_keys)}")
    if unexpected_keys:
        differences.append(f"Unexpected keys (asked for by this rank, and not stored): {set(unexpected_keys)}")
    if not differences:
        return
    msg = f"state: keys must be those of the checkpoint, but are not. {'. '.join(differences)}"
    if raise_error:
        raise CheckpointError(msg)
    logger.warning(msg)


def validate_sharding_integrity(global_metadata: Sequence[Iterable[Shard]], common_state_dict: Any = None) -> None:
    """Collective over all ranks, if there is a common state: checks that the shards of all ranks are one checkpoint.

    A common state that differs from that of rank 0 is logged.

    Args:
        global_metadata: entries of each rank.
        common_state_dict: common state of this rank; None not to compare it.

    Raises:
        CheckpointError: they are not; on every rank.
    """
    if common_state_dict is not None:
        with meet("validate") as meeting:
            log_common_differences(common_state_dict, meeting)
    require_valid(join_tables([tabulate(shards, rank) for rank, shards in enumerate(global_metadata)]))


def check_main_replicas(sharded_state_dict: Tree) -> None:
    """Collective over all ranks: checks that main replicas have all elements of which a rank has a copy."""
    entries = [entry for entry in nested_values(sharded_state_dict) if isinstance(entry, ShardedTensor | ShardedObject)]
    described = [entry.without_data() for entry in entries if has_elements(entry)]
    with meet("validate") as meeting:
        require_main_replicas(gather_table(meeting, tabulate(described, meeting.rank))[0])


def log_common_differences(common: Any, meeting: Meeting) -> None:
    """Collective over the ranks: logs differences of a common state from that of rank 0."""
    content = pickle.dumps(common) if meeting.rank == 0 and meeting.size > 1 else b""
    first = meeting.gather(content)[0]
    if meeting.rank == 0:
        return
    only_first, only_own, mismatch = diff(pickle.loads(first), common)
    if only_first or only_own or mismatch:
        logger.warning(
            "Rank %d common state dict differs from rank 0 common state dict. Keys only on rank 0: %s, "
            "Keys only on %d: %s, Mismatched keys: %s",
            *(meeting.rank, only_first, meeting.rank, only_own, mismatch),
        )


def determine_global_metadata(sharded_state_dict: Tree) -> tuple[list[Shard], list[list[Shard]]]:
    """Collective over all ranks: returns the entries of this rank, and the entries of each rank, without data."""
    own = [entry.without_data() for entry in nested_values(sharded_state_dict)]
    with meet("describe") as meeting:
        contents = meeting.gather(pickle.dumps(own))
        return own, [own if rank == meeting.rank else pickle.loads(content) for rank, content in enumerate(contents)]


def validate_sharded_objects_handling(sharded_strategy: Any, common_strategy: Any) -> None:
    """Checks that one of two strategies handles objects."""
    if not sharded_strategy.can_handle_sharded_objects and not common_strategy.can_handle_sharded_objects:
        raise CheckpointError(
            f"strategies: one must handle objects, but neither {sharded_strategy} nor {common_strategy} does"
        )
