"""Collectives in shared memory, of threads and of processes."""

import pytest
import torch

from tests.support.contracts.collectives import SHARED_MEMORY_CASES, Rank
from tests.support.processes.collectives import outcomes
from trackbed.comm import run_ranks
from trackbed.errors import ArgumentError
from trackbed.grads.collectives import Label


@pytest.mark.parametrize("size", range(1, 5))
@pytest.mark.parametrize("case", SHARED_MEMORY_CASES)
def test_threads_keep_the_contract(case, size):
    run_ranks(size, lambda group: SHARED_MEMORY_CASES[case](Rank.sharing(group)))


def test_processes_keep_the_contract():
    found = outcomes("shared_memory")
    assert len(found) > 40
    assert {name: errors for name, errors in found.items() if errors} == {}


def test_a_buffer_elsewhere_is_refused():
    def reduce(group):
        rank = Rank.sharing(group)
        with pytest.raises(ArgumentError, match="a buffer must lie in memory that the ranks share, but does not"):
            rank.collectives.all_reduce([torch.ones(4)], scale=1.0, average=False, label=Label())

    run_ranks(2, reduce)
