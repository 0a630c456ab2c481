"""Groups whose ranks are threads of one process, for tests and scaling experiments."""

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from trackbed.comm.store import Connection, MemoryStore
from trackbed.comm.store_group import StoreGroup
from trackbed.errors import ArgumentError, CollectiveError

T = TypeVar("T")

_TIMEOUT_SECONDS: Final = 60.0


def run_ranks(
    size: int,
    function: Callable[[StoreGroup], T],
    *,
    timeout_seconds: float = _TIMEOUT_SECONDS,
    connect: Callable[[], Connection] | None = None,
    secret: bytes | None = None,
) -> list[T]:
    """Runs `function` on `size` ranks, each a thread. Returns its results, in rank order.

    A rank leaves the group when its function ends: the ranks that wait for it then raise an error.

    Args:
        size: number of threads, at least 1.
        function: called with the group, once on each rank.
        timeout_seconds: timeout of the group.
        connect: connects one rank to the shared store; by default a store in memory.
        secret: secret of the group; see `StoreGroup`.

    Raises:
        ArgumentError: `size` is below 1, or `timeout_seconds` is not above 0.
        BaseException: the exception of the first rank that failed.

    >>> run_ranks(3, lambda group: sum(group.all_gather(group.rank)))
    [3, 3, 3]
    """
    if size < 1:
        raise ArgumentError(f"size must be at least 1, but is {size}")
    if connect is None:
        store = MemoryStore()
        connect = lambda: store  # noqa: E731  default of an argument
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(group: StoreGroup) -> None:
        words = "has left: its function has returned"
        try:
            results[group.rank] = function(group)
        except BaseException as error:  # noqa: BLE001  raised in the caller
            errors.append(error)
            words = f"has left: {type(error).__name__}: {error}"
        group.leave(words)

    groups = [
        StoreGroup(connect, rank=rank, size=size, timeout_seconds=timeout_seconds, secret=secret)
        for rank in range(size)
    ]
    threads = [threading.Thread(target=run, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=_distance_from_cause)
    return [results[rank] for rank in range(size)]


def _distance_from_cause(error: BaseException) -> int:
    """Distance of an error from the failure: 0 for the original, 1 if chained to it, 2 if reported by another rank."""
    if not isinstance(error, CollectiveError):
        return 0
    return 2 if error.__cause__ is None else 1
