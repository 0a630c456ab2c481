"""Base classes of strategies. Names are Megatron Core 0.16.1's."""

from abc import ABC, abstractmethod
from enum import Enum
from pathlib import Path
from typing import Any, Final

from trackbed.megatron.checkpoints.async_requests import AsyncCallsQueue, AsyncRequest


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
