"""Optional libraries: the extra `text`."""

import importlib
from pathlib import Path
from types import ModuleType

from trackbed.errors import ArgumentError

__all__ = ["require"]


def require(library: str, *, where: str | Path) -> ModuleType:
    """Imports a library of the extra `text`.

    Args:
        library: its name in an import, and in the package registry.
        where: the feature that needs it; the error message starts with this.

    Raises:
        ArgumentError: it is not installed.
    """
    try:
        return importlib.import_module(library)
    except ImportError as error:
        msg = f"{where}: the library {library} must be installed to use this (pip install 'trackbed[text]'): {error}"
        raise ArgumentError(msg) from None
