"""A training step sends the store of the group no request."""

import numpy as np
import pytest

from tests.comm.counting import CountingStore
from tests.support.models.data_parallel import Case, run_steps, wrap
from trackbed.comm import run_ranks
from trackbed.comm.store import MemoryStore

OPTIONS = {"overlap_grad_reduce": True, "bucket_size": 700}
SHARDED = OPTIONS | {"use_distributed_optimizer": True, "overlap_param_gather": True}


@pytest.mark.parametrize("options", [OPTIONS, SHARDED])
def test_a_guarded_training_step_sends_no_request(options):
    shared, connections = MemoryStore(), []

    def connect():
        connections.append(CountingStore(shared))
        return connections[-1]

    def total():
        return sum(connection.requests.total() for connection in connections)

    def work(group):
        wrapper, optimizer = wrap(group, Case(options=options))
        with wrapper.guarded():
            run_steps(wrapper, optimizer, Case(options=options), 0, 2)
            before = total()
            run_steps(wrapper, optimizer, Case(options=options), 2, 12)
            sent = total() - before
            wrapper.engine.exchange(np.zeros(1, dtype=np.int64))  # no rank leaves the block before all have counted
            return sent

    # The timeout is 600 s, so that not even a heartbeat is due.
    assert run_ranks(2, work, connect=connect, timeout_seconds=600) == [0, 0]
