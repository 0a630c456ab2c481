"""Base class of all entries that stand for a part of something global."""

from abc import ABC, abstractmethod
from typing import Any, Self

from trackbed.errors import CheckpointError

StateDict = dict[str, Any]
ReplicaId = int | tuple[int, ...]
"""Number of a copy, in one or several dimensions of parallelism. The copy with zeros alone is the main one."""


class ShardedBase(ABC):
    """Entry of a state dictionary that stands for a part of something global."""

    key: str
    """Name of the global tensor or object. The place in the state dictionary is independent of it, and not stored."""
    data: Any
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Checks that the fields fit together.

        Raises:
            CheckpointError: they do not.
        """

    @abstractmethod
    def without_data(self) -> Self:
        """Returns a copy whose data is None."""


def check_key(key: object) -> None:
    """Checks that a key can be stored.

    Raises:
        CheckpointError: it is no text, or has surrogates, which no encoding of text has.
    """
    if not isinstance(key, str):
        raise CheckpointError(f"key of an entry: must be text, found {key!r}, of {type(key).__name__}: give str(key)")
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"key of an entry: must be text that UTF-8 can encode, found {key!r} with a lone surrogate"
        ) from error


def is_main_replica(replica_id: ReplicaId) -> bool:
    """True for 0, and for a tuple of zeros.

    Args:
        replica_id: number of a copy.

    >>> is_main_replica((0, 0)), is_main_replica((0, 1))
    (True, False)
    """
    return replica_id == 0 if isinstance(replica_id, int) else not any(replica_id)
