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
from trackbed.tokens.format import SequenceIndex, open_index
from trackbed.tokens.identity import identity
from trackbed.tokens.paths import get_idx_path
from trackbed.tokens.reader import IndexedDataset
from trackbed.tokens.size import PairSize, pair_size
from trackbed.tokens.source import Tokens

__all__ = ["GroupIndex", "IndexedGroup"]


class IndexedGroup:
    """The documents of all pairs, in the order given: what `merge` would make of them, read where they are.

    Looks at a few bytes of each index when it is made; a pair is opened when one of its sequences is first read. The
    object can be pickled, and used after a fork.

    Args:
        path_prefix: the name of the whole, used as the prefix of one pair would be.
        pairs: `[G]` prefixes.
        sizes: `[G]` what each pair holds.
        mmap: whether to map the `.bin` files, or to read them piece by piece.
    """

    def __init__(self, path_prefix: str, pairs: Sequence[str], sizes: Sequence[PairSize], *, mmap: bool = True) -> None:
        self.path_prefix = path_prefix
        self.pairs = tuple(pairs)
        self.mmap = mmap
        self._sizes = tuple(sizes)
        self._first_sequences = list(accumulate((size.sequences for size in sizes), initial=0))
        self._first_tokens = list(accumulate((size.tokens for size in sizes), initial=0))
        self._opened: dict[int, IndexedDataset] = {}
        self.index = GroupIndex(self)

    @classmethod
    def open(cls, path_prefix: str, pairs: Sequence[str], *, mmap: bool = True) -> "IndexedGroup":
        """The group of these pairs.

        Raises:
            ArgumentError: no pair, a pair whose files are missing, or pairs of different token types.
            FormatError: an index is damaged, or points outside its data.
        """
        if not pairs:
            msg = f"{path_prefix}: a group must have at least one pair, found none"
            raise ArgumentError(msg)
        sizes = [pair_size(pair) for pair in pairs]
        for pair, size in zip(pairs, sizes, strict=True):
            if size.dtype is not sizes[0].dtype:
                found = f"{np.dtype(sizes[0].dtype).name} in {pairs[0]} and {np.dtype(size.dtype).name} in {pair}"
                msg = f"{path_prefix}: the pairs of a group must have tokens of one type, found {found}"
                raise ArgumentError(msg)
        return cls(path_prefix, pairs, sizes, mmap=mmap)

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_opened", "index", "sequence_lengths", "document_indices")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._opened = {}
        self.index = GroupIndex(self)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What tells these files from others of the same names: of all of them, and of their order."""
        found = [identity(pair) for pair in self.pairs]
        digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
        return {"bin_bytes": sum(one["bin_bytes"] for one in found), "pairs": len(found), "pairs_sha256": digest}

    def __len__(self) -> int:
        """Sequences in all pairs."""
        return self._first_sequences[-1]

    @cached_property
    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        """`[N]` tokens in each sequence; copied together when it is first asked for."""
        return np.concatenate([_index_of(pair).sequence_lengths for pair in self.pairs])

    @cached_property
    def document_indices(self) -> npt.NDArray[np.int64]:
        """`[D + 1]` first sequence of each document, then N; copied together when it is first asked for."""
        first = zip(self.pairs, self._first_sequences, strict=False)
        borders = [_index_of(pair).document_indices[1:] + before for pair, before in first]
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
        pair = self._pair(member)
        begin = self._first_tokens[member] + int(pair.index.sequence_pointers[sequence]) // pair.index.dtype_size
        start = begin + int(offset)
        count = int(pair.index.sequence_lengths[sequence]) - int(offset) if length is None else int(length)
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
            pieces.append(self._pair(member).bin_reader.read(self.index.dtype, reach - start, offset))
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
        """Tokens of all pairs before a pair."""
        return self._first_tokens[member]

    def pair_index(self, member: int) -> SequenceIndex:
        """The index of a pair, which is opened."""
        return self._pair(member).index

    @property
    def size(self) -> PairSize:
        """What all pairs hold together."""
        return PairSize(
            dtype=self._sizes[0].dtype,
            sequences=len(self),
            documents=sum(size.documents for size in self._sizes),
            tokens=self._first_tokens[-1],
        )

    def _pair(self, member: int) -> IndexedDataset:
        if member not in self._opened:
            self._opened[member] = IndexedDataset(self.pairs[member], mmap=self.mmap)
        return self._opened[member]


class GroupIndex:
    """What the index of the merged pair would say, entry by entry.

    Args:
        group: the pairs.
    """

    def __init__(self, group: IndexedGroup) -> None:
        self.dtype = group.size.dtype
        self.dtype_size = np.dtype(self.dtype).itemsize
        self.sequence_count = len(group)
        self.document_count = group.size.documents + 1
        self.sequence_lengths = _Entries(group, lambda member, at: int(group.pair_index(member).sequence_lengths[at]))
        self.sequence_pointers = _Entries(group, self._pointer_in(group))

    def _pointer_in(self, group: IndexedGroup) -> Callable[[int, int], int]:
        def pointer(member: int, sequence: int) -> int:
            before = group.tokens_before_pair(member) * self.dtype_size
            return before + int(group.pair_index(member).sequence_pointers[sequence])

        return pointer


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


def _index_of(pair: str) -> SequenceIndex:
    return open_index(Path(get_idx_path(pair)))
