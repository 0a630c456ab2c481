"""Typed wrappers of the kernels that pack documents.

Shapes: D documents, L lengths of items and 0, N items, P packs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.kernels import _native
from trackbed.kernels.integers import check_at_least

LongDocuments = Literal["split", "cut", "drop"]
_LONG: Final = ("split", "cut", "drop")
_MOST_DOCUMENTS: Final = 2**32
_MOST_LENGTHS: Final = 2**31


@dataclass(frozen=True, slots=True)
class PackShape:
    """How documents are turned into items.

    Raises:
        ArgumentError: a field is out of range.
    """

    sequence_length: int
    """Places of a pack, in `[1, 2**31)`."""
    multiple: int = 1
    """Each item is padded to a multiple of this number of places, which must divide `sequence_length`."""
    long_documents: LongDocuments = "split"
    """A document that does not fit into a pack gives pieces of a whole pack each and the rest ("split"), its beginning
    ("cut"), or nothing ("drop")."""

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_at_least(1, sequence_length=self.sequence_length, multiple=self.multiple)
        if self.sequence_length >= _MOST_LENGTHS:
            raise ArgumentError(f"sequence_length must be below 2**31, found {self.sequence_length}")
        if self.sequence_length % self.multiple:
            raise ArgumentError(
                f"multiple must divide {self.sequence_length}, the sequence_length, found {self.multiple}"
            )
        if self.long_documents not in _LONG:
            raise ArgumentError(f"long_documents must be one of {', '.join(_LONG)}, found {self.long_documents!r}")

    @property
    def capacity(self) -> int:
        """Units of length that a pack holds."""
        return self.sequence_length // self.multiple

    def fields(self) -> tuple[int, int, int]:
        """Returns the fields as the kernels take them."""
        return self.sequence_length, self.multiple, _LONG.index(self.long_documents)


class PackPlan(NamedTuple):
    """Groups of packs with the same lengths, and where they begin."""

    nodes: npt.NDArray[np.uint64]
    """`[4 nodes]` words of `native/include/trackbed/packing.hpp`'s structures."""
    leaves: npt.NDArray[np.uint64]
    """`[3 leaves]` words."""
    num_packs: int

    @property
    def most_items(self) -> int:
        """Number of items in the pack that has most of them."""
        in_each = self.nodes.view(np.uint32)[7::8]
        return int(in_each.max()) if len(in_each) else 0


def count_items(lengths: npt.NDArray[np.int32], shape: PackShape) -> npt.NDArray[np.uint64]:
    """`[L]` number of items of each length, in units; that of length 0 is 0.

    Args:
        lengths: `[D]` tokens of each document.
        shape: what decides the items.
    """
    counts = np.empty(shape.capacity + 1, dtype=np.uint64)
    _native.count_items(_checked(lengths), shape.fields(), counts)
    return counts


def sort_items(
    lengths: npt.NDArray[np.int32], shape: PackShape, counts: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint32]:
    """`[N]` documents of the items, in rising order of length; those of one length in rising order.

    Args:
        lengths: `[D]` tokens of each document.
        shape: what decides the items.
        counts: `[L]` from `count_items`, of the same arguments: others would be written beyond the end.
    """
    documents = np.empty(int(counts.sum()), dtype=np.uint32)
    _native.sort_items(_checked(lengths), shape.fields(), counts, documents)
    return documents


def plan_packs(counts: npt.NDArray[np.uint64], most_items: int | None = None) -> PackPlan:
    """Packs items by best-fit decreasing: as many packs as if they were packed one by one.

    Args:
        counts: `[L]` number of items of each length; the longest one fills a pack.
        most_items: most items in a pack, at least 1; None for any number.

    Raises:
        ArgumentError: an argument is out of range.
    """
    if counts.dtype != np.uint64 or counts.ndim != 1 or len(counts) < 2 or counts[0] != 0:
        raise ArgumentError(
            f"counts must be a vector of uint64 that begins with 0, found {counts.dtype} {counts.shape}"
        )
    check_at_least(1, most_items=1 if most_items is None else most_items)
    most = len(counts) if most_items is None else min(most_items, len(counts))
    return PackPlan(*_native.plan_packs(np.ascontiguousarray(counts), most))


