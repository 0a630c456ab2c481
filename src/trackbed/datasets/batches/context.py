"""The part of each sample that a rank of a context-parallel group has.

Shapes: B samples of a batch, S places of a sample, M borders of a sample.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trackbed.errors import ArgumentError
from trackbed.kernels.integers import check_at_least

OF_PLACES: Final = ("tokens", "labels", "loss_mask", "position_ids", "padding_mask")
"""Tensors of packs with a value for each place; all others are the same on each rank."""


class Context(NamedTuple):
    """A rank among those that share each sample."""

    rank: int = 0
    """Number of the rank, in `[0, size)`."""
    size: int = 1
    """Number of these ranks, at least 1."""

    def check(self) -> None:
        """Raises an ArgumentError unless there is such a rank."""
        check_at_least(1, context_size=self.size)
        check_at_least(0, context_rank=self.rank)
        if self.rank >= self.size:
            raise ArgumentError(f"context_rank must be below context_size {self.size}, found {self.rank}")


WHOLE: Final = Context()
"""The context of a rank that has whole samples."""


def places_of(borders: npt.NDArray[np.int32], context: Context) -> npt.NDArray[np.int64]:
    """Returns the places of a rank: of each segment the rank-th of 2 x size parts, and the one as far from its end.

    Args:
        borders: `[M]` places where segments begin and end, from 0 on.
        context: the rank.

    Raises:
        ArgumentError: borders fall, or a segment is no multiple of 2 x size.

    >>> borders = np.array([0, 4, 4, 12])
    >>> places_of(borders, Context(0, 2)).tolist(), places_of(borders, Context(1, 2)).tolist()
    ([0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9])
    """
    rank, size = context
    if len(borders) < 2 or borders[0] != 0 or (np.diff(borders) < 0).any():
        raise ArgumentError(f"borders must begin with 0 and never fall, found {borders.tolist()[:8]}")
    starts, lengths = borders[:-1].astype(np.int64), np.diff(borders).astype(np.int64)
    odd = np.flatnonzero(lengths % (2 * size))
    if len(odd):
        raise ArgumentError(
            f"segments must have a multiple of {2 * size} places for {size} ranks, found {lengths[odd[0]]}: "
            f"pack with pack_multiple={2 * size}"
        )
    parts = lengths // (2 * size)
    firsts = np.stack([starts + rank * parts, starts + (2 * size - 1 - rank) * parts], axis=1).reshape(-1)
    counts = np.repeat(parts, 2)
    ends = np.cumsum(counts)
    return np.repeat(firsts - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)


def slice_rows(batch: Mapping[str, torch.Tensor], borders: torch.Tensor, context: Context) -> dict[str, torch.Tensor]:
    """Returns the part of rows of packs that a rank has: `[B, S / size]` of each tensor in `OF_PLACES`.

    Args:
        batch: tensors by name.
        borders: `[B, M]` borders of the segments of each row.
        context: the rank.

    Raises:
        ArgumentError: borders fall, or a segment is no multiple of 2 x size.
    """
    if not len(borders):
        return {
            name: one[:, : one.shape[1] // context.size] if name in OF_PLACES else one for name, one in batch.items()
        }
    rows = borders.cpu().numpy()
    places = torch.from_numpy(np.stack([places_of(row, context) for row in rows])).to(borders.device)
    return {name: one.gather(1, places) if name in OF_PLACES else one for name, one in batch.items()}
