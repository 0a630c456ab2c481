"""Collectives of torch, with gloo between processes."""

from tests.support.processes.collectives import outcomes


def test_processes_keep_the_contract():
    found = outcomes("torch")
    assert len(found) > 40
    assert {name: errors for name, errors in found.items() if errors} == {}
