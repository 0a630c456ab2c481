"""Values that ranks exchange at the end of a rendezvous, and the texts of their errors. Pure."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import orjson

from trackbed.comm.store import StoreTampered
from trackbed.plural import number_of

MAX_NAMED_RANKS: Final = 8
_CAME_TO_ITS_END: Final = "came to the end without this call, as under `if rank == 0:`"
_SAME_CALLS: Final = (
    "all ranks must make the same calls in the same order, not under `if rank == 0:`; where ranks may see a signal at "
    "different steps, model.agree(flag) tells all of them"
)


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Failure of one rank."""

    rank: int
    cause: str
    """Type and message of its exception."""

    def encode(self) -> bytes:
        """Serializes to bytes."""
        return orjson.dumps([self.rank, self.cause])

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Parses the result of `encode`."""
        return cls(*_fields(raw, 2))


@dataclass(frozen=True, slots=True)
class RendezvousOutcome:
    """Outcome of a rendezvous, the same on all ranks."""

    value: Any = None
    """Result on success: any JSON-serializable value, or an `orjson.Fragment` of one."""
    error: str | None = None
    """Text of the error that all ranks raise otherwise."""
    is_broken: bool = False
    """True if the ranks can hold no further rendezvous."""
    is_stop: bool = False
    """True if the enclosing step reports the reason."""
    num_readers: int | None = None
    """Number of ranks that are there to read it; None for all."""

    def encode(self) -> bytes:
        """Serializes to bytes."""
        return orjson.dumps([self.value, self.error, self.is_broken, self.is_stop, self.num_readers])

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Parses the result of `encode`."""
        return cls(*_fields(raw, 5))


def _fields(raw: bytes, count: int) -> list[Any]:
    try:
        fields: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        fields = None
    if not isinstance(fields, list) or len(fields) != count:
        raise StoreTampered(f"a value must hold {count} fields that a rank wrote, but holds something else")
    return fields


def name_ranks(ranks: Iterable[int], *, total: int | None = None) -> str:
    """Formats ranks for a message, in order; a long list is abbreviated.

    Args:
        ranks: at least one.
        total: number of ranks, if `ranks` has only some of them.

    >>> name_ranks([3]), name_ranks([4, 0, 9]), name_ranks(range(100))
    ('rank 3', 'ranks 0, 4 and 9', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 others')
    """
    ordered = sorted(ranks)
    total = len(ordered) if total is None else total
    if total == 1:
        return f"rank {ordered[0]}"
    if total <= MAX_NAMED_RANKS + 1 and total == len(ordered):
        return f"ranks {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"
    named = ordered[:MAX_NAMED_RANKS]
    return f"ranks {', '.join(map(str, named))} and {number_of(total - len(named), 'other')}"


_MAX_CAUSE_CHARACTERS: Final = 10_000
"""Characters of a message that are sent to all ranks: stores refuse values of several MiB."""


def describe_cause(error: BaseException) -> str:
    """Formats the type and message of an exception.

    >>> describe_cause(ValueError("no")), describe_cause(KeyboardInterrupt())
    ('ValueError: no', 'KeyboardInterrupt')
    """
    message = "its text cannot be made"
    with contextlib.suppress(Exception):  # a text that fails must not hide that a rank has
        message = str(error).encode("utf-8", "backslashreplace").decode()  # names of files may have surrogates
    if len(message) > _MAX_CAUSE_CHARACTERS:
        message = f"{message[:_MAX_CAUSE_CHARACTERS]}... ({len(message):,} characters)"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def describe_failures(what: str, failures: Sequence[RankFailure], *, total: int) -> str:
    """Formats the failures of a step, in rank order; ranks with the same cause are listed together.

    Args:
        what: description of the step.
        failures: failures whose cause is known.
        total: number of ranks that failed, at least the length of `failures`.

    >>> describe_failures("building", [RankFailure(3, "OSError: full"), RankFailure(0, "OSError: full")], total=2)
    'building: rank 0 and rank 3: OSError: full'
    """
    by_cause: dict[str, list[int]] = {}
    for failure in sorted(failures, key=lambda failure: failure.rank):
        by_cause.setdefault(failure.cause, []).append(failure.rank)
    parts = [f"{_name_each(ranks)}: {cause}" for cause, ranks in by_cause.items()]
    if total > len(failures):
        parts.append(f"{total - len(failures)} {'more failed' if failures else 'failed without reporting a cause'}")
    return f"{what}: {'; '.join(parts)}"


