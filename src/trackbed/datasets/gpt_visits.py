"""GPT samples in the orders "megatron" and "balanced": cut from visits to documents, as three indices say.

Shapes: D documents in the file, V visits to them, R samples, S tokens of a sample.
"""

from collections.abc import Sequence
from operator import index as as_index
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from trackbed.cache import Arrays, damage
from trackbed.files import MAPS
from trackbed.kernels import Visits
from trackbed.tokens import IndexedDataset, IndexedGroup

__all__ = ["Pieces", "VisitedSamples"]


class Pieces(NamedTuple):
    """The documents that a sample is cut from, in its order, and which of their tokens, half-open."""

    documents: list[int]
    starts: list[int]
    stops: list[int]


class VisitedSamples:
    """Samples as the three indices of a dataset say. Every number of an index is checked before it is used.

    Args:
        dataset: the file.
        visits: `document_index` `[V]`, `sample_index` `[R + 1, 2]` and `shuffle_index` `[R]`.
        length: tokens of a sample, the extra one included.
        extra_token: 1 if a sample also holds the first token of the next one, else 0.
        arrays: says where the indices lie, for errors.
    """

    def __init__(self, dataset: Any, visits: Visits, *, length: int, extra_token: int, arrays: Arrays) -> None:
        self._dataset = dataset
        self._visits = visits
        self._arrays = arrays
        self._length = length
        self._extra_token = extra_token

    def pieces(self, position: int) -> Pieces:
        """Where the sample at a position of the shuffled order comes from.

        Args:
            position: in `[-R, R)`.

        Raises:
            IndexError: there is no such position.
            CacheError: an index is damaged.
        """
        row, (first, begin), (last, end) = self._find_row(position)
        visits = self._visits.documents
        if not 0 <= first <= last < len(visits):
            self._refuse("sample_index", f"visits in order in [0, {len(visits)})", f"{first} and {last} in row {row}")
        documents: list[int] = visits[first : last + 1].tolist()
        num_documents = len(self._dataset.sequence_lengths) if self._has_lengths else len(self._dataset)
        if min(documents) < 0 or max(documents) >= num_documents:
            found = next(one for one in documents if not 0 <= one < num_documents)
            self._refuse("document_index", f"documents in [0, {num_documents})", f"{found} in visits {first} to {last}")
        sizes = self._sizes_of(documents)
        starts = [begin, *[0] * (len(documents) - 1)]
        stops = [*sizes[:-1], end + self._extra_token]
        total = sum(stops) - sum(starts)
        is_inside = 0 <= begin <= stops[0] and end >= 0 and stops[-1] <= sizes[-1]
        may_be_short = self._visits.may_be_short and row == len(self._visits.shuffle) - 1
        is_full = total == self._length or (may_be_short and total < self._length)
        if not (is_inside and is_full):
            self._refuse_row(row, total)
        return Pieces(documents, starts, stops)

    @property
    def _has_lengths(self) -> bool:
        """True if lengths may be asked for at no cost: those of a group are copied together first."""
        return not isinstance(self._dataset, IndexedGroup)

    def _find_row(self, position: int) -> tuple[int, list[int], list[int]]:
        """The row of the sample at a position, and where it and the next one begin."""
        shuffle, number = self._visits.shuffle, as_index(position)
        wanted = number + len(shuffle) if number < 0 else number
        if not 0 <= wanted < len(shuffle):
            msg = f"a sample must be in [-{len(shuffle)}, {len(shuffle)}), found {number}"
            raise IndexError(msg)
        row = int(shuffle[wanted])
        if not 0 <= row < len(shuffle):
            self._refuse("shuffle_index", f"rows in [0, {len(shuffle)})", f"{row} at position {wanted}")
        here, there = self._visits.rows[row : row + 2].tolist()
        return row, here, there

    def _sizes_of(self, documents: Sequence[int]) -> list[int]:
        """Tokens of each document."""
        if not self._has_lengths:
            lengths = self._dataset.index.sequence_lengths
            return [lengths[document] for document in documents]
        sizes: list[int] = self._dataset.sequence_lengths[documents].tolist()
        return sizes

    def read(self, position: int, *, padding: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Token ids of the sample at a position, filled up with padding, and the documents that they come from.

        Raises:
            IndexError: there is no such position.
            CacheError: an index is damaged.
            FormatError: the files are shorter than their index says.
        """
        documents, starts, stops = self.pieces(position)
        dataset = self._dataset
        if MAPS.is_tight and isinstance(dataset, IndexedDataset):
            dataset.note_use()
        if type(dataset) is IndexedDataset:
            size, read, dtype = dataset.index.dtype_size, dataset.bin_reader.read, dataset.index.dtype
            pointers = dataset.index.sequence_pointers[documents].tolist()
            parts = [
                read(dtype, stop - start, pointer + start * size)
                for pointer, start, stop in zip(pointers, starts, stops, strict=True)
            ]
        else:
            parts = [
                dataset.get(document, offset=start, length=stop - start)
                for document, start, stop in zip(documents, starts, stops, strict=True)
            ]
        missing = self._length - sum(map(len, parts))
        if missing > 0:
            parts.append(np.full(missing, padding, dtype=np.int64))
        return np.concatenate(parts, dtype=np.int64), np.array(documents, dtype=np.int64)

    def _refuse(self, name: str, wanted: str, found: str) -> NoReturn:
        raise damage(self._arrays, [name], wanted, found)

    def _refuse_row(self, row: int, total: int) -> NoReturn:
        names = ["document_index", "sample_index", "shuffle_index"]
        raise damage(self._arrays, names, f"documents that make up samples of {self._length}", f"{total} in row {row}")
