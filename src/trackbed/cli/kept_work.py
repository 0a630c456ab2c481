"""Messages about work that a resumed run keeps: when one begins, and at Ctrl-C."""

import contextlib
from collections.abc import Iterator

import click


class KeptWork:
    """Callback that receives the bytes whose work is kept, at the start of a run and after each save."""

    def __init__(self) -> None:
        self._bytes: tuple[int, int] | None = None
        """Bytes whose work is kept, and bytes in all; None before the start."""

    def __call__(self, kept: int, total: int) -> None:
        """Keeps the numbers; says at the start of a resumed run how far the earlier one was."""
        if self._bytes is None and 0 < kept < total:
            click.echo(f"trackbed: going on at {_part(kept, total)}", err=True)
        self._bytes = kept, total

    @contextlib.contextmanager
    def told_at_an_interrupt(self) -> Iterator[None]:
        """Adds to an interrupt of the block what is kept."""
        try:
            yield
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._text()) from None

    def _text(self) -> str:
        if self._bytes is None:
            return ""
        if not self._bytes[0]:
            return "nothing is kept yet"
        return f"{_part(*self._bytes)} are kept; run the same command again to go on"


def _part(done: int, total: int) -> str:
    """Formats a part of some bytes.

    >>> _part(134_200_000, 380_000_000)
    '134.2 of 380.0 MB'
    """
    return f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB"
