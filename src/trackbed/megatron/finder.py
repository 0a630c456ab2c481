"""Import finder that creates modules under `trackbed.megatron.core` and `megatron.core` from the table of names."""

import importlib
import importlib.util
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from trackbed.megatron.table import MODULES

__all__ = ["Finder"]


class Finder(MetaPathFinder):
    """Finds the modules of the table below `root`, and their parent packages if no other finder provides them.

    Args:
        root: name of the package that corresponds to `megatron.core`.
    """

    def __init__(self, root: str) -> None:
        self._modules = {f"{root}.{path}": names for path, names in MODULES.items()}
        self._packages = {
            name.rsplit(".", depth)[0] for name in self._modules for depth in range(1, name.count(".") + 1)
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module of the table or of a parent package, else None."""
        if fullname in self._modules:
            return ModuleSpec(fullname, _TableLoader(self._modules[fullname], self._other(fullname, path, target)))
        if fullname in self._packages and self._other(fullname, path, target) is None:
            return ModuleSpec(fullname, _PackageLoader(), is_package=True)
        return None

    def _other(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        """Spec that the other finders return, or None."""
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        return None


class _PackageLoader(Loader):
    """Loads an empty package."""

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the package has no names besides its modules."""


class _TableLoader(Loader):
    """Loads a module with the names of the table; other names come from Megatron Core's own module, if it exists.

    Args:
        names: `module:name` of each object, by its name in the new module.
        own: the spec of Megatron Core's module, or None.
    """

    def __init__(self, names: Mapping[str, str], own: ModuleSpec | None) -> None:
        self._names = names
        self._own_spec = own
        self._own_module: ModuleType | None = None
        self._lock = threading.Lock()

    def exec_module(self, module: ModuleType) -> None:
        """Sets the names of the table, and a `__getattr__` for the others."""
        for name, target in self._names.items():
            source, _, attribute = target.partition(":")
            setattr(module, name, getattr(importlib.import_module(source), attribute))
        module.__getattr__ = lambda name: self._from_own(module, name)  # type: ignore[method-assign]
        if self._own_spec is not None:
            module.__file__ = self._own_spec.origin

    def _from_own(self, module: ModuleType, name: str) -> Any:
        """Looks up a name that is not in the table. Megatron Core's module is executed on the first such lookup."""
        special = name.startswith("__") and name != "__all__"
        if self._own_spec is None or self._own_spec.loader is None or special:
            if name == "__all__":
                return sorted(self._names)
            msg = f"module {module.__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        with self._lock:
            if self._own_module is None:
                own = importlib.util.module_from_spec(self._own_spec)
                self._own_spec.loader.exec_module(own)
                self._own_module = own
        if name == "__all__":  # a star import gets the names of both modules
            return sorted({*self._names, *(own for own in vars(self._own_module) if not own.startswith("_"))})
        return getattr(self._own_module, name)
