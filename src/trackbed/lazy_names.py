"""Names of a package that are imported on first access."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, str], *, present: str = "", modules: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package whose modules are imported when a name is used.

    Type checkers read the imports below the package's `if TYPE_CHECKING`; they do not execute this function.

    Args:
        package: the package's `__name__`.
        names: lazy names, separated by blanks, by the full name of their module.
        present: further names in `__all__`, which the package imports itself.
        modules: modules of the package that are attributes, too, but not in `__all__`.
    """
    sources = {name: module for module, listed in names.items() for name in listed.split()}
    exported = sorted([*sources, *present.split()])
    return (
        lazy_attributes(package, sources, modules=modules),
        lambda: sorted([*exported, *modules.split()]),
        exported,
    )


def lazy_attributes(package: str, sources: Mapping[str, str], *, modules: str = "") -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package, given the full name of the module of each name."""
    submodules = {name: f"{package}.{name}" for name in modules.split()}

    def get_attribute(name: str) -> Any:
        if name in sources:
            return getattr(import_module(sources[name]), name)
        if name in submodules:
            return import_module(submodules[name])
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get_attribute
