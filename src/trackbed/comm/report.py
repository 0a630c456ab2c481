"""What ranks tell each other at the end of a meeting, and in which words. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import orjson

from trackbed.comm.store import StoreTampered

__all__ = [
    "Failure",
    "Verdict",
    "describe_cause",
    "describe_difference",
    "describe_failures",
    "describe_silence",
    "describe_tampering",
    "name_ranks",
]

MAX_NAMED_RANKS: Final = 8
MAX_VALUE_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank failed."""

    rank: int
    cause: str
    """Type and words of its exception."""

    def encode(self) -> bytes:
        """As bytes."""
        return orjson.dumps([self.rank, self.cause])

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Parse what `encode` returned.

        Raises:
            StoreTampered: it is something else.
        """
        return cls(*_fields(raw, 2))


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a meeting ended: the same for all ranks."""

    value: Any = None
    """What the ranks get, if it went well: anything that JSON holds, or a `orjson.Fragment` of it."""
    error: str | None = None
    """What all ranks raise otherwise."""
    is_broken: bool = False
    """Whether the ranks cannot meet again."""
    is_stop: bool = False
    """Whether the reason is told by the step around this one."""

    def encode(self) -> bytes:
        """As bytes."""
        return orjson.dumps([self.value, self.error, self.is_broken, self.is_stop])

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Parse what `encode` returned.

        Raises:
            StoreTampered: it is something else.
        """
        return cls(*_fields(raw, 4))


def _fields(raw: bytes, count: int) -> list[Any]:
    try:
        fields: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        fields = None
    if not isinstance(fields, list) or len(fields) != count:
        msg = f"a value must hold {count} fields that a rank wrote, but holds something else"
        raise StoreTampered(msg)
    return fields


def name_ranks(ranks: Iterable[int], *, total: int | None = None) -> str:
    """Ranks in words, in order, the many of them abbreviated.

    Args:
        ranks: at least one.
        total: how many there are, where `ranks` is only some of them.

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
    return f"ranks {', '.join(map(str, named))} and {total - len(named)} others"


def describe_cause(error: BaseException) -> str:
    """Type and words of an exception.

    >>> describe_cause(ValueError("no")), describe_cause(KeyboardInterrupt())
    ('ValueError: no', 'KeyboardInterrupt')
    """
    words = str(error)
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def describe_failures(what: str, failures: Sequence[Failure], *, total: int) -> str:
    """What was being done, and why which ranks failed, in rank order; ranks with the same cause stand together.

    Args:
        what: what the ranks were doing.
        failures: those that are told of.
        total: how many ranks failed, at least as many as `failures` tells of.

    >>> describe_failures("building", [Failure(3, "OSError: full"), Failure(0, "OSError: full")], total=2)
    'building: rank 0 and rank 3: OSError: full'
    """
    by_cause: dict[str, list[int]] = {}
    for failure in sorted(failures, key=lambda failure: failure.rank):
        by_cause.setdefault(failure.cause, []).append(failure.rank)
    told = [f"{_name_each(ranks)}: {cause}" for cause, ranks in by_cause.items()]
    if total > len(failures):
        told.append(f"{total - len(failures)} {'more failed' if failures else 'failed and could not say why'}")
    return f"{what}: {'; '.join(told)}"


def _name_each(ranks: Sequence[int]) -> str:
    names = [f"rank {rank}" for rank in ranks]
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def describe_silence(what: str, *, missing: Sequence[int], waited: Sequence[int], seconds: float) -> str:
    """Who did not come, and who waited.

    >>> describe_silence("building", missing=[2], waited=[0, 1], seconds=30)
    'building: rank 2 gave no sign of life for 30 s, while ranks 0 and 1 waited'
    """
    if not missing:
        return (
            f"{what}: all ranks have come, but nobody ended the meeting for {seconds:g} s: the last to come has died, "
            "or another process has changed the store over which the ranks meet"
        )
    who = name_ranks(missing)
    return f"{what}: {who} gave no sign of life for {seconds:g} s, while {name_ranks(waited)} waited"


def describe_tampering(what: str, error: StoreTampered) -> str:
    """Sentence for a store that another process has changed.

    >>> describe_tampering("building", StoreTampered("'rank/1' must be there, but is gone"))
    "building: another process has changed the store over which the ranks meet: 'rank/1' must be there, but is gone"
    """
    return f"{what}: another process has changed the store over which the ranks meet: {error}"


def describe_difference(what: str, values: Mapping[int, bytes]) -> str | None:
    """Who differs from most ranks, and both values; None if all are equal.

    Args:
        what: what must be the same.
        values: JSON of each rank's value, at least one.

    >>> describe_difference("the plan", {0: b"7", 1: b"8", 2: b"7"})
    'the plan: must be the same on every rank, but rank 1 has 8, and ranks 0 and 2 have 7'
    """
    holders: dict[bytes, list[int]] = {}
    for rank in sorted(values):
        holders.setdefault(values[rank], []).append(rank)
    if len(holders) == 1:
        return None
    # Of two values that as many ranks have, the lower rank's is taken for the usual one.
    usual, *others = sorted(holders, key=lambda value: (-len(holders[value]), holders[value][0]))
    told = [_having(holders[value], value) for value in others[:3]]
    if len(others) > len(told):
        told.append(f"{sum(len(holders[value]) for value in others[3:])} ranks have yet others")
    return f"{what}: must be the same on every rank, but {', '.join(told)}, and {_having(holders[usual], usual)}"


def _having(ranks: Sequence[int], value: bytes) -> str:
    text = value.decode()
    if len(text) > MAX_VALUE_CHARACTERS:
        text = f"{text[:MAX_VALUE_CHARACTERS]}... ({len(text)} characters)"
    return f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {text}"
