"""Constructors of other people's dataset classes, which may build files that the other ranks read."""

from collections.abc import Callable
from typing import Any

from trackbed.datasets.cached import CachedDataset
from trackbed.datasets.megatron_dataset import MegatronDataset
from trackbed.datasets.overrides import is_ours


def constructs_in_turn(cls: type[MegatronDataset]) -> bool:
    """True for a class that may write files when it is constructed.

    By Megatron Core's convention such a class writes them on rank 0, which is constructed first, and reads them on the
    others.
    """
    if issubclass(cls, CachedDataset):
        return cls.builds_its_indices() or not is_ours(cls.__init__)
    return not is_ours(cls)


def constructor_of_ours(cls: type[MegatronDataset]) -> Callable[..., MegatronDataset] | None:
    """Constructs a dataset of a class with the constructor of its nearest base class of ours, which writes no files.

    The dataset requests the indices that the class has in the cache. None for a class that has none there, or builds
    them itself.
    """
    if not issubclass(cls, CachedDataset) or cls.builds_its_indices():
        return None
    base: Any = next(base for base in cls.__mro__ if is_ours(base) and "__init__" in vars(base))

    def construct(*arguments: Any) -> MegatronDataset:
        dataset = cls.__new__(cls)
        base.__init__(dataset, *arguments)
        return dataset

    return construct
