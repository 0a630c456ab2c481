"""Console for tables."""

import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console


_UNLIMITED: Final = 10_000


def table_console() -> "Console":
    """Returns a console as wide as the terminal; to a file or pipe, so wide that nothing is wrapped or cut."""
    from rich.console import Console

    return Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else _UNLIMITED)
