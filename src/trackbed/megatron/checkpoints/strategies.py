"""Strategies and their base classes: for torch's distributed checkpoints, and for the state that is not sharded."""

import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final

import numpy as np

from trackbed.checkpoint.folder import COMMON_NAME, CheckpointFolder, load_common, open_folder, open_for_all
from trackbed.checkpoint.format.catalogue import Catalogue
from trackbed.checkpoint.format.safe_pickle import torch_bytes
from trackbed.checkpoint.io.targets import data_name
from trackbed.checkpoint.load import load_shards, require_loadable
from trackbed.checkpoint.plan.assignment import assign_to_main_replicas
from trackbed.checkpoint.plan.exchange import Exchange
from trackbed.checkpoint.plan.shard_table import has_elements
from trackbed.checkpoint.ranks import meet
from trackbed.checkpoint.remove import remove_tensors
from trackbed.checkpoint.save import (
    SavePlan,
    agree_on_plan,
    collect,
    encode_objects,
    shard_values,
    write_descriptions,
)
from trackbed.checkpoint.state.sharded_object import ShardedObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor
from trackbed.checkpoint.state.tree import Tree, dict_list_map_outplace, nested_values
from trackbed.errors import CheckpointError
from trackbed.files.publish import write_new
from trackbed.megatron.checkpoints.async_requests import AsyncCallsQueue, AsyncRequest, FileWrite
from trackbed.megatron.checkpoints.checkpoint_error import DistributedCheckpointError


class StrategyAction(Enum):
    """Kinds of strategies."""

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"


async_calls: Final = AsyncCallsQueue()


class LoadStrategyBase(ABC):
    """A way to load a format."""

    @abstractmethod
    def check_backend_compatibility(self, loaded_version: Any) -> None:
        """Checks the name of a format."""

    @abstractmethod
    def check_version_compatibility(self, loaded_version: Any) -> None:
        """Checks the version of a format."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True if the strategy loads objects too."""
        return False


class SaveStrategyBase(ABC):  # noqa: B024  Megatron Core's base class
    """A way to save a format.

    Args:
        backend: name of the format.
        version: its version.
    """

    def __init__(self, backend: str, version: int) -> None:
        self.backend = backend
        self.version = version

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True if the strategy saves objects too."""
        return False

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.backend}, {self.version})"


class LoadCommonStrategy(LoadStrategyBase):
    """A way to load the state that is not sharded."""

    @abstractmethod
    def load_common(self, checkpoint_dir: str | Path) -> Any:
        """Returns the state."""

    @abstractmethod
    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """Returns the state dictionary with objects in the place of their entries."""

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        """Returns descriptions of the objects; none if the strategy does not load them."""
        if not self.can_handle_sharded_objects:
            return {}
        raise NotImplementedError


class LoadShardedStrategy(LoadStrategyBase):
    """A way to load tensors, and possibly objects."""

    @abstractmethod
    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """Returns the state dictionary with loaded values in the place of its entries."""

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> Any:
        """Returns a description of each tensor, whole and without data, by key."""

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        """Returns descriptions of tensors and objects."""
        if not self.can_handle_sharded_objects:
            return self.load_tensors_metadata(checkpoint_dir)
        raise NotImplementedError(
            f"{type(self).__name__}: load_sharded_metadata must be implemented to list objects, but is not"
        )

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Removes the tensors whose keys begin with a prefix."""
        raise NotImplementedError(
            f"{type(self).__name__}: remove_sharded_tensors must be implemented to remove tensors, but is not"
        )


