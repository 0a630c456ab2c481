"""Search for the modules that imported a package."""

import sys
from collections.abc import Container
from types import FunctionType, ModuleType

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
