"""Megatron Core runs here with and without Trackbed's functions. Importing it warns, in its own and torch's modules."""

import warnings

import pytest

from tests.support.megatron_core.release import RELEASE
from trackbed.megatron.acceleration.switch import COMPARED_WITH

collect_ignore = ["builds_rank.py"]  # a program

try:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
        import megatron.core.datasets.blended_megatron_dataset_builder
        import megatron.core.datasets.gpt_dataset
        import megatron.core.datasets.helpers  # noqa: F401
except ModuleNotFoundError:  # `tests/conftest.py` says so
    collect_ignore_glob = ["*"]
if RELEASE not in COMPARED_WITH:
    collect_ignore_glob = ["*"]  # it is left alone


@pytest.fixture
def accelerated():
    """What is replaced for the length of a test."""
    import trackbed.megatron

    found = trackbed.megatron.accelerate()
    yield found
    found.undo()
