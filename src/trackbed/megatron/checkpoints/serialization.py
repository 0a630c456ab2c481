"""Save and load, with the arguments and strategies of Megatron Core 0.16.1, and of later calls up to 0.19."""

import logging
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from trackbed.checkpoint.begin_save import make_partial
from trackbed.checkpoint.commit import commit_checkpoint, target_folder
from trackbed.checkpoint.folder import COMMON_NAME
from trackbed.checkpoint.format.config_file import CONFIG_NAME, CheckpointingConfig, maybe_load_config
from trackbed.checkpoint.format.extents import SIDE_NAME, FileChecksum, SideFile
from trackbed.checkpoint.format.safe_pickle import torch_bytes
from trackbed.checkpoint.ranks import meet
from trackbed.checkpoint.state.describe import check_places
from trackbed.checkpoint.state.partial_tensors import refuse_partial_shards, refuse_partial_tensors
from trackbed.checkpoint.state.sharded_object import LocalNonpersistentObject, ShardedObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor, ShardedTensorFactory, apply_factory_merges
from trackbed.checkpoint.state.tree import Tree, dict_list_map_outplace, extract_matching_values, merge, nested_values
from trackbed.datasets.megatron_releases import lists_common_state
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.files.checksum import crc32
from trackbed.files.publish import write_new
from trackbed.files.publish_folder import flush_files
from trackbed.megatron.checkpoints.async_requests import AsyncRequest, InPartialFolder
from trackbed.megatron.checkpoints.checkpoint_error import DistributedCheckpointError
from trackbed.megatron.checkpoints.entries import (
    apply_factories,
    clean_metadata,
    dict_list_map_inplace,
    extract_nonpersistent,
    extract_sharded_base,
    force_all_tensors_to_non_fp8,
)
from trackbed.megatron.checkpoints.fully_parallel import FullyParallelSaveStrategyWrapper
from trackbed.megatron.checkpoints.strategies import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    TorchDistSaveShardedStrategy,
    get_default_strategy,
)
from trackbed.megatron.checkpoints.strictness import (
    StrictHandling,
    check_main_replicas,
    determine_global_metadata,
    parse_strict_flag,
    validate_integrity_and_strict_load,
    validate_sharding_integrity,
    verify_checkpoint_and_load_strategy,
)

P = ParamSpec("P")
R = TypeVar("R")

_COMMON_STRATEGY: Final = 3
"""Position of the argument that 0.19 does not have any more."""
_WITHOUT_EFFECT: Final = ("async_strategy", "verify_integrity")


