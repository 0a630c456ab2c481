"""Several pairs read as one, document after document, without copying them.

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
    """The documents of all pairs, in the order given: what `merge` would make of them, read where they are.

    A few bytes of each index are looked at when the group is opened; a file is mapped when it is first read. The object
    can be pickled, and used after a fork.

    Args:
        path_prefix: the name of the whole, used as the prefix of one pair would be.
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
    def open(cls, path_prefix: str, pairs: Sequence[str], *, mmap: bool = True) -> "IndexedGroup":
        """The group of the pairs at these prefixes.

        Args:
            path_prefix: the name of the whole.
            pairs: `[G]` prefixes, at least one.
            mmap: whether to map the `.bin` files, or to read them piece by piece.

        Raises:
            ArgumentError: no pair, a pair whose files are missing, or pairs of different token types.
            FormatError: an index is damaged, or points outside its data.
        """
        if not pairs:
            msg = f"{path_prefix}: a group must have at least one pair, found none"
            raise ArgumentError(msg)
        headers = read_headers(pairs)
        members = [IndexedDataset(pair, mmap=mmap, open_when_read=True, header=headers.get(pair)) for pair in pairs]
        first = np.dtype(members[0].index.dtype).name
        for member in members:
            name = np.dtype(member.index.dtype).name
            if name != first:
                found = f"{first} in {pairs[0]} and {name} in {member.path_prefix}"
                msg = f"{path_prefix}: the pairs of a group must have tokens of one type, found {found}"
                raise ArgumentError(msg)
        return cls(path_prefix, members)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy opens the pairs anew."""
        return type(self), (self.path_prefix, self.members)

    @property
    def identity(self) -> dict[str, Any]:
        """What tells these files from others of the same names: of all of them, and of their order."""
        found = [member.identity for member in self.members]
        digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
        return {"bin_bytes": sum(one["bin_bytes"] for one in found), "pairs": len(found), "pairs_sha256": digest}

    def __len__(self) -> int:
        """Sequences in all pairs."""
        return self._first_sequences[-1]

    @cached_property
    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        """`[N]` tokens in each sequence; copied together when it is first asked for."""
        return np.concatenate([_index_of(member).sequence_lengths for member in self.members])

    @cached_property
    def document_indices(self) -> npt.NDArray[np.int64]:
        """`[D + 1]` first sequence of each document, then N; copied together when it is first asked for."""
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

        The range may reach into the sequences that follow, and into the pairs that follow: not past the last of them.

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
        """Tokens `[start, stop)` of all pairs; a view of one of them unless they reach into the next one."""
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
        """The pair in which a sequence lies, and its number there.

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
        """Tokens of all pairs before one of them; of all of them before the G-th."""
        return self._first_tokens[member]


class GroupIndex:
    """What the index of the merged pair would say, entry by entry.

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
    """`[N]` entries of an index, each looked up in the pair that it stands in.

    Args:
        group: the pairs.
        look_up: the entry of a sequence, from the number of its pair and its own number in it.
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
    """The index of a pair, opened to be read once and let go: thousands of maps would need as many descriptors."""
    path = Path(get_idx_path(member.path_prefix))
    check_stamp(path, member.index.ends.stamp)
    return open_index(path)
