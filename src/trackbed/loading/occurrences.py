"""Where a document is read: the samples of a dataset that have tokens of it, by its indices only.

Shapes: N positions, R samples of one dataset.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.datasets import BlendedDataset, GPTDataset
from trackbed.datasets.blend.dataset import SplitDataset
from trackbed.datasets.gpt.instant import InstantSamples
from trackbed.datasets.gpt.packed import PackedSamples
from trackbed.errors import ArgumentError
from trackbed.index import InstantOrder
from trackbed.kernels import Visits
from trackbed.tokens import IndexedGroup

Positions = npt.NDArray[np.int64]
_STEP = 1 << 22


def find_document(dataset: SplitDataset, prefix: str, document: int) -> Positions:
    """Finds the samples that have tokens of a document, by the inverse of the order.

    Args:
        dataset: a GPT dataset, or a blend of them.
        prefix: prefix of the pair that has the document; of a group, that of the member.
        document: number of the document in that pair; number of the sequence where documents have several.

    Returns:
        `[N]` positions in the dataset, in rising order; none if the document is in another split, or has no tokens.

    Raises:
        ArgumentError: the dataset has no such pair, or the pair no such document.
    """
    members: Sequence[Any] = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
    found: list[Positions] = []
    is_known = False
    for number, member in enumerate(members):
        if not isinstance(member, GPTDataset):
            raise ArgumentError(f"dataset must be a GPTDataset or a blend of them, found a {type(member).__name__}")
        for sequence in _sequences(member, prefix, document):
            is_known = True
            found.append(_positions(dataset, number, member, sequence))
    if not is_known:
        raise ArgumentError(f"{prefix}: must be a pair of the dataset, found none of this prefix")
    return np.unique(np.concatenate(found))


def _sequences(member: GPTDataset, prefix: str, document: int) -> list[int]:
    """Numbers of a document in the low-level dataset, one for each pair of the prefix."""
    low_level = member.dataset
    pairs = low_level.members if isinstance(low_level, IndexedGroup) else [low_level]
    found, first = [], 0
    for pair in pairs:
        count = len(pair)
        if _is_same(pair.path_prefix, prefix):
            if not 0 <= document < count:
                raise ArgumentError(f"{prefix}: document must be in [0, {count}), found {document}")
            found.append(first + document)
        first += count
    return found


def _is_same(one: str, other: str) -> bool:
    return one == other or ("://" not in one and os.path.abspath(one) == os.path.abspath(other))  # noqa: PTH100


def _positions(dataset: SplitDataset, number: int, member: GPTDataset, sequence: int) -> Positions:
    samples = member.opened_samples
    if isinstance(samples, InstantSamples):
        stored = _stretches(samples, sequence)
        order = dataset.order if isinstance(dataset, BlendedDataset) else samples.order if stored else None
        if not stored or not isinstance(order, InstantOrder):
            return np.empty(0, dtype=np.int64)
        return np.concatenate([order.find(number, sample) for sample in stored])
    if isinstance(samples, PackedSamples):
        return _packed(dataset, number, samples, sequence)
    layout = samples.layout()
    if not isinstance(layout, Visits):
        raise ArgumentError(f"dataset must have an index of visits, found {layout!r}")
    own = _visited(layout, member, sequence)
    if not isinstance(dataset, BlendedDataset) or not len(own):
        return own
    return _drawn(dataset, number, own)


def _packed(dataset: SplitDataset, number: int, samples: PackedSamples, sequence: int) -> Positions:
    """Positions of the packs that have a piece of a sequence of the file: other ones in each epoch."""
    order = (
        dataset.order if isinstance(dataset, BlendedDataset) else samples.order if samples.samples_per_epoch else None
    )
    if not isinstance(order, InstantOrder):
        return np.empty(0, dtype=np.int64)
    found: list[int] = []
    epoch = 0
    while len(packs := samples.holding(sequence, epoch)):
        visits = [order.find(number, pack) for pack in packs.tolist()]  # one position for each epoch, in rising order
        if not any(len(positions) > epoch for positions in visits):
            break
        found += [int(positions[epoch]) for positions in visits if len(positions) > epoch]
        epoch += 1
    return np.array(found, dtype=np.int64)


def _stretches(samples: InstantSamples, sequence: int) -> range:
    """Numbers of the stretches that have tokens of a sequence of the file."""
    start, stop = samples.run
    index = samples.dataset.index
    length = int(index.sequence_lengths[sequence]) if start <= sequence < stop else 0
    if not length:
        return range(0)
    if samples.repeats:
        return range(1)
    first = (int(index.sequence_pointers[sequence]) - samples.origin_byte) // int(index.dtype_size)
    size, extra = samples.sequence_length, samples.extra_token
    lowest = max(0, (first - size - extra) // size + 1)
    return range(lowest, min(-(-(first + length) // size), samples.samples_per_epoch))


def _visited(visits: Visits, member: GPTDataset, sequence: int) -> Positions:
    """Positions in a dataset whose samples have tokens of a sequence, by its three indices."""
    firsts = visits.rows[:, 0]
    rows: set[int] = set()
    for visit in _where(visits.documents, np.array([sequence])).tolist():
        lowest = max(0, int(np.searchsorted(firsts, visit, side="left")) - 1)
        rows.update(range(lowest, min(int(np.searchsorted(firsts, visit, side="right")), len(visits.shuffle))))
    found = _where(visits.shuffle, np.array(sorted(rows), dtype=np.int64))
    has_tokens = [
        any(piece.document == sequence and piece.stop > piece.start for piece in member.pieces(position))
        for position in found.tolist()
    ]
    return found[np.array(has_tokens, dtype=np.bool_)]


def _drawn(dataset: BlendedDataset, number: int, own: Positions) -> Positions:
    """Positions in a blend at which samples of a dataset are drawn."""
    found = [np.empty(0, dtype=np.int64)]
    for start in range(0, len(dataset), _STEP):
        datasets, samples = dataset.draw(np.arange(start, min(start + _STEP, len(dataset))))
        found.append(start + np.flatnonzero((datasets == number) & np.isin(samples, own)))
    return np.concatenate(found)


def _where(array: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> Positions:
    """Places in an array that have one of some values."""
    starts = range(0, len(array), _STEP)
    found = [start + np.flatnonzero(np.isin(array[start : start + _STEP], wanted)) for start in starts]
    return np.concatenate([np.empty(0, dtype=np.int64), *found])