class SaveCommonStrategy(SaveStrategyBase):
    """A way to save the state that is not sharded."""

    @abstractmethod
    def save_common(self, common_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Saves the state."""

    def save_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Saves objects."""
        raise NotImplementedError


class SaveShardedStrategy(SaveStrategyBase):
    """A way to save tensors, and possibly objects."""

    @abstractmethod
    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Saves the entries of a state dictionary."""


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """A way to save in the background."""

    @abstractmethod
    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> AsyncRequest:
        """Prepares a save, and returns a request that makes it."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Saves at once."""
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()


logger = logging.getLogger(__name__)

_FORMAT: Final = ("torch_dist", 1)
_COMMON_FORMAT: Final = ("torch", 1)

default_strategies: Final[defaultdict[str, dict[tuple[str, int], Any]]] = defaultdict(dict)
"""Strategy by the value of its kind, and by the name and version of the format."""


def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Any:
    """Returns the strategy for a format."""
    try:
        return default_strategies[action.value][backend, version]
    except KeyError as error:
        raise CheckpointError(
            f"format: {action.value} must know {backend!r} of version {version}, but does not"
        ) from error


def register_default_strategy(
    action: StrategyAction, backend: str, version: int, strategy: SaveStrategyBase | LoadStrategyBase
) -> None:
    """Makes a strategy the one for a format."""
    default_strategies[action.value][backend, version] = strategy


class TorchDistSaveShardedStrategy(AsyncSaveShardedStrategy):
    """Saves main replicas, each on the rank that has it.

    Args:
        backend: name of the format.
        version: its version.
        keep_only_main_replica: ignored: a main replica is saved, once.
        thread_count: number of files that a rank writes, at least 1.
        cached_metadata: ignored: plans are used again where the structure is the same.
        separation_hint: prefix of keys whose tensors are written to files of their own, with the prefix in their names.
        cpu_shm_mode: ignored: saves are made by the process that asks for them.
    """

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        keep_only_main_replica: bool = True,
        thread_count: int = 2,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
        cpu_shm_mode: bool = False,
    ) -> None:
        super().__init__(backend, version)
        self.keep_only_main_replica = keep_only_main_replica
        self.thread_count = thread_count
        self.use_cached_ckpt_structure = cached_metadata
        self.separation_hint = separation_hint

    def async_save(
        self,
        sharded_state_dict: Any,
        checkpoint_dir: str | Path,
        async_strategy: str | None = None,
    ) -> AsyncRequest:
        """Collective over all ranks: plans a save, and returns a request that writes the files.

        Its `async_fn` writes this rank's files without any other rank, in this process, in one that was forked from it,
        or in another to which it was sent as a pickle. Its `finalize_fns` are collective, and are called here.

        Args:
            sharded_state_dict: tensors and objects.
            checkpoint_dir: folder of the files.
            async_strategy: ignored: there is one way to save.

        Raises:
            CheckpointError: a rank failed.
        """
        shards = list(filter(has_elements, nested_values(sharded_state_dict)))
        folder = Path(checkpoint_dir).absolute()  # the working directory may change until the request is executed
        with meet("save", error_type=DistributedCheckpointError) as meeting:
            # What the program wants to have checked, `save` checks.
            objects = encode_objects(shards, writes_storages=True)
            plan = agree_on_plan(meeting, shards, objects, assign_to_main_replicas, validates=False)
            write = FileWrite(folder, shard_values(shards, objects, plan, meeting.rank), meeting.rank)
            names = self._files_of(plan, meeting.rank)

        def finalize() -> None:
            with meet("save", error_type=DistributedCheckpointError) as meeting:
                found, _ = collect(meeting, write.result())
                if meeting.rank == 0:
                    write_descriptions(folder, plan, found, {})

        preload = write.staged if write.needs_staging() else None
        return AsyncRequest(write, (meeting.rank, None, names), [finalize], preload_fn=preload)

    def _files_of(self, plan: SavePlan, rank: int) -> list[str]:
        """Name of the file of each item of a rank."""
        table, rows = plan.table, plan.assignment.of_rank(rank).row
        is_separate = [
            self.separation_hint is not None
            and not table.is_object[row]
            and table.keys[table.key[row]].startswith(self.separation_hint)
            for row in rows.tolist()
        ]
        count = max(1, self.thread_count)
        names = [""] * len(rows)
        for prefix, wants in (("", False), (self.separation_hint or "", True)):
            own = [number for number, found in enumerate(is_separate) if found == wants]
            bins = max(1, count // 2) if self.separation_hint is not None else count
            for number, place in zip(own, _bins(table.num_bytes[rows[own]], bins), strict=True):
                names[number] = prefix + data_name(rank, place)
        return names

    def can_handle_sharded_objects(self) -> bool:  # type: ignore[override]  # true where programs read it as a property
        """True."""
        return True


def _bins(sizes: Any, count: int) -> Sequence[int]:
    """Bin of each item, largest first into the emptiest; of equal ones, the first."""
    loads = np.zeros((count, 2), dtype=np.int64)
    found = np.zeros(len(sizes), dtype=np.int64)
    for number in np.argsort(-sizes, kind="stable").tolist():
        place = int(np.lexsort((loads[:, 1], loads[:, 0]))[0])
        found[number] = place
        loads[place] += (sizes[number], 1)
    return list(map(int, found))


class TorchDistLoadShardedStrategy(LoadShardedStrategy):
    """Loads from checkpoints of Trackbed, Megatron Core and torch.

    Args:
        cache_metadata: ignored: a description of a checkpoint is read when it is needed.
        stream_ckpt_dequant: ignored: `load` replaces quantized tensors before it calls a strategy.
        checkpoint_name: ignored: errors name the files.
    """

    def __init__(
        self,
        cache_metadata: bool = False,
        stream_ckpt_dequant: bool = True,
        checkpoint_name: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.cache_metadata = cache_metadata
        self.cached_global_metadata: Any = None
        self.stream_ckpt_dequant = False
        """False: the tensors of a state are made ordinary ones before they are loaded."""
        self.checkpoint_name = checkpoint_name

    def load(
        self,
        sharded_state_dict: Any,
        checkpoint_dir: str | Path,
        async_strategy: str | None = None,
    ) -> Any:
        """Collective over all ranks: loads tensors and objects.

        Args:
            sharded_state_dict: tensors, whose `data` is filled where it is not None, and objects.
            checkpoint_dir: folder of the checkpoint.
            async_strategy: ignored: there is one way to load.

        Returns:
            The same structure with loaded values.

        Raises:
            CheckpointError: a rank failed.
        """
        return self.load_with(sharded_state_dict, checkpoint_dir, "none")

    def load_with(self, sharded_state_dict: Any, checkpoint_dir: str | Path, exchange: Exchange) -> Any:
        """Like `load`; ranks that want the same tensors may have one of them read, and send them to the others."""
        shards = list(nested_values(sharded_state_dict))
        with meet("load", error_type=DistributedCheckpointError) as meeting:
            folder = open_for_all(Path(checkpoint_dir), meeting)
            for shard in filter(has_elements, shards):
                require_loadable(shard, folder.catalogue, allow_cast=True)
            for key in sorted(_casts(shards, folder.catalogue)):
                logger.warning("%s: loaded into another type than that in which it is stored", key)
            values = iter(load_shards(shards, folder, meeting, exchange=exchange))
            return dict_list_map_outplace(lambda _: next(values), sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: str | Path, metadata: Any = None) -> dict[str, ShardedTensor]:
        """Describes each tensor of a checkpoint, whole and without data, by key."""
        return _describe_tensors(open_folder(Path(checkpoint_dir)))

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, ShardedTensor | ShardedObject]:
        """Describes each tensor of a checkpoint by key, and each object by its unique key."""
        folder = open_folder(Path(checkpoint_dir))
        objects = {key: ShardedObject.empty_from_any_key(key) for key in folder.catalogue.objects}
        return {**objects, **_describe_tensors(folder)}

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Collective over all ranks: removes the tensors whose keys begin with a prefix.

        Raises:
            CheckpointError: a rank failed; the checkpoint is as it was.
        """
        with meet("remove", error_type=DistributedCheckpointError) as meeting:
            if meeting.rank == 0:
                remove_tensors(Path(checkpoint_dir), lambda key: key.startswith(key_prefix))

    def can_handle_sharded_objects(self) -> bool:  # type: ignore[override]  # true where programs read it as a property
        """True."""
        return True

    def check_backend_compatibility(self, loaded_version: Any) -> None:
        """Accepts all names: the folder is examined when it is opened."""

    def check_version_compatibility(self, loaded_version: Any) -> None:
        """Accepts all versions."""


def _casts(shards: Sequence[ShardedTensor | ShardedObject], catalogue: Catalogue) -> set[str]:
    """Keys of tensors that are wanted in another type than the stored one."""
    return {
        shard.key
        for shard in shards
        if isinstance(shard, ShardedTensor)
        and shard.key in catalogue.tensors
        and shard.dtype != catalogue.tensors[shard.key].dtype
    }


def _describe_tensors(folder: CheckpointFolder) -> dict[str, ShardedTensor]:
    return {
        key: ShardedTensor(
            key,
            None,
            stored.dtype,
            stored.shape,
            stored.shape,
            (0,) * len(stored.shape),
            (1,) * len(stored.shape),
        )
        for key, stored in folder.catalogue.tensors.items()
    }


class TorchCommonSaveStrategy(SaveCommonStrategy):
    """Saves the state that is not sharded, from rank 0."""

    def save_common(self, common_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Writes `common.pt` on rank 0."""
        with meet("save", error_type=DistributedCheckpointError) as meeting:
            if meeting.rank == 0:
                write_new(
                    Path(checkpoint_dir) / COMMON_NAME,
                    torch_bytes(common_state_dict, COMMON_NAME, writes_storages=True),
                )

    def can_handle_sharded_objects(self) -> bool:  # type: ignore[override]  # true where programs read it as a property
        """True."""
        return True


class TorchCommonLoadStrategy(LoadCommonStrategy):
    """Loads the state that is not sharded."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Reads `common.pt`."""
        return load_common(Path(checkpoint_dir))

    def load_sharded_objects(self, sharded_objects_state_dict: Tree, checkpoint_dir: str | Path) -> Tree:
        """Loads objects."""
        found: Tree = TorchDistLoadShardedStrategy().load(sharded_objects_state_dict, checkpoint_dir)
        return found

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True

    def check_backend_compatibility(self, loaded_version: Any) -> None:
        """Accepts all names."""

    def check_version_compatibility(self, loaded_version: Any) -> None:
        """Accepts all versions."""


def register_default_strategies() -> None:
    """Registers these strategies as the default ones of their formats."""
    for action, name, strategy in (
        (StrategyAction.SAVE_SHARDED, _FORMAT, TorchDistSaveShardedStrategy(*_FORMAT)),
        (StrategyAction.LOAD_SHARDED, _FORMAT, TorchDistLoadShardedStrategy()),
        (StrategyAction.SAVE_COMMON, _COMMON_FORMAT, TorchCommonSaveStrategy(*_COMMON_FORMAT)),
        (StrategyAction.LOAD_COMMON, _COMMON_FORMAT, TorchCommonLoadStrategy()),
    ):
        register_default_strategy(action, *name, strategy)


register_default_strategies()
