"""Tests on one GPU. Without one they are skipped, unless they are rehearsed on the CPU; see `card.py`."""

import datetime as dt
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gpu.card import IS_DRY

# cuBLAS adds in one order only with this, and only if it is set before the first product.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items):
    """Marks the tests of this folder, but for those of the program that runs them."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.path.name != "test_accept.py":
            item.add_marker("gpu")
            # A warning of another version of torch is no failure of Trackbed.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if not IS_DRY and not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture
def exact():
    """Kernels that add in one order."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def process_group(tmp_path):
    """Opens a process group of one rank: `process_group("nccl")`. A rehearsal uses gloo."""

    def open_group(backend="nccl", **options):
        if IS_DRY:
            backend, options = "gloo", {}
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=dt.timedelta(seconds=60), **options)
        return dist.group.WORLD

    yield open_group
    if dist.is_initialized():
        dist.destroy_process_group()
