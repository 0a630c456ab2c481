"""Trackbed under Megatron Core's module paths.

For `datasets.*`, `trackbed.megatron.core.<path>` contains Trackbed's counterparts of the names in
`megatron.core.<path>`. After `trackbed.megatron.install()`, a program that imports `megatron.core.datasets.*` runs on
Trackbed.
"""

import sys
from types import FunctionType, ModuleType
from typing import Final

from trackbed.errors import TrackbedError
from trackbed.megatron.finder import Finder
from trackbed.megatron.table import MODULES

__all__ = ["install"]

_MEGATRON: Final = "megatron.core"
_INSTALLED: Final = Finder(_MEGATRON, MODULES)

sys.meta_path.insert(0, Finder(f"{__name__}.core", MODULES))


def install() -> None:
    """Makes Trackbed's datasets importable as `megatron.core.datasets`, ahead of an installed megatron-core.

    Names that Trackbed does not provide still come from Megatron Core. Further calls do nothing.

    Raises:
        TrackbedError: modules that would be replaced were already imported; the message names the importer.
    """
    if _INSTALLED in sys.meta_path:
        return
    early = [name for name in (f"{_MEGATRON}.{path}" for path in MODULES) if name in sys.modules]
    if early:
        msg = (
            "trackbed.megatron.install() must come before megatron.core.datasets is imported, "
            f"found {early[0]} imported by {_importer_of(early)}"
        )
        raise TrackbedError(msg)
    sys.meta_path.insert(0, _INSTALLED)


def _importer_of(names: list[str]) -> str:
    """Names of modules that use one of the modules `names`, those outside of Megatron Core first."""
    ours = {id(sys.modules[name]) for name in names}

    def holds(module: ModuleType) -> bool:
        # Only types and functions are inspected: some modules warn when their other attributes are accessed.
        return any(
            id(value) in ours or (isinstance(value, (type, FunctionType)) and value.__module__ in names)
            for value in list(vars(module).values())
        )

    found = [
        name
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name not in names and holds(module)
    ]
    found.sort(key=lambda name: name.startswith("megatron."))
    return ", ".join(found[:3]) or "a module that was removed"
