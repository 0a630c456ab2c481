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
        self._versions = {piece: _version_of(piece) for piece in pieces if piece.is_copied}
        self._wait = wait

    def note_written(self) -> None:
        """Has all parameters be looked at, as if each had been written."""
        self._versions = dict.fromkeys(self._versions, _UNKNOWN)

    @torch.no_grad()
    def take_over(self) -> None:
        """Sets the copies of parameters that were written, except where a copy rounds to the value."""
        if self._versions:
            self._wait()
        for piece, version in self._versions.items():
            found = _version_of(piece)
            if found != version:
                piece.main.copy_(_followed(piece))
                self._versions[piece] = found

    @torch.no_grad()
    def value_of(self, piece: Piece) -> torch.Tensor:
        """Value that the copy of a piece has after `take_over`: the copy itself, unless the parameter was written."""
        if _version_of(piece) == self._versions.get(piece, _UNKNOWN) or not piece.is_copied:
            return piece.main.detach()
        self._wait()
        return _followed(piece)


def _version_of(piece: Piece) -> int:
    return piece.param._version  # noqa: SLF001  torch has no public name for it


def _followed(piece: Piece) -> torch.Tensor:
    """The copy, with the values of the parameter where it does not round to them, bit for bit."""
    is_same = piece.main.to(piece.data.dtype).view(torch.int16) == piece.data.view(torch.int16)
    return torch.where(is_same, piece.main, piece.data)
