"""Requests for entries: what is wanted, and how it is built if it is missing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trackbed.cache.entry import ArraySpec, Entry

Arrays = Mapping[str, npt.NDArray[Any]]
"""Arrays of an entry by name."""


class Allocate(Protocol):
    """Allocates the arrays that a build fills: large ones in their files."""

    def __call__(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Returns an array to fill."""
        ...

    def filled(self, count: int, *names: str) -> None:
        """Records that the first `count` elements along the first axis of these arrays are final."""
        ...


class Ingredients(Protocol):
    """Everything that decides the arrays of an entry."""

    def build(self, allocate: Allocate) -> Arrays:
        """Builds the arrays, valid until the next ones are allocated."""
        ...

    def expected(self) -> Mapping[str, ArraySpec]:
        """Returns dtypes and shapes of the arrays. May read the data; called only where no manifest tells."""
        ...

    def cost(self) -> float:
        """Estimates the nanoseconds of one thread to build the arrays, without reading the data."""
        ...


class Kind:
    """Builds entries of one kind: one at a time, unless a subclass builds many at once.

    Args:
        is_blend: True for the index of a blend, which one thread builds, and which is scheduled first.
    """

    def __init__(self, *, is_blend: bool = False) -> None:
        self.is_blend = is_blend

    def build(
        self, requests: "Sequence[Request]", allocate: "Callable[[Request], Allocate]"
    ) -> "Iterator[Sequence[tuple[Request, Arrays]]]":
        """Builds the arrays of each request, and yields them in batches that are committed at once."""
        for request in requests:
            yield [(request, request.ingredients.build(allocate(request)))]

    def is_small(self, request: "Request") -> bool:
        """True if the entry is built in batches with others, in less time than its files take."""
        return False

    def read_ahead(self, request: "Request") -> None:
        """Starts to read the data of a request from the disk."""


class Request(NamedTuple):
    """An entry that is wanted."""

    entry: Entry
    kind: Kind
    ingredients: Any
    """`Ingredients`, of the type that `kind` builds."""


class _InMemory:
    def __call__(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.empty(shape, dtype=dtype)

    def filled(self, count: int, *names: str) -> None:
        pass


in_memory: Allocate = _InMemory()
"""Allocates arrays that are kept in no cache."""