def find_packs(
    plan: PackPlan,
    first_items: npt.NDArray[np.uint64],
    documents: npt.NDArray[np.uint32],
    lengths: npt.NDArray[np.int32],
    shape: PackShape,
    packs: npt.NDArray[np.uint64],
    keys: npt.NDArray[np.uint64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Finds the pieces of documents in some packs.

    Args:
        plan: from `plan_packs`.
        first_items: `[L + 1]` number of shorter items than each length.
        documents: `[N]` from `sort_items`.
        lengths: `[D]` tokens of each document.
        shape: what decides the items.
        packs: numbers of packs, below `plan.num_packs`.
        keys: one for each pack; packs of one key have each item once.

    Returns:
        `[pieces, 3]` document, first input and one after the last input, of all packs one after the other, those of a
        pack in falling order of length; and how many pieces there are before each pack, and in all.

    Raises:
        ArgumentError: a number of a pack is out of range.
    """
    if len(packs) and int(packs.max()) >= plan.num_packs:
        raise ArgumentError(f"packs must be in [0, {plan.num_packs}), found {int(packs.max())}")
    if packs.shape != keys.shape:
        raise ArgumentError(f"packs and keys must be of one number, found {len(packs)} and {len(keys)}")
    pieces, firsts = _native.find_packs(
        plan.nodes, plan.leaves, first_items, documents, lengths, shape.fields(), packs, keys
    )
    return pieces.reshape(-1, 3), firsts


def find_visits(
    plan: PackPlan,
    first_items: npt.NDArray[np.uint64],
    documents: npt.NDArray[np.uint32],
    lengths: npt.NDArray[np.int32],
    shape: PackShape,
    visits: npt.NDArray[np.int64],
    *,
    seed: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Does the same as `find_packs` for visits of packs, epoch x P + pack; the key of an epoch is a word of a stream.

    Args:
        plan: from `plan_packs`, with P packs.
        first_items: as for `find_packs`.
        documents: as for `find_packs`.
        lengths: as for `find_packs`.
        shape: what decides the items.
        visits: `[B]` each at least 0.
        seed: start of the stream of keys, in `[0, 2**64)`: see `split_mix`.

    Raises:
        ArgumentError: the plan has no packs, or a visit is negative.
    """
    if len(visits) and (not plan.num_packs or int(visits.min()) < 0):
        raise ArgumentError(f"visits must be at least 0, of a plan that has packs, found {visits.min()}")
    pieces, firsts = _native.find_visits(
        plan.nodes, plan.leaves, first_items, documents, lengths, shape.fields(), plan.num_packs, seed, visits
    )
    return pieces.reshape(-1, 3), firsts


class JoinedBorders(NamedTuple):
    """Borders of several packs, one after the other."""

    places: npt.NDArray[np.int32]
    """`[n + 1]` sum of places up to each border."""
    padded: npt.NDArray[np.int32]
    """`[n + 1]` the same with padding."""
    trained: npt.NDArray[np.int32]
    """`[n + 1]` trained labels up to each border."""
    longest: npt.NDArray[np.int32]
    """`[1]` padded places of the longest document."""
    counts: npt.NDArray[np.int64]
    """`[2]` trained labels, and documents with any."""
    num_places: int
    """Padded places in all; where it is 2**31 or more, the borders are meaningless."""


def join_borders(rows: Mapping[str, npt.NDArray[Any]], *, keeps_all: bool) -> JoinedBorders:
    """Joins the borders of the rows of a batch of packs.

    Args:
        rows: `cu_seqlens`, `cu_seqlens_padded` and `cu_trained_tokens`, `[B, M]` int32; `max_seqlen`, `[B]` int32;
            `num_trained_tokens` and `num_documents`, `[B]` int64.
        keeps_all: True for B x (M - 1) + 1 borders, of which the last one is repeated.

    >>> rows = {"cu_seqlens": [[0, 3, 3], [0, 2, 4]], "cu_seqlens_padded": [[0, 3, 4], [0, 2, 4]]}
    >>> rows |= {"cu_trained_tokens": [[0, 1, 1], [0, 0, 2]], "max_seqlen": [3, 2]}
    >>> arrays = {name: np.array(values, dtype=np.int32) for name, values in rows.items()}
    >>> counts = {name: np.array([1, 2]) for name in ("num_trained_tokens", "num_documents")}
    >>> [one.tolist() for one in join_borders({**arrays, **counts}, keeps_all=False)[:3]]
    [[0, 3, 3, 5, 7], [0, 3, 4, 6, 8], [0, 1, 1, 1, 3]]
    """
    names = (
        "cu_seqlens",
        "cu_seqlens_padded",
        "cu_trained_tokens",
        "max_seqlen",
        "num_trained_tokens",
        "num_documents",
    )
    places, padded, trained, longest, num_trained, num_documents = (rows[name] for name in names)
    if not (places.shape == padded.shape == trained.shape and padded.ndim == 2 and padded.shape[1]):
        raise ArgumentError(f"borders must be of one shape, found {places.shape}, {padded.shape} and {trained.shape}")
    borders, counts, num_places = _native.join_borders(
        places, padded, trained, longest, num_trained, num_documents, keeps_all
    )
    size = len(borders) // 3
    return JoinedBorders(
        borders[:size], borders[size : 2 * size], borders[2 * size : -1], borders[-1:], counts, num_places
    )


def _checked(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    if lengths.dtype != np.int32 or lengths.ndim != 1 or not (lengths.flags.c_contiguous and lengths.flags.aligned):
        raise ArgumentError(f"lengths must be a contiguous vector of int32, found {lengths.dtype} {lengths.shape}")
    if len(lengths) > _MOST_DOCUMENTS:
        raise ArgumentError(f"lengths must be of at most 2**32 documents, found {len(lengths)}")
    return lengths
