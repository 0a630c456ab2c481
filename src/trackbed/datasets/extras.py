"""Optional libraries: the extras `text`, `sentences` and `ray`."""

import importlib
from pathlib import Path
from types import ModuleType

from trackbed.errors import ArgumentError


def require(library: str, *, where: str | Path, extra: str = "text") -> ModuleType:
    """Imports a library of an extra.

    Args:
        library: its name in an import, and in the package registry.
        where: the feature that needs it; the error message starts with this.
        extra: the extra that installs it.

    Raises:
        ArgumentError: it is not installed.
    """
    try:
        return importlib.import_module(library)
    except ImportError as error:
        how = f"pip install '.[{extra}]' in Trackbed's clone"
        raise ArgumentError(f"{where}: the library {library} must be installed to use this ({how}): {error}") from None
