"""Entries that become several others when they are saved, and one value again when they are loaded."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from trackbed.checkpoint.state.sharded_base import ReplicaId, ShardedBase

Path = tuple[Any, ...]
Builder = Callable[..., Any]
Merger = Callable[[Any], Any]


@dataclass
class ShardedTensorFactory(ShardedBase):
    """Tensor that is saved as a state dictionary of others.

    An optimizer uses the factory of a parameter for the state of the parameter too, with another key and other data; so
    the result must depend on the arguments of `build_fn` alone.

    Args:
        key: name, for `build_fn`.
        data: tensor.
        build_fn: makes a state dictionary of `key, data, replica_id, flattened_range`.
        merge_fn: makes the tensor of that state dictionary with loaded values.
        replica_id: number of the copy.
        flattened_range: passed on to `build_fn`.
    """

    key: str
    data: torch.Tensor | None
    build_fn: Builder
    merge_fn: Merger
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> Any:
        """Returns the state dictionary that is saved or loaded in the place of the tensor."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def validate_metadata_integrity(self) -> None:
        """Does nothing: the entries that are built check themselves."""

    def without_data(self) -> Self:
        """Returns a copy whose data is None."""
        return replace(self, data=None)


def apply_factory_merges(x1: Any, x2: Any, key: Path = ()) -> Any:
    """Replaces what factories built by the values that they merge from it, and returns the result.

    Args:
        x1: loaded state dictionary, which is changed.
        x2: factories, at the same places; a list of `x1` may be a dictionary by position here.
        key: path of both, for errors.

    Raises:
        ValueError: `x1` lacks a place of `x2`; the message has its path.
    """
    if isinstance(x2, ShardedTensorFactory):
        return x2.merge_fn(x1)
    if isinstance(x2, list) and isinstance(x1, list) and len(x1) == len(x2):
        x2 = dict(enumerate(x2))
    if not isinstance(x2, dict) or not isinstance(x1, dict | list):
        raise ValueError(f"state: what was loaded at {key} must have the structure of its factories, but does not")  # noqa: TRY004  Megatron Core's type
    for name, below in x2.items():
        is_there = name in x1 if isinstance(x1, dict) else isinstance(name, int) and 0 <= name < len(x1)
        if not is_there:
            raise ValueError(
                f"state: what was loaded must have a value at {(*key, name)}, which a factory built, but does not"
            )
        x1[name] = apply_factory_merges(x1[name], below, (*key, name))
    return x1
