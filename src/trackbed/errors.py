"""Exceptions that Trackbed raises.

    TrackbedError
    +-- FormatError       a file is not what its format says
    |   +-- BlendFileError    a blend file has invalid or contradictory settings
    +-- CacheError        an index cannot be opened, built or published
    +-- PlanError         the data cannot give what was asked for
    |   +-- OversampleError   a blend draws more samples than a dataset has
    +-- StoreError        an object store does not give what was asked for
    +-- CollectiveError   ranks disagree, or one of them failed
    +-- CheckpointError   a checkpoint cannot be saved, loaded or verified
    +-- RunError          the record of a run cannot be kept
    +-- GradientError     a gradient is missing, not finite, or out of order: an AssertionError too,
    |                     because Megatron Core asserts there
    +-- ArgumentError     an argument is out of range: a ValueError, and an AssertionError too,
                          because code for Megatron Core catches those

A message names the place, what must hold, and what was found.
"""

from collections.abc import Sequence
from typing import Final

from trackbed.plural import number_of

__all__ = [
    "ArgumentError",
    "BlendFileError",
    "CacheError",
    "CheckpointError",
    "CollectiveError",
    "FormatError",
    "GradientError",
    "OversampleError",
    "PlanError",
    "RunError",
    "StoreError",
    "TrackbedError",
]


_PROBLEMS_SHOWN: Final = 20


class TrackbedError(Exception):
    """Base class of Trackbed's errors. A missing key is a KeyError, a wrong position an IndexError, as in Python."""


class FormatError(TrackbedError):
    """A file is damaged, truncated or of another format."""


class BlendFileError(FormatError):
    """A blend file has invalid or contradictory settings. The text has the first 20 problems, `problems` has all.

    Args:
        problems: description of each problem, beginning with file and line; at least one.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.shown))

    @property
    def shown(self) -> tuple[str, ...]:
        """The first 20 problems, then the number of further ones."""
        more = len(self.problems) - _PROBLEMS_SHOWN
        if more <= 0:
            return self.problems
        return (*self.problems[:_PROBLEMS_SHOWN], f"and {number_of(more, 'more problem')}")

    def __reduce__(self) -> tuple[type["BlendFileError"], tuple[tuple[str, ...]]]:
        """Copies and unpickles from the problems."""
        return type(self), (self.problems,)


class CacheError(TrackbedError):
    """An index of the cache cannot be opened, built or published."""


class PlanError(TrackbedError):
    """The data cannot give what the configuration asks for."""


class OversampleError(PlanError, IndexError, RuntimeError):
    """A blend draws more samples from a dataset than it has.

    Megatron Core raises an IndexError here; its documentation says RuntimeError.
    """


class StoreError(TrackbedError):
    """An object store does not answer in time, refuses, or gives something else than was asked for."""


class CollectiveError(TrackbedError):
    """Ranks disagree, or a rank failed; the message names it."""


class CheckpointError(TrackbedError):
    """A checkpoint cannot be saved, loaded or verified; the message names file, tensor or rank."""


class RunError(TrackbedError):
    """The record of a run cannot be kept; the message names its folder."""


class GradientError(TrackbedError, AssertionError):
    """A gradient is missing, not finite, or out of order; the message names rank, parameter and bucket.

    It is also an AssertionError, because code written for Megatron Core catches those of its bare asserts.
    """


class ArgumentError(TrackbedError, ValueError, AssertionError):
    """An argument has a type or a value that is not allowed.

    It is also an AssertionError, because code written for Megatron Core catches those of its bare asserts, and a
    ValueError, which other code expects.
    """
