"""A pytest plugin: Megatron-LM's tests run on Trackbed instead of Megatron Core."""

from importlib import import_module

import trackbed.megatron
from trackbed.megatron.table import MODULES

trackbed.megatron.install()


def pytest_configure() -> None:
    """Checks that the classes of datasets that the tests import are Trackbed's."""
    for path in filter(lambda path: path.startswith("datasets."), MODULES):
        module = import_module(f"megatron.core.{path}")
        found = [getattr(module, name) for name in MODULES[path]]
        for one in found:
            if isinstance(one, type) and one.__module__.startswith("megatron."):
                raise RuntimeError(f"{path}.{one.__name__} must be Trackbed's, found it in {one.__module__}")
