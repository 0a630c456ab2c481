"""Requests for entries: what is wanted, and how it is built if it is missing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trackbed.cache.entry import ArraySpec, Entry

__all__ = ["Allocate", "Arrays", "Kind", "OneByOne", "Request", "in_memory"]

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


class Kind(Protocol):
    """How entries of one kind are built."""

    is_blend: bool
    """True for the index of a blend, which one thread builds, and which is scheduled first."""

    def build(
        self, requests: "Sequence[Request]", allocate: "Callable[[Request], Allocate]"
    ) -> "Iterator[Sequence[tuple[Request, Arrays]]]":
        """Builds the arrays of each request, and yields them in batches that are committed at once.

        Arrays of `allocate` are valid until the next batch.
        """
        ...

    def expected(self, request: "Request") -> Mapping[str, ArraySpec]:
        """Returns dtypes and shapes of the arrays. May read the data; called only where no manifest tells."""
        ...

    def cost(self, request: "Request") -> float:
        """Estimates the nanoseconds of one thread to build it, without reading the data."""
        ...

    def is_small(self, request: "Request") -> bool:
        """True if it is built in batches with others, in less time than its files take."""
        ...

    def read_ahead(self, request: "Request") -> None:
        """Starts to read the data of a request from the disk."""
        ...


class Request(NamedTuple):
    """An entry that is wanted."""

    entry: Entry
    kind: Kind
    ingredients: Any
    """Input of `kind`."""

    @property
    def is_small(self) -> bool:
        """True if it is built in batches with others."""
        return self.kind.is_small(self)


class OneByOne:
    """A kind of entries that are built one at a time.

    Args:
        build_one: builds the arrays from the ingredients of a request.
        expected: gives their dtypes and shapes.
        cost: gives the estimated nanoseconds to build them.
        is_blend: see `Kind`.
    """

    def __init__(
        self,
        build_one: Callable[[Any, Allocate], Arrays],
        expected: Callable[[Any], Mapping[str, ArraySpec]],
        *,
        cost: Callable[[Any], float] = lambda _: 0.0,
        is_blend: bool = False,
    ) -> None:
        self.is_blend = is_blend
        self._cost = cost
        self._build_one = build_one
        self._expected = expected

    def build(
        self, requests: Sequence[Request], allocate: Callable[[Request], Allocate]
    ) -> Iterator[Sequence[tuple[Request, Arrays]]]:
        """Builds the arrays of each request."""
        for request in requests:
            yield [(request, self._build_one(request.ingredients, allocate(request)))]

    def expected(self, request: Request) -> Mapping[str, ArraySpec]:
        """Returns dtypes and shapes of the arrays."""
        return self._expected(request.ingredients)

    def cost(self, request: Request) -> float:
        """Estimates the nanoseconds to build it."""
        return self._cost(request.ingredients)

    def is_small(self, request: Request) -> bool:  # noqa: ARG002  none is
        """False: none is built in a batch."""
        return False

    def read_ahead(self, request: Request) -> None:
        """Does nothing."""


class _InMemory:
    def __call__(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:  # noqa: ARG002  Allocate's signature
        return np.empty(shape, dtype=dtype)

    def filled(self, count: int, *names: str) -> None:
        pass


in_memory: Allocate = _InMemory()
"""Allocates arrays that are kept in no cache."""