def takes_later_calls(num_positional: int, later: tuple[str, ...]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function with 0.16.1's signature to take later versions' calls too.

    From 0.19 on there is no `common_strategy`: a truth value in its place is `validate_access_integrity`. The names of
    implementations of asynchronous saves, and the hashes of whole files that 0.19 may compare, have no effect: all
    saves are made in one way, and whatever is read is compared with its checksum.

    Args:
        num_positional: number of arguments of 0.16.1 that may be given by position.
        later: names of the arguments that follow them in 0.17 or 0.19.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if len(arguments) > _COMMON_STRATEGY and isinstance(arguments[_COMMON_STRATEGY], bool):
                arguments = (*arguments[:_COMMON_STRATEGY], None, *arguments[_COMMON_STRATEGY:])
            if len(arguments) <= num_positional + len(later):
                options |= _given_by_position(dict(zip(later, arguments[num_positional:], strict=False)), options)
                arguments = arguments[:num_positional]
            return function(
                *arguments, **{name: value for name, value in options.items() if name not in _WITHOUT_EFFECT}
            )

        return call

    return decorate


def _given_by_position(found: Mapping[str, Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments that were given by position."""
    for name in found:
        if options.get(name) is not None:
            raise ArgumentError(f"{name}: must be given once, but is given twice")
    return found


logger = logging.getLogger(__name__)

_CONTENT: Final = "content_metadata"
_CHECKING_STRATEGIES: Final = (TorchDistSaveShardedStrategy, FullyParallelSaveStrategyWrapper)
"""Strategies that check themselves that no copy is left out."""

_COMMON_OBJECT: Final = ShardedObject("common_state", None, (1,), (0,))
"""The object that 0.19 writes in the place of `common.pt`, which is written here for all releases to read."""

Folder = str | Path
State = dict[str, Any]
Described = dict[str, ShardedTensor | ShardedObject]


@takes_later_calls(8, ("async_strategy", "verify_integrity"))
def save(
    sharded_state_dict: State,
    checkpoint_dir: Folder,
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
    common_strategy: SaveCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: State | None = None,
) -> AsyncRequest | None:
    """Collective over all ranks: saves a state dictionary as a checkpoint, which appears whole or not at all.

    Args:
        sharded_state_dict: state dictionary, whose containers are left as they are.
        checkpoint_dir: folder of the checkpoint.
        sharded_strategy: strategy for tensors and objects, or the name and version of its format.
        common_strategy: must be None, or the strategy that is used then.
        validate_access_integrity: True to check that main replicas cover each tensor once. They must cover what any
            rank has in any case.
        async_sharded_save: True to return a request that makes the save: its `async_fn` writes this rank's files,
            without other ranks and in any process, and its `finalize_fns` complete the checkpoint with all ranks.
        preprocess_common_before_consistancy_check: returns the part of the common state that all ranks must share.
        content_metadata: description of the contents.

    Returns:
        A request if `async_sharded_save`, else None.

    Raises:
        CheckpointError: on every rank, with the rank that failed and its message.
    """
    strategy = _chosen_save_strategy(sharded_strategy, common_strategy)
    state = sharded_state_dict if content_metadata is None else {**sharded_state_dict, _CONTENT: content_metadata}
    if async_sharded_save and not isinstance(strategy, AsyncSaveShardedStrategy):
        raise CheckpointError(f"{strategy}: must be able to save in the background, but is not")
    with meet("save", error_type=DistributedCheckpointError) as meeting:
        folder = target_folder(checkpoint_dir)
        entries, common = save_preprocess(state, validate_access_integrity, preprocess_common_before_consistancy_check)
        if not validate_access_integrity and type(strategy) not in _CHECKING_STRATEGIES:
            check_main_replicas(entries)
        partial = make_partial(folder, meeting)
        contents = {
            COMMON_NAME: torch_bytes(common, COMMON_NAME, writes_storages=True),
            CONFIG_NAME: CheckpointingConfig(strategy.backend, strategy.version).encode(),
        }

        def complete(write: Callable[[], None]) -> None:
            with meet("save", error_type=DistributedCheckpointError) as meeting:
                if meeting.rank == 0:
                    meeting.remove_after_error(partial)
                write()
                if not isinstance(getattr(strategy, "base_strategy", strategy), AsyncSaveShardedStrategy):
                    meeting.group.barrier()  # requests meet once all ranks have written; other strategies need not
                if meeting.rank == 0:
                    _describe(partial, contents)
                    commit_checkpoint(partial, folder)

        if async_sharded_save and isinstance(strategy, AsyncSaveShardedStrategy):
            request = strategy.async_save(entries, partial)

            def write_rest() -> None:
                with meet("save", error_type=DistributedCheckpointError) as meeting:
                    for call in request.finalize_fns:
                        call()
                        meeting.group.barrier()

            write = None if request.async_fn is None else InPartialFolder(request.async_fn, partial)
            return request._replace(async_fn=write, finalize_fns=[lambda: complete(write_rest)])
        complete(lambda: strategy.save(entries, partial))
    return None


def _chosen_save_strategy(sharded: Any, common: Any) -> SaveShardedStrategy:
    if common is not None and not isinstance(common, SaveCommonStrategy):
        raise NotImplementedError(f"common_strategy: must be None or a strategy, found {common!r}")
    if sharded is None:
        return get_default_save_sharded_strategy()
    if isinstance(sharded, tuple):
        found: SaveShardedStrategy = get_default_strategy(StrategyAction.SAVE_SHARDED, *sharded)
        return found
    if not isinstance(sharded, SaveShardedStrategy):
        raise ArgumentError(
            f"sharded_strategy: must be a strategy, or name and version of a format, found {type(sharded).__name__}"
        )
    return sharded


def _describe(partial: Path, contents: dict[str, bytes]) -> None:
    """Writes the files besides those of the strategy, and adds them to its side file, if it has one."""
    for name, content in contents.items():
        write_new(partial / name, content)
    names = list(contents)
    side_path = partial / SIDE_NAME
    if side_path.exists():
        side = SideFile.decode(side_path.read_bytes())
        files = {name: FileChecksum(len(content), crc32(content)) for name, content in contents.items()}
        side_path.unlink()
        write_new(side_path, SideFile(side.save_id, {**side.files, **files}, side.catalogue).encode())
        names.append(SIDE_NAME)
    flush_files(partial / name for name in names)


@takes_later_calls(6, ("verify_integrity", "process_group"))
def load(
    sharded_state_dict: State,
    checkpoint_dir: Folder,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    process_group: Any = None,
) -> Any:
    """Collective over all ranks: loads a checkpoint.

    Args:
        sharded_state_dict: state dictionary with tensors and objects that are wanted, which is left as it is.
        checkpoint_dir: folder of the checkpoint.
        sharded_strategy: strategy for tensors and objects, or the name and version of its format.
        common_strategy: strategy for the common state, or the same.
        validate_access_integrity: True to check that main replicas cover each tensor once.
        strict: handling of unexpected keys, which are wanted and not stored, and of missing keys, which are stored and
            not wanted. "assume_ok_unexpected": an unexpected key is an error of the tensor that is not there.
            "log_unexpected", "log_all", "raise_unexpected", "raise_all": unexpected keys, or both kinds, are logged or
            raised. "return_unexpected", "return_all": they are returned. "ignore_all": they are left out.
        process_group: the ranks; by default all.

    Returns:
        The loaded state; with `strict` "return_all" or "return_unexpected" also missing and unexpected keys.

    Raises:
        CheckpointError: on every rank, with the rank that failed and its message.
    """
    handling = parse_strict_flag(strict)
    with meet("load", process_group, error_type=DistributedCheckpointError) as meeting:
        sharded, common = verify_checkpoint_and_load_strategy(checkpoint_dir, sharded_strategy, common_strategy)
        force_all_tensors_to_non_fp8(sharded_state_dict)
        loaded: Any = common.load_common(checkpoint_dir)
        wanted, local, factories = load_preprocess(_with_common_state(sharded_state_dict, loaded))
        merge(loaded, local)
        entries = extract_sharded_base(wanted)[0]
        stored = None
        if StrictHandling.requires_explicit_ckpt_mismatch_check(handling):
            stored = sharded.load_sharded_metadata(checkpoint_dir)
        own, of_ranks = None, None
        if validate_access_integrity or StrictHandling.requires_global_app_metadata(handling):
            own, of_ranks = determine_global_metadata(entries)
        entries, missing, unexpected = validate_integrity_and_strict_load(
            entries, handling, validate_access_integrity, own, of_ranks, stored
        )
        merge(loaded, sharded.load(entries, checkpoint_dir))
        apply_factory_merges(loaded, factories)
        meeting.group.barrier()
    if StrictHandling.requires_returning_mismatch_keys(handling):
        return loaded, missing, unexpected
    return loaded


def _with_common_state(wanted: State, common: State) -> State:
    """A state dictionary that is to be loaded, with the common state in the place of its object, if it is wanted."""
    if not lists_common_state():
        return wanted

    def replaced(value: Any) -> Any:
        is_common = isinstance(value, ShardedObject) and value.unique_key == _COMMON_OBJECT.unique_key
        return LocalNonpersistentObject(dict(common)) if is_common else value

    found: State = dict_list_map_outplace(replaced, wanted)
    return found


def load_common_state_dict(checkpoint_dir: Folder) -> State:
    """Loads the state that is not sharded.

    Raises:
        CheckpointError: the folder is not a checkpoint, or is damaged.
    """
    found: State = verify_checkpoint_and_load_strategy(checkpoint_dir)[1].load_common(checkpoint_dir)
    return found


def load_tensors_metadata(checkpoint_dir: Folder, sharded_strategy: LoadShardedStrategy | None = None) -> Described:
    """Describes each tensor of a checkpoint, whole and without data, by key.

    Raises:
        CheckpointError: the folder is not a checkpoint, or is damaged.
    """
    strategy, _ = verify_checkpoint_and_load_strategy(checkpoint_dir, sharded_strategy)
    found: Described = strategy.load_tensors_metadata(Path(checkpoint_dir))
    return found


def load_sharded_metadata(
    checkpoint_dir: Folder,
    sharded_strategy: LoadShardedStrategy | None = None,
    common_strategy: LoadCommonStrategy | None = None,
) -> Described:
    """Describes each tensor of a checkpoint by key, and each object by its unique key.

    With megatron-core 0.19 and later, the common state is one of the objects.

    Raises:
        CheckpointError: the folder is not a checkpoint, or is damaged.
    """
    strategy, _ = verify_checkpoint_and_load_strategy(checkpoint_dir, sharded_strategy, common_strategy)
    found: Described = strategy.load_sharded_metadata(Path(checkpoint_dir))
    if lists_common_state():
        found = {_COMMON_OBJECT.unique_key: _COMMON_OBJECT, **found}
    return found


def load_plain_tensors(checkpoint_dir: Folder) -> State:
    """Collective over all ranks: loads all tensors, whole, by key.

    Raises:
        CheckpointError: a rank failed.
    """
    found: State = load(dict(load_tensors_metadata(checkpoint_dir)), checkpoint_dir, validate_access_integrity=False)
    return {key: value for key, value in found.items() if hasattr(value, "shape")}


def load_content_metadata(
    checkpoint_dir: Folder | None = None, *, preloaded_state_dict: State | None = None
) -> State | None:
    """Returns the description of the contents that was saved; None if there is none.

    Args:
        checkpoint_dir: folder of the checkpoint.
        preloaded_state_dict: common state, if it has been loaded.

    Raises:
        ArgumentError: both are None.
        CheckpointError: the folder is not a checkpoint, or is damaged.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise ArgumentError("checkpoint_dir: must be given without preloaded_state_dict, but both are None")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    return preloaded_state_dict.get(_CONTENT)


def remove_sharded_tensors(checkpoint_dir: Folder, key_prefix: str) -> None:
    """Collective over all ranks: removes the tensors whose keys begin with a prefix, and the files that had no others.

    Raises:
        CheckpointError: the folder is not a checkpoint, or is damaged.
    """
    with meet("remove", error_type=DistributedCheckpointError):
        verify_checkpoint_and_load_strategy(checkpoint_dir)[0].remove_sharded_tensors(checkpoint_dir, key_prefix)


def check_is_distributed_checkpoint(checkpoint_dir: str | Path) -> bool:
    """True if a folder has a `metadata.json` that can be read.

    Raises:
        CheckpointError: it has one that is damaged.
    """
    return maybe_load_config(checkpoint_dir) is not None


def save_config(config: CheckpointingConfig, checkpoint_dir: str | Path) -> None:
    """Writes `metadata.json` to a folder."""
    (Path(checkpoint_dir) / CONFIG_NAME).write_bytes(config.encode())


def get_default_save_sharded_strategy(backend: str = "torch_dist", version: int = 1) -> SaveShardedStrategy:
    """Returns the strategy that saves tensors and objects in a format."""
    found: SaveShardedStrategy = get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)
    return found


def get_default_save_common_strategy(backend: str = "torch", version: int = 1) -> SaveCommonStrategy:
    """Returns the strategy that saves the common state in a format."""
    found: SaveCommonStrategy = get_default_strategy(StrategyAction.SAVE_COMMON, backend, version)
    return found


def get_default_load_sharded_strategy(checkpoint_dir: Folder | None = None) -> LoadShardedStrategy:
    """Returns the strategy that loads tensors and objects of a checkpoint.

    Args:
        checkpoint_dir: folder of the checkpoint; None for any of the format "torch_dist".

    Raises:
        CheckpointError: the folder is not a checkpoint.
    """
    if checkpoint_dir is None:
        found: LoadShardedStrategy = get_default_strategy(StrategyAction.LOAD_SHARDED, "torch_dist", 1)
        return found
    return verify_checkpoint_and_load_strategy(checkpoint_dir)[0]


def save_preprocess(
    sharded_state_dict: Tree,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
) -> tuple[Tree, Any]:
    """Divides a state dictionary that is to be saved, which is left as it is.

    Args:
        sharded_state_dict: state dictionary.
        validate_access_integrity: True to check the shards of all ranks, which is collective.
        preprocess_common_before_consistancy_check: returns the part of the common state that all ranks must share; it
            gets a copy of the containers.

    Returns:
        The entries, with factories applied, and the common state.
    """
    built = dict_list_map_outplace(
        lambda value: value.build() if isinstance(value, ShardedTensorFactory) else value, sharded_state_dict
    )
    check_places(built)
    _, rest = extract_nonpersistent(built)
    entries, common = extract_sharded_base(rest)
    refuse_partial_tensors(common)
    refuse_partial_shards(list(nested_values(entries)))
    if isinstance(common, dict) and "content_metadata" in common:
        common["content_metadata"] = clean_metadata(common["content_metadata"])
    if validate_access_integrity:
        compared = common
        if preprocess_common_before_consistancy_check is not None:
            compared = preprocess_common_before_consistancy_check(dict_list_map_outplace(lambda value: value, common))
        validate_sharding_integrity(determine_global_metadata(entries)[1], common_state_dict=compared)
    return entries, common


def load_preprocess(sharded_state_dict: Tree) -> tuple[Tree, Tree, Tree]:
    """Divides a state dictionary that is to be loaded, which is left as it is.

    Returns:
        All but local values, with factories applied; local values; and the factories, without data and with lists as
        dictionaries by position.
    """
    copied, _ = extract_matching_values(sharded_state_dict, lambda _: True)
    factories, _ = extract_matching_values(
        copied, lambda value: isinstance(value, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(copied)
    dict_list_map_inplace(ShardedTensorFactory.without_data, factories)
    local, rest = extract_nonpersistent(copied)
    dict_list_map_inplace(LocalNonpersistentObject.unwrap, local)
    return rest, local, factories


def filter_out_empty_flatten_tensor(sharded_state_dict: Tree) -> Tree:
    """Returns a copy without tensors whose `flattened_range` is empty, which no tensor has any more."""
    kept, _ = extract_matching_values(
        sharded_state_dict, lambda value: not (isinstance(value, ShardedTensor) and value.flattened_range is not None)
    )
    return kept
