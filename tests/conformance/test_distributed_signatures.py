"""The wrapper, its options, buffers and functions take the arguments of megatron-core's."""

import dataclasses
import importlib
import inspect

import pytest

from tests.support.megatron_core.release import needs_the_wrappers_layouts
from trackbed.megatron.table import MODULES, part_of

pytestmark = needs_the_wrappers_layouts
MODULE_PATHS = [path for path in MODULES if part_of(path) == "distributed" and "." in path]
NAMES = [(path, name) for path in MODULE_PATHS for name in MODULES[path]]


def pair(path, name):
    own, theirs = (importlib.import_module(f"{root}.{path}") for root in ("trackbed.megatron.core", "megatron.core"))
    return getattr(own, name), getattr(theirs, name)


def positional(function):
    """Names and defaults of the arguments that may be given by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [(one.name, one.default) for one in parameters if one.kind in kinds]


@pytest.mark.parametrize(("path", "name"), NAMES)
def test_arguments_have_megatrons_names_order_and_defaults(path, name):
    own, theirs = pair(path, name)
    if dataclasses.is_dataclass(theirs):
        fields = [(field.name, field.default) for field in dataclasses.fields(theirs)]
        assert [(field.name, field.default) for field in dataclasses.fields(own)][: len(fields)] == fields
    elif callable(theirs) and not name.startswith("dist_") and name != "BufferType":
        wanted = positional(theirs)
        assert [entry[0] for entry in positional(own)[: len(wanted)]] == [entry[0] for entry in wanted]


def test_the_wrapper_has_the_methods_of_megatrons():
    own, theirs = pair("distributed.distributed_data_parallel", "DistributedDataParallel")
    for name, method in vars(theirs).items():
        if callable(method) and not name.startswith("_"):
            wanted = positional(method)
            assert [entry[0] for entry in positional(getattr(own, name))[: len(wanted)]] == [one[0] for one in wanted]
