"""Groups: several pairs read as one dataset without copying.

Shapes: G pairs, N sequences and D documents of all pairs together.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import index as as_index
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.tokens.format import PairHeader
from trackbed.tokens.read_headers import fetch_copies, read_headers
from trackbed.tokens.reader import IndexedDataset
from trackbed.tokens.source import RangeError, Source, Tokens
from trackbed.tokens.stored.config import ObjectStorageConfig
from trackbed.tokens.stored.source import StoredSource, read_spans


class IndexedGroup:
    """The documents of all pairs in the given order, as `merge` would write them, read from the original files.

    Opening a group reads a few bytes of each index; a file is mapped when it is first read. The object can be pickled
    and used after a fork.

    Args:
        path_prefix: name of the group, used like the prefix of a pair.
        members: `[G]` the pairs, at least one.
    """

    def __init__(self, path_prefix: str, members: Sequence[IndexedDataset]) -> None:
        self.path_prefix = path_prefix
        self.members = tuple(members)
        tokens = (member.index.data_bytes // member.index.dtype_size for member in members)
        self._first_sequences = list(accumulate(map(len, members), initial=0))
        self._first_tokens = list(accumulate(tokens, initial=0))
        self.index = GroupIndex(self)

    @classmethod
    def open(
        cls,
        path_prefix: str,
        pairs: Sequence[str],
        *,
        mmap: bool = True,
        object_storage_config: ObjectStorageConfig | None = None,
        pair_class: type[IndexedDataset] = IndexedDataset,
        headers: Mapping[str, PairHeader] | None = None,
    ) -> "IndexedGroup":
        """Opens a group by the prefixes of its pairs.

        Args:
            path_prefix: name of the group.
            pairs: `[G]` prefixes, at least one.
            mmap: True to map the `.bin` files, False to read them piece by piece.
            object_storage_config: options of pairs in object stores, needed if there are any.
            pair_class: class of the pairs.
            headers: headers that were read already, by prefix; the others are read.

        Raises:
            ArgumentError: `pairs` is empty, a file is missing, or the pairs have different token types.
            FormatError: an index is damaged, or points outside its data.
        """
        if not pairs:
            raise ArgumentError(f"{path_prefix}: a group must have at least one pair, found none")
        storage = object_storage_config
        known = headers or {}
        missing = [pair for pair in pairs if pair not in known]
        headers = {
            **known,
            **read_headers(missing, idx_cache=None if storage is None else storage.path_to_idx_cache),
        }
        members = [
            pair_class(pair, mmap=mmap, object_storage_config=storage, open_when_read=True, header=headers.get(pair))
            for pair in pairs
        ]
        first = np.dtype(members[0].index.dtype).name
        for member in members:
            name = np.dtype(member.index.dtype).name
            if name != first:
                found = f"{first} in {pairs[0]} and {name} in {member.path_prefix}"
                raise ArgumentError(f"{path_prefix}: the pairs of a group must have tokens of one type, found {found}")
        return cls(path_prefix, members)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the group; a copy reopens the pairs."""
        return type(self), (self.path_prefix, self.members)

    @property
    def identity(self) -> dict[str, Any]:
        """Identity of all files and of their order, which tells them from other files of the same names."""
        found = [member.identity for member in self.members]
        digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
        return {"bin_bytes": sum(one["bin_bytes"] for one in found), "pairs": len(found), "pairs_sha256": digest}

    def __len__(self) -> int:
        """Number of sequences in all pairs."""
        return self._first_sequences[-1]

    @cached_property
    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        """`[N]` tokens in each sequence, concatenated on first use."""
        fetch_copies(member.index for member in self.members)
        return np.concatenate([member.index.reopened().sequence_lengths for member in self.members])

    @cached_property
    def document_indices(self) -> npt.NDArray[np.int64]:
        """`[D + 1]` first sequence of each document, then N; concatenated on first use."""
        fetch_copies(member.index for member in self.members)
        first = zip(self.members, self._first_sequences, strict=False)
        borders = [member.index.reopened().document_indices[1:] + before for member, before in first]
        return np.concatenate([np.zeros(1, dtype=np.int64), *borders])

    def __getitem__(self, idx: int | np.integer[Any] | slice) -> Tokens | list[Tokens]:
        """Tokens of one sequence, or a list of them for a slice without a step.

        Raises:
            IndexError: there is no such sequence.
            ValueError: the slice has a step.
        """
        if not isinstance(idx, slice):
            return self.get(idx)
        start, stop, step = idx.indices(len(self))
        if step != 1:
            raise ValueError(f"{self.path_prefix}: a slice must take every sequence, found a step of {step}")
        return self.get_several(range(start, stop))

    def get(self, idx: int | np.integer[Any], offset: int = 0, length: int | np.integer[Any] | None = None) -> Tokens:
        """Tokens `[offset, offset + length)` of sequence `idx`, to its end if `length` is None.

        The range may extend into the following sequences and pairs, but not past the last pair.

        Raises:
            IndexError: there is no such sequence.
            RangeError: the range lies outside the `.bin` files.
        """
        (tokens,) = self.get_several([as_index(idx)], [int(offset)], None if length is None else [int(length)])
        return tokens

    def get_several(
        self, sequences: Sequence[int], offsets: Sequence[int] | None = None, lengths: Sequence[int] | None = None
    ) -> list[Tokens]:
        """`get` of several sequences. Those in object stores are requested together.

        Args:
            sequences: their numbers.
            offsets: first token of each range; None for the first of each sequence.
            lengths: number of tokens of each range; None for the rest of each sequence.

        Raises:
            IndexError: there is no such sequence.
            RangeError: a range lies outside the `.bin` files.
            StoreError: an object was replaced, or the store does not give it.
        """
        starts = [0] * len(sequences) if offsets is None else offsets
        counts: Sequence[int | None] = [None] * len(sequences) if lengths is None else lengths
        ranges = [self._range(*one) for one in zip(sequences, starts, counts, strict=True)]
        spans = [list(self._spans(start, stop)) for start, stop in ranges]
        stored = [
            (source, count, offset)
            for some in spans
            for source, count, offset in some
            if isinstance(source, StoredSource)
        ]
        fetched = iter(read_spans(self.index.dtype, stored) if stored else ())

        def read(source: Source, count: int, offset: int) -> Tokens:
            return next(fetched) if isinstance(source, StoredSource) else source.read(self.index.dtype, count, offset)

        return [self._joined([read(*span) for span in some]) for some in spans]

    def _range(self, idx: int, offset: int, length: int | None) -> tuple[int, int]:
        """Returns the tokens of the concatenated pairs that `get` returns."""
        member, sequence = self.find(idx)
        index = self.members[member].index
        begin = self._first_tokens[member] + int(index.sequence_pointers[sequence]) // index.dtype_size
        start = begin + offset
        count = int(index.sequence_lengths[sequence]) - offset if length is None else length
        if not 0 <= start <= start + count <= self._first_tokens[-1]:
            where = f"tokens [{offset}, {offset + count}) of sequence {idx}"
            raise RangeError(
                f"{self.path_prefix}: {where} must lie inside the files, which have {self._first_tokens[-1]}"
            )
        return start, start + count

    def _spans(self, start: int, stop: int) -> Iterator[tuple[Source, int, int]]:
        """Yields source, count and first byte of each part of tokens `[start, stop)` of the concatenated pairs."""
        while start < stop:
            member = bisect_right(self._first_tokens, start) - 1
            reach = min(stop, self._first_tokens[member + 1])
            offset = (start - self._first_tokens[member]) * self.index.dtype_size
            yield self.members[member].bin_reader, reach - start, offset
            start = reach

    def _joined(self, pieces: list[Tokens]) -> Tokens:
        """Concatenates arrays; a single one is returned as it is."""
        if not pieces:
            return np.empty(0, dtype=self.index.dtype)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def find(self, idx: int | np.integer[Any]) -> tuple[int, int]:
        """Number of the pair that contains a sequence, and the sequence's number in that pair.

        Raises:
            IndexError: there is no such sequence.
        """
        number = as_index(idx)
        wanted = number + len(self) if number < 0 else number
        if not 0 <= wanted < len(self):
            raise IndexError(f"{self.path_prefix}: a sequence must be in [-{len(self)}, {len(self)}), found {number}")
        member = bisect_right(self._first_sequences, wanted) - 1
        return member, wanted - self._first_sequences[member]

    def tokens_before_pair(self, member: int) -> int:
        """Number of tokens in the pairs before `member`, which is in `[0, G]`."""
        return self._first_tokens[member]


