"""A pytest plugin: Megatron-LM's own tests, with gloo in place of their CUDA set-up."""

import os
from pathlib import Path

import pytest
import torch.distributed


def initialize_distributed() -> None:
    """Initializes torch.distributed as their `Utils.initialize_distributed` does, without a GPU."""
    if not torch.distributed.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29571")
        torch.distributed.init_process_group(
            "gloo", rank=int(os.environ.get("RANK", "0")), world_size=int(os.environ.get("WORLD_SIZE", "1"))
        )


@pytest.fixture
def tmp_path_dist_ckpt():
    """Their folder, which all ranks share."""
    return Path(os.environ["TRACKBED_TEST_FOLDER"])


def pytest_collection_modifyitems() -> None:
    """Their tests were imported by now, and with them the class to be changed."""
    from tests.unit_tests.test_utilities import Utils

    Utils.initialize_distributed = staticmethod(initialize_distributed)
    destroy = Utils.destroy_model_parallel

    def destroy_model_parallel():
        """Frees the threads of gloo's process groups too, of which Megatron Core makes dozens for each test."""
        destroy()
        groups = list(torch.distributed.distributed_c10d._world.pg_map)
        for group in groups:
            if group is not torch.distributed.group.WORLD:
                torch.distributed.destroy_process_group(group)

    Utils.destroy_model_parallel = staticmethod(destroy_model_parallel)


def pytest_sessionfinish() -> None:
    """Leave no process group behind."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
