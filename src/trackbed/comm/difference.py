"""First difference between ranks that must have the same values.

Ranks compare digests, which are small, and send the values only if the digests differ.
"""

import base64
import hashlib
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, TypeVar

import orjson

from trackbed.comm.group import Group
from trackbed.comm.outcomes import name_ranks

H = TypeVar("H", bound=Hashable)

MAX_VALUE_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True)
class RankDifference:
    """First field in which a rank differs from another one, which has the usual values."""

    rank: int
    usual_rank: int
    field: str
    """Path of the field, such as `size[1]`; empty if the values differ as a whole."""
    value: Any
    """Value of the field on `rank`."""
    usual_value: Any
    """Value of the field on `usual_rank`."""

    def __str__(self) -> str:
        """Says who has what.

        >>> str(RankDifference(1, 0, "[2]", "lr=0.5", "lr=0.1"))
        'rank 1 has lr=0.5, and rank 0 lr=0.1'
        """
        return f"rank {self.rank} has {self.value}, and rank {self.usual_rank} {self.usual_value}"


def digest_of(value: Any) -> str:
    """Returns a digest of a JSON value, such as a list of lines."""
    return hashlib.sha256(orjson.dumps(value)).hexdigest()


def ranks_by_value(values: Mapping[int, H]) -> dict[H, list[int]]:
    """Returns the ranks that have each value: the most frequent value first; of several, that of the lowest rank.

    >>> ranks_by_value({0: "b", 1: "a", 2: "a"})
    {'a': [1, 2], 'b': [0]}
    """
    ranks: dict[H, list[int]] = {}
    for rank in sorted(values):
        ranks.setdefault(values[rank], []).append(rank)
    return dict(sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1][0])))


def unlike_ranks(values: Sequence[Hashable]) -> tuple[int, int] | None:
    """Returns a rank with the usual value, and the first rank with another one; None if all values are equal.

    >>> unlike_ranks(["b", "a", "a"]), unlike_ranks(["a", "a"])
    ((1, 0), None)
    """
    (usual, *_), *others = ranks_by_value(dict(enumerate(values))).values()
    return (usual, min(ranks[0] for ranks in others)) if others else None


def first_unlike_item(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Returns the number of the first item in which two lists differ; the length of the shorter one if none does."""
    shared = min(len(first), len(second))
    return next((number for number in range(shared) if first[number] != second[number]), shared)


def first_difference(
    usual: tuple[int, Any], other: tuple[int, Any], *, absent: str | None = None, field: str = ""
) -> RankDifference:
    """Returns the first difference of two JSON values that differ, as deep as both have the same structure.

    Args:
        usual: number of the rank with the usual value, and the value.
        other: number of another rank, and its value.
        absent: text for an item that the shorter of two lists does not have; None to compare lists of different lengths
            as a whole.
        field: path of the values.

    >>> first_difference((0, {"seed": 1, "size": [5, 6]}), (2, {"seed": 1, "size": [5, 7]}))
    RankDifference(rank=2, usual_rank=0, field='size[1]', value=7, usual_value=6)
    """
    (usual_rank, usual_value), (rank, value) = usual, other
    for step, one, another in _fields_of(usual_value, value, absent, field):
        if one != another:
            return first_difference((usual_rank, one), (rank, another), absent=absent, field=step)
    return RankDifference(rank, usual_rank, field, value, usual_value)


def difference_of(values: Mapping[int, Any], *, absent: str | None = None) -> RankDifference | None:
    """Returns the first difference between the usual one of these JSON values and the first other one; None if none.

    Args:
        values: value of each rank.
        absent: see `first_difference`.

    >>> str(difference_of({0: ["a", "b"], 1: ["a"], 4: ["a", "b"]}, absent="no more"))
    'rank 1 has no more, and rank 0 b'
    """
    ranks = list(values)
    unlike = unlike_ranks([digest_of(value) for value in values.values()])
    if unlike is None:
        return None
    usual, other = ((ranks[number], values[ranks[number]]) for number in unlike)
    return first_difference(usual, other, absent=absent)


def find_difference(
    group: Group, digests: Sequence[Hashable], value: Any, *, absent: str | None = None
) -> RankDifference | None:
    """Collective over `group` if the ranks differ: returns the first difference, the same on all ranks; None if none.

    Args:
        group: the ranks.
        digests: digest of the value of each rank, the same list on all ranks.
        value: JSON value of this rank.
        absent: see `first_difference`.
    """
    ranks = unlike_ranks(digests)
    if ranks is None:
        return None
    sent = group.all_gather(packed(value) if group.rank in ranks else None)
    return difference_of({rank: unpacked(sent[rank]) for rank in ranks}, absent=absent)


def packed(value: Any) -> str:
    """Returns a JSON value as a short text. Two ranks alone send one, and every rank reads all that is sent."""
    return base64.b85encode(zlib.compress(orjson.dumps(value))).decode()


def unpacked(text: str) -> Any:
    """Returns the value of `packed`."""
    return orjson.loads(zlib.decompress(base64.b85decode(text)))


def describe_difference(what: str, values: Mapping[int, bytes]) -> str | None:
    """Formats the ranks that differ from most ranks, with both values; None if all values are equal.

    Args:
        what: description of the values.
        values: JSON of each rank's value, at least one.

    >>> describe_difference("the plan", {0: b"7", 1: b"8", 2: b"7"})
    'the plan: must be the same on every rank, but rank 1 has 8, and ranks 0 and 2 have 7'
    """
    (usual, usual_ranks), *others = ranks_by_value(values).items()
    if not others:
        return None
    parts = [_having(ranks, value) for value, ranks in others[:3]]
    if len(others) > len(parts):
        parts.append(f"{sum(len(ranks) for _, ranks in others[3:])} ranks have still other values")
    return f"{what}: must be the same on every rank, but {', '.join(parts)}, and {_having(usual_ranks, usual)}"


def _fields_of(first: Any, second: Any, absent: str | None, field: str) -> list[tuple[str, Any, Any]]:
    """Returns path and both values of each field of two dictionaries or lists; nothing for other values."""
    if isinstance(first, dict) and isinstance(second, dict):
        prefix = f"{field}." if field else ""
        return [(f"{prefix}{name}", first.get(name), second.get(name)) for name in dict.fromkeys((*first, *second))]
    if isinstance(first, list) and isinstance(second, list) and (absent is not None or len(first) == len(second)):
        pairs = zip_longest(first, second, fillvalue=absent)
        return [(f"{field}[{number}]", *pair) for number, pair in enumerate(pairs)]
    return []


def _having(ranks: Sequence[int], value: bytes) -> str:
    text = value.decode()
    if len(text) > MAX_VALUE_CHARACTERS:
        text = f"{text[:MAX_VALUE_CHARACTERS]}... ({len(text)} characters)"
    return f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {text}"
