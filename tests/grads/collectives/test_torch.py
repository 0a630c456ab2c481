"""Collectives of torch, with gloo between processes."""

import pytest

from collectives_launch import cases, outcomes


@pytest.fixture(scope="module")
def of_processes(tmp_path_factory):
    return outcomes(tmp_path_factory.mktemp("ranks"), "torch")


@pytest.mark.dist
@pytest.mark.parametrize("name", cases("torch"))
def test_processes_keep_the_contract(of_processes, name):
    assert of_processes[name] == {}
