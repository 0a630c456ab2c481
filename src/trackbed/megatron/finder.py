"""Import finder that creates modules under `trackbed.megatron.core` and `megatron.core` from the table of names.

It takes effect only for modules that were not imported before: `importers_of` names who imported one.
"""

import importlib
import importlib.util
import sys
import threading
from collections.abc import Container, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any


class Finder(MetaPathFinder):
    """Finds the modules of a table below `root`, and their parent packages if no other finder provides them.

    A path of the table that is the parent of another is a package; its names are used only if no other finder provides
    that package.

    Args:
        root: name of the package that corresponds to `megatron.core`.
        modules: for each module path below `root`, the `module:name` of each object, by its name.
    """

    def __init__(self, root: str, modules: Mapping[str, Mapping[str, str]]) -> None:
        self.root = root
        self.modules = modules
        self._names = {f"{root}.{path}": names for path, names in modules.items()}
        self._packages = {name.rsplit(".", depth)[0] for name in self._names for depth in range(1, name.count(".") + 1)}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module of the table or of a parent package, else None."""
        is_package = fullname in self._packages
        if not is_package and fullname not in self._names:
            return None
        other = self._other(fullname, path, target)
        if is_package and other is not None:
            return None
        loader = _TableLoader(self._names.get(fullname, {}), other)
        return ModuleSpec(fullname, loader, is_package=is_package)

    def _other(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        """Spec that the other finders return, or None."""
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        return None


class _TableLoader(Loader):
    """Loads a module with the names of the table; other names come from Megatron Core's own module, if it exists.

    Args:
        names: `module:name` of each object, by its name in the new module.
        own: the spec of Megatron Core's module, or None.
    """

    def __init__(self, names: Mapping[str, str], own: ModuleSpec | None) -> None:
        self.names = names
        self._own_spec = own
        self._own_module: ModuleType | None = None
        self._lock = threading.Lock()

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Creates the module, without its names."""
        return _TableModule(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Imports the implementations; a missing one raises here, and not at its first use."""
        for name in self.names:
            getattr(module, name)
        if self._own_spec is not None:
            module.__file__ = self._own_spec.origin

    def implementation(self, name: str) -> tuple[ModuleType, str] | None:
        """Returns the module that implements a name and its name there, or None for a name outside the table."""
        if name not in self.names:
            return None
        source, _, attribute = self.names[name].partition(":")
        return importlib.import_module(source), attribute

    def from_own(self, module_name: str, name: str) -> Any:
        """Looks up a name that is not in the table. Megatron Core's module is executed on the first such lookup."""
        special = name.startswith("__") and name != "__all__"
        if self._own_spec is None or self._own_spec.loader is None or special:
            if name == "__all__":
                return sorted(self.names)
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
        with self._lock:
            if self._own_module is None:
                own = importlib.util.module_from_spec(self._own_spec)
                self._own_spec.loader.exec_module(own)
                self._own_module = own
        if name == "__all__":  # a star import gets the names of both modules
            return sorted({*self.names, *(own for own in vars(self._own_module) if not own.startswith("_"))})
        return getattr(self._own_module, name)


class _TableModule(ModuleType):
    """A module whose names of the table are read, assigned and deleted in the modules that implement them.

    Functions there look their globals up in their own module; so they use a replacement that is assigned here. An
    assignment to another name stays in this module.

    Args:
        name: name of the module.
        loader: its loader.
    """

    def __init__(self, name: str, loader: _TableLoader) -> None:
        super().__init__(name)
        vars(self)["__table__"] = loader  # past __setattr__, which reads it

    def __getattr__(self, name: str) -> Any:
        """Reads a name that is not in this module's dictionary, which holds no name of the table."""
        loader: _TableLoader = vars(self)["__table__"]
        implementation = loader.implementation(name)
        return loader.from_own(self.__name__, name) if implementation is None else getattr(*implementation)

    def __setattr__(self, name: str, value: Any) -> None:
        module, attribute = vars(self)["__table__"].implementation(name) or (super(), name)
        module.__setattr__(attribute, value)

    def __delattr__(self, name: str) -> None:
        module, attribute = vars(self)["__table__"].implementation(name) or (super(), name)
        module.__delattr__(attribute)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *vars(self)["__table__"].names})


_SHOWN = 3


def importers_of(package: str) -> str:
    """Names up to three modules that use a package or a module below it, those of other distributions first.

    A module that executed `import package.module` has a reference to the top-level package only. Such modules come
    after those that refer to the package itself.

    Args:
        package: dotted name of an imported package.
    """
    top = package.partition(".")[0]
    inside = {name for name in sys.modules if _is_below(name, package)}
    found = [
        ((_is_below(name, top), not _refers_to(module, inside)), name)
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name not in inside and _refers_to(module, {*inside, top})
    ]
    found.sort(key=lambda item: item[0])
    return ", ".join(name for _, name in found[:_SHOWN]) or "a module that was removed"


def _is_below(name: str, package: str) -> bool:
    """True if a module is the package or lies below it."""
    return f"{name}.".startswith(f"{package}.")


def _refers_to(module: ModuleType, names: Container[str]) -> bool:
    """True if a module has a reference to one of the named modules, or to a type or function of theirs."""
    # Attributes of types and functions only are read: some objects in modules warn when any attribute is accessed, also
    # by isinstance.
    return any(
        (issubclass(type(value), ModuleType) and vars(value).get("__name__") in names)
        or (issubclass(type(value), (type, FunctionType)) and value.__module__ in names)
        for value in list(vars(module).values())
    )