class GroupIndex:
    """The index that the merged pair would have, with entries computed on demand.

    Args:
        group: the pairs.
    """

    def __init__(self, group: IndexedGroup) -> None:
        first = group.members[0].index
        self.dtype, self.dtype_size = first.dtype, first.dtype_size
        self.sequence_count = len(group)
        self.document_count = 1 + sum(member.index.document_count - 1 for member in group.members)
        self.data_bytes = group.tokens_before_pair(len(group.members)) * self.dtype_size
        self.sequence_lengths = _Entries(group, self._length)
        self.sequence_pointers = _Entries(group, self._pointer)
        self._group = group

    def _length(self, member: int, sequence: int) -> int:
        return int(self._group.members[member].index.sequence_lengths[sequence])

    def _pointer(self, member: int, sequence: int) -> int:
        before = self._group.tokens_before_pair(member) * self.dtype_size
        return before + int(self._group.members[member].index.sequence_pointers[sequence])


class _Entries(Sequence[int]):
    """`[N]` entries of an index, each looked up in the pair that contains it.

    Args:
        group: the pairs.
        look_up: returns the entry of a sequence, given the number of its pair and its number in that pair.
    """

    def __init__(self, group: IndexedGroup, look_up: Callable[[int, int], int]) -> None:
        self._group = group
        self._look_up = look_up

    def __len__(self) -> int:
        return len(self._group)

    @overload
    def __getitem__(self, idx: int) -> int: ...
    @overload
    def __getitem__(self, idx: slice) -> list[int]: ...
    def __getitem__(self, idx: int | slice) -> int | list[int]:
        if isinstance(idx, slice):
            return [self[sequence] for sequence in range(*idx.indices(len(self)))]
        return self._look_up(*self._group.find(idx))
