"""Collectives of torch, with gloo between processes."""

import pytest

from collectives_launch import outcomes


@pytest.mark.dist
def test_processes_keep_the_contract():
    found = outcomes("torch")
    assert len(found) > 40
    assert {name: errors for name, errors in found.items() if errors} == {}
