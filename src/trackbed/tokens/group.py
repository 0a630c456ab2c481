"""Groups: several pairs read as one dataset without copying.

Shapes: G pairs, N sequences and D documents of all pairs together.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from operator import index as as_index
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError, FormatError
from trackbed.files import check_stamp
from trackbed.tokens.format import SequenceIndex, open_index
from trackbed.tokens.headers import read_headers
from trackbed.tokens.paths import get_idx_path
from trackbed.tokens.reader import IndexedDataset
from trackbed.tokens.source import Tokens

__all__ = ["GroupIndex", "IndexedGroup"]


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
        pair_class: type[IndexedDataset] = IndexedDataset,
    ) -> "IndexedGroup":
        """Opens a group by the prefixes of its pairs.

        Args:
            path_prefix: name of the group.
            pairs: `[G]` prefixes, at least one.
            mmap: True to map the `.bin` files, False to read them piece by piece.
            pair_class: class of the pairs.

        Raises:
            ArgumentError: `pairs` is empty, a file is missing, or the pairs have different token types.
            FormatError: an index is damaged, or points outside its data.
        """
        if not pairs:
            msg = f"{path_prefix}: a group must have at least one pair, found none"
            raise ArgumentError(msg)
        headers = read_headers(pairs)
        members = [pair_class(pair, mmap=mmap, open_when_read=True, header=headers.get(pair)) for pair in pairs]
        first = np.dtype(members[0].index.dtype).name
        for member in members:
            name = np.dtype(member.index.dtype).name
            if name != first:
                found = f"{first} in {pairs[0]} and {name} in {member.path_prefix}"
                msg = f"{path_prefix}: the pairs of a group must have tokens of one type, found {found}"
                raise ArgumentError(msg)
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
        return np.concatenate([_index_of(member).sequence_lengths for member in self.members])

    @cached_property
    def document_indices(self) -> npt.NDArray[np.int64]:
        """`[D + 1]` first sequence of each document, then N; concatenated on first use."""
        first = zip(self.members, self._first_sequences, strict=False)
        borders = [_index_of(member).document_indices[1:] + before for member, before in first]
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
            msg = f"{self.path_prefix}: a slice must take every sequence, found a step of {step}"
            raise ValueError(msg)
        return [self.get(sequence) for sequence in range(start, stop)]

    def get(self, idx: int | np.integer[Any], offset: int = 0, length: int | np.integer[Any] | None = None) -> Tokens:
        """Tokens `[offset, offset + length)` of sequence `idx`, to its end if `length` is None.

        The range may extend into the following sequences and pairs, but not past the last pair.

        Raises:
            IndexError: there is no such sequence.
            FormatError: the range lies outside the `.bin` files.
        """
        member, sequence = self.find(idx)
        index = self.members[member].index
        begin = self._first_tokens[member] + int(index.sequence_pointers[sequence]) // index.dtype_size
        start = begin + int(offset)
        count = int(index.sequence_lengths[sequence]) - int(offset) if length is None else int(length)
        if not 0 <= start <= start + count <= self._first_tokens[-1]:
            where = f"tokens [{offset}, {int(offset) + count}) of sequence {int(idx)}"
            msg = f"{self.path_prefix}: {where} must lie inside the files, which have {self._first_tokens[-1]}"
            raise FormatError(msg)
        return self._read(start, start + count)

    def _read(self, start: int, stop: int) -> Tokens:
        """Tokens `[start, stop)` of the concatenated pairs; a view if they lie in one pair, else a copy."""
        pieces = []
        while start < stop:
            member = bisect_right(self._first_tokens, start) - 1
            reach = min(stop, self._first_tokens[member + 1])
            offset = (start - self._first_tokens[member]) * self.index.dtype_size
            pieces.append(self.members[member].bin_reader.read(self.index.dtype, reach - start, offset))
            start = reach
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
            msg = f"{self.path_prefix}: a sequence must be in [-{len(self)}, {len(self)}), found {number}"
            raise IndexError(msg)
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


def _index_of(member: IndexedDataset) -> SequenceIndex:
    """Reopens the index of a pair for one read. Keeping thousands of maps open would exceed the limit on maps."""
    path = Path(get_idx_path(member.path_prefix))
    check_stamp(path, member.index.ends.stamp)
    return open_index(path)
