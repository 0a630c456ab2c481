"""Reading of GPT samples that are defined by three indices: cut from visits to documents.

Shapes: D documents in the file, V visits to them, R samples, S tokens of a sample.
"""

from operator import index as as_index
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from trackbed.cache import Arrays, damage
from trackbed.datasets.low_level import is_plain, reads_in_rounds
from trackbed.datasets.samples import SamplePieces
from trackbed.files import MAPS
from trackbed.tokens import IndexedDataset, IndexedGroup

ARRAYS: Final = ("document_index", "sample_index", "shuffle_index")


class VisitArrays(NamedTuple):
    """The three indices of a dataset."""

    documents: npt.NDArray[np.integer[Any]]
    """`[V]` `document_index`."""
    rows: npt.NDArray[np.integer[Any]]
    """`[R + 1, 2]` `sample_index`."""
    shuffle: npt.NDArray[np.integer[Any]]
    """`[R]` `shuffle_index`."""
    arrays: Arrays
    """The arrays as the cache returned them, for errors."""


class VisitedSamples:
    """Reads samples by the three indices of a dataset. Every number of an index is checked before it is used.

    Args:
        dataset: the low-level dataset.
        length: tokens of a sample, the extra one included.
        extra_token: 1 if a sample also holds the first token of the next one, else 0.
        may_be_short: True if the last sample may be partial.
    """

    def __init__(self, dataset: Any, *, length: int, extra_token: int, may_be_short: bool) -> None:
        self._dataset = dataset
        self._length = length
        self._extra_token = extra_token
        self._may_be_short = may_be_short
        self._is_group = isinstance(dataset, IndexedGroup)
        self._is_plain = is_plain(dataset)
        self._reads_in_rounds = reads_in_rounds(dataset)

    def pieces(self, visits: VisitArrays, position: int) -> SamplePieces:
        """Returns the pieces of the sample at a position of the shuffled order.

        Args:
            visits: the indices.
            position: in `[-R, R)`.
        """
        row, (first, begin), (last, end) = _find_row(visits, position)
        num_visits = len(visits.documents)
        if not 0 <= first <= last < num_visits:
            _refuse(visits, ARRAYS[1], f"visits in order in [0, {num_visits})", f"{first} and {last} in row {row}")
        chosen = visits.documents[first : last + 1]
        documents: list[int] = chosen.tolist()
        num_documents = len(self._dataset) if self._is_group else len(self._dataset.sequence_lengths)
        if min(documents) < 0 or max(documents) >= num_documents:
            found = next(one for one in documents if not 0 <= one < num_documents)
            where = f"{found} in visits {first} to {last}"
            _refuse(visits, ARRAYS[0], f"documents in [0, {num_documents})", where)
        stops = self._sizes_of(documents, chosen)
        size = stops[-1]
        stops[-1] = end + self._extra_token
        starts = [begin, *[0] * (last - first)]
        total = sum(stops) - begin
        is_inside = 0 <= begin <= stops[0] and end >= 0 and stops[-1] <= size
        if total != self._length or not is_inside:
            is_last = self._may_be_short and row == len(visits.shuffle) - 1
            if not (is_inside and is_last and total < self._length):
                wanted = f"documents that make up samples of {self._length}"
                raise damage(visits.arrays, ARRAYS, wanted, f"{total} in row {row}")
        return SamplePieces(documents, starts, stops)

    def _sizes_of(self, documents: list[int], chosen: npt.NDArray[np.integer[Any]]) -> list[int]:
        """Returns the number of tokens in each document."""
        if self._is_group:
            lengths = self._dataset.index.sequence_lengths
            return [lengths[document] for document in documents]
        sizes: list[int] = self._dataset.sequence_lengths[chosen].tolist()
        return sizes

    def read(
        self, visits: VisitArrays, position: int, *, padding: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the token ids of the sample at a position, padded if short, and the documents that they come from."""
        documents, starts, stops = self.pieces(visits, position)
        dataset = self._dataset
        if MAPS.is_tight and isinstance(dataset, IndexedDataset):
            dataset.note_use()
        lengths = [stop - start for start, stop in zip(starts, stops, strict=True)]
        if self._reads_in_rounds:
            parts = dataset.get_several(documents, starts, lengths)
        elif self._is_plain:
            index, read = dataset.index, dataset.bin_reader.read
            size, dtype = index.dtype_size, index.dtype
            pointers = index.sequence_pointers[np.array(documents)].tolist()
            parts = [
                read(dtype, length, pointer + start * size)
                for pointer, start, length in zip(pointers, starts, lengths, strict=True)
            ]
        else:
            parts = [
                dataset.get(document, offset=start, length=length)
                for document, start, length in zip(documents, starts, lengths, strict=True)
            ]
        missing = self._length - sum(map(len, parts))
        if missing > 0:
            parts.append(np.full(missing, padding, dtype=np.int64))
        return np.concatenate(parts, dtype=np.int64), np.array(documents, dtype=np.int64)


def _find_row(visits: VisitArrays, position: int) -> tuple[int, list[int], list[int]]:
    """Returns the row of the sample at a position, and the visit and offset at which it and the next one begin."""
    shuffle, number = visits.shuffle, as_index(position)
    wanted = number + len(shuffle) if number < 0 else number
    if not 0 <= wanted < len(shuffle):
        raise IndexError(f"a sample must be in [-{len(shuffle)}, {len(shuffle)}), found {number}")
    row = int(shuffle[wanted])
    if not 0 <= row < len(shuffle):
        _refuse(visits, ARRAYS[2], f"rows in [0, {len(shuffle)})", f"{row} at position {wanted}")
    here, there = visits.rows[row : row + 2].tolist()
    return row, here, there


def _refuse(visits: VisitArrays, name: str, wanted: str, found: str) -> NoReturn:
    raise damage(visits.arrays, [name], wanted, found)
