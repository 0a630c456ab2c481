"""Copies in float32 of parameters of 16 bits, which follow parameters that the program writes."""

from collections.abc import Callable, Iterable
from typing import Final

import torch

from trackbed.optim.pieces import Piece

__all__ = ["Copies"]

_UNKNOWN: Final = -1
"""Number of changes of a parameter that is to be looked at."""


class Copies:
    """Copies of pieces, with the number of changes that torch had counted of each parameter when they last agreed.

    Steps and gathers write through other tensors, so that torch does not count them. A copy is not written before the
    next step: weights that are exchanged for an evaluation, and put back, lose no bit.

    Args:
        pieces: all pieces of a rank, of which some have copies.
        wait: waits for parameters that are being gathered.
    """

    def __init__(self, pieces: Iterable[Piece], wait: Callable[[], None]) -> None:
        self._places = {piece: place for place, piece in enumerate(piece for piece in pieces if piece.is_copied)}
        self._params = [piece.param for piece in self._places]
        self._versions = self._count_changes()
        self._wait = wait

    def note_written(self) -> None:
        """Has all parameters be looked at, as if each had been written."""
        self._versions = [_UNKNOWN] * len(self._versions)

    @torch.no_grad()
    def take_over(self) -> None:
        """Sets the copies of parameters that were written, except where a copy rounds to the value."""
        if not self._places:
            return
        self._wait()
        found = self._count_changes()
        if found == self._versions:
            return
        for piece, place in self._places.items():
            if found[place] != self._versions[place]:
                piece.main.copy_(_followed(piece))
        self._versions = found

    @torch.no_grad()
    def value_of(self, piece: Piece) -> torch.Tensor:
        """Value that the copy of a piece has after `take_over`: the copy itself, unless the parameter was written."""
        place = self._places.get(piece)
        if place is None or piece.param._version == self._versions[place]:  # noqa: SLF001  as below
            return piece.main.detach()
        self._wait()
        return _followed(piece)

    def _count_changes(self) -> list[int]:
        return [param._version for param in self._params]  # noqa: SLF001  torch has no public name for it


def _followed(piece: Piece) -> torch.Tensor:
    """The copy, with the values of the parameter where it does not round to them, bit for bit."""
    is_same = piece.main.to(piece.data.dtype).view(torch.int16) == piece.data.view(torch.int16)
    return torch.where(is_same, piece.main, piece.data)
