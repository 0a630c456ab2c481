"""A pytest plugin: Megatron-LM's tests run on Trackbed instead of Megatron Core."""

from importlib import import_module

import trackbed.megatron
from trackbed.megatron.table import MODULES

trackbed.megatron.install()


def pytest_configure() -> None:
    """Checks that the datasets that the tests import are Trackbed's."""
    for path, names in MODULES.items():
        module = import_module(f"megatron.core.{path}") if path.startswith("datasets.") else None
        for name in names if module else ():
            owner = getattr(getattr(module, name), "__module__", "trackbed")
            if not owner.startswith("trackbed"):
                msg = f"{path}.{name} must be Trackbed's, found it in {owner}"
                raise RuntimeError(msg)
