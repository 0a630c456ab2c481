"""Local objects of a grid of objects, and values that a checkpoint does not contain."""

from dataclasses import dataclass, replace
from typing import Any, Self

from trackbed.checkpoint.state.sharded_tensor import ReplicaId, ShardedBase
from trackbed.errors import CheckpointError


@dataclass
class ShardedObject(ShardedBase):
    """Object of any type at one place of a grid of objects. It is loaded into a grid of the same shape only.

    Args:
        key: name of the grid.
        data: object; None for a description alone.
        global_shape: shape of the grid.
        global_offset: place in the grid.
        replica_id: number of the copy.

    Raises:
        CheckpointError: shape and place have different numbers of dimensions.
    """

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Checks that shape and place have the same number of dimensions.

        Raises:
            CheckpointError: they do not.
        """
        if len(self.global_shape) != len(self.global_offset):
            raise CheckpointError(
                f"{self.key}: global_offset must have as many dimensions as global_shape {self.global_shape}, but is "
                f"{self.global_offset}"
            )

    def without_data(self) -> Self:
        """Returns a copy whose data is None."""
        return replace(self, data=None)

    @property
    def unique_key(self) -> str:
        """Name of the object in a checkpoint: that of the grid, place and shape."""
        place, shape = (".".join(map(str, numbers)) for numbers in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{place}_{shape}"

    def __str__(self) -> str:
        return f"{type(self).__name__}(key='{self.key}')"

    @classmethod
    def empty_from_any_key(cls, name: str) -> Self:
        """Describes an object from its name in a checkpoint: a name without place and shape, as torch gives, is a key.

        >>> ShardedObject.empty_from_any_key("a/b/shard_0.1_1.2").key, ShardedObject.empty_from_any_key("epoch").key
        ('a/b', 'epoch')
        """
        try:
            return cls.empty_from_unique_key(name)
        except CheckpointError:
            return cls(name, None, (1,), (0,))

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> Self:
        """Describes an object from its name in a checkpoint. Old names lack the last number of the shape, which is -1.

        Raises:
            CheckpointError: it is no such name.

        >>> ShardedObject.empty_from_unique_key("a/b/shard_0.1_1.2").global_offset
        (0, 1)
        """
        key, found, place = unique_key.rpartition("/shard_")
        offset, _, shape = place.partition("_")
        try:
            numbers, sizes = (tuple(map(int, text.split("."))) for text in (offset, shape))
        except ValueError:
            found = ""
        if not found:
            raise CheckpointError(
                f"name of an object must be KEY/shard_OFFSET_SHAPE with numbers between dots, found {unique_key!r}"
            )
        if len(sizes) + 1 == len(numbers):
            sizes = (*sizes, -1)
        return cls(key, None, sizes, numbers, replica_id)


@dataclass(eq=False)
class LocalNonpersistentObject:
    """Value that is not saved; `load` returns the one of the state dictionary that it was given.

    Args:
        obj: value.
    """

    obj: Any

    def unwrap(self) -> Any:
        """Returns the value."""
        return self.obj