def _name_each(ranks: Sequence[int]) -> str:
    names = [f"rank {rank}" for rank in ranks]
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def describe_silence(what: str, *, missing: Sequence[int], waiting: Sequence[int], seconds: float) -> str:
    """Formats the ranks that did not arrive, and those that waited for them.

    >>> describe_silence("building", missing=[2], waiting=[0, 1], seconds=30)
    'building: rank 2 sent no heartbeat for 30 s, while ranks 0 and 1 waited'
    """
    if not missing:
        return (
            f"{what}: all ranks have arrived, but none ended the rendezvous for {seconds:g} s: the last to arrive has "
            "died, or another process has changed the rendezvous store"
        )
    names = name_ranks(missing)
    return f"{what}: {names} sent no heartbeat for {seconds:g} s, while {name_ranks(waiting)} waited"


def describe_ended(ended: Mapping[int, int]) -> str:
    """Formats ranks whose processes have ended, and what to do.

    Args:
        ended: process of each, by rank; at least one.

    >>> describe_ended({1: 4242})
    "rank 1 has ended (process 4242 of this host is gone): its log, or the kernel's if it was killed, says why, unless
    its program came to the end without this call, as under `if rank == 0:`"
    """
    processes = ", ".join(str(ended[rank]) for rank in sorted(ended)[:MAX_NAMED_RANKS])
    names = name_ranks(ended)
    if len(ended) == 1:
        found = f"{names} has ended (process {processes} of this host is gone): its log"
        return f"{found}, or the kernel's if it was killed, says why, unless its program {_CAME_TO_ITS_END}"
    found = f"{names} have ended (processes {processes} of this host are gone): their logs"
    return f"{found}, or the kernel's if they were killed, say why, unless their programs {_CAME_TO_ITS_END}"


def describe_late(what: str, *, late: Sequence[int], rank: int) -> str:
    """Formats the ranks that others have been waiting for, for a while.

    >>> describe_late("save", late=[1, 2, 3], rank=0)
    'save: rank 0 waits for ranks 1, 2 and 3: every rank must make this call, not only some, as under `if rank == 0:`'
    """
    return (
        f"{what}: rank {rank} waits for {name_ranks(late)}: every rank must make this call, not only some, as under "
        "`if rank == 0:`"
    )


def describe_crossing(sides: Sequence[tuple[Sequence[int], str]]) -> str:
    """Formats ranks that wait for each other, and what to do.

    Args:
        sides: ranks that wait for an operation, and its description, twice.

    >>> describe_crossing([([0], "save"), ([1, 2], "reduction of gradients")])[:70]
    'rank 0 waits at save, and ranks 1 and 2 wait at reduction of gradients'
    """
    first, second = (f"{name_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} at {what}" for ranks, what in sides)
    return f"{first}, and {second}, each for the other: {_SAME_CALLS}"


def describe_operations(operations: Mapping[int, str]) -> str | None:
    """Formats the operations of ranks that met at different ones, and what to do; None if all are at the same one.

    Args:
        operations: description by rank; empty where it is not known.

    >>> describe_operations({0: "save", 1: "load", 2: ""})[:42]
    'rank 0 is at save, and rank 1 is at load: '
    """
    by_operation: dict[str, list[int]] = {}
    for rank, operation in sorted(operations.items()):
        if operation:
            by_operation.setdefault(operation, []).append(rank)
    if len(by_operation) < 2:
        return None
    parts = [
        f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} at {what}" for what, ranks in by_operation.items()
    ]
    return f"{', '.join(parts[:-1])}, and {parts[-1]}: {_SAME_CALLS}"


def describe_tampering(what: str, error: StoreTampered) -> str:
    """Formats the error for a store that another process has changed.

    >>> describe_tampering("building", StoreTampered("'rank/1' must be there, but is gone"))
    "building: another process has changed the rendezvous store: 'rank/1' must be there, but is gone"
    """
    return f"{what}: another process has changed the rendezvous store: {error}"
