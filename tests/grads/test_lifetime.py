"""Wrappers that are dropped leave nothing behind, and can be used in unusual orders."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import ROOT
from tests.support.models.data_parallel import Case, reference, run_steps, wrap
from tests.support.processes.launching import run_script
from trackbed.comm import run_ranks
from trackbed.comm.shared_memory import SharedMemory
from trackbed.errors import CollectiveError, GradientError

HERE = Path(__file__).parent
OPTIONS = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 700,
}


@pytest.mark.parametrize("size", [1, 2])
def test_a_wrapper_that_is_dropped_is_freed_with_its_threads_memory_and_descriptors(size):
    def work(group):
        wrapper, optimizer = wrap(group, Case(options=OPTIONS))
        run_steps(wrapper, optimizer, Case(), 0, 2)
        return weakref.ref(wrapper), weakref.ref(wrapper.module), weakref.ref(wrapper.params_with_grad[0])

    def held():
        maps = Path("/proc/self/maps").read_text().count("memfd:trackbed-")
        return np.array([len(os.listdir("/proc/self/fd")), threading.active_count(), maps])  # noqa: PTH208  a count

    run_ranks(size, work)
    gc.collect()
    before = held()  # threads of other tests may end later
    found = [run_ranks(size, work) for _ in range(3)]
    gc.collect()
    assert all(reference() is None for ranks in found for rank in ranks for reference in rank)
    deadline = time.monotonic() + 10
    while (held() > before).any() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (held() <= before).all()


def test_training_with_the_forward_hooks_off_is_right():
    case = Case(steps=4, options=OPTIONS)

    def work(group):
        wrapper, optimizer = wrap(group, case)
        wrapper.disable_forward_pre_hook()
        return run_steps(wrapper, optimizer, case)[0]

    torch.set_num_threads(1)
    assert run_ranks(2, work) == reference(2, case)[0]


def test_a_guarded_block_inside_another_leaves_the_outer_one_guarded():
    def work(group):
        wrapper, _ = wrap(group, Case(options=OPTIONS))
        with wrapper.guarded():
            step = wrapper.engine.waiter.step
            with wrapper.guarded():
                assert wrapper.engine.waiter.step is not step
            assert wrapper.engine.waiter.step is step

    run_ranks(2, work)


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_that_is_wrapped_again_belongs_to_the_new_wrapper(size):
    case = Case(steps=4, options=OPTIONS)

    def work(group):
        old, _ = wrap(group, case)
        new, optimizer = wrap(group, case, model=old.module)
        found = run_steps(new, optimizer, case)[0]
        with pytest.raises(GradientError, match="its model was wrapped again"):
            old.finish_grad_sync()
        return found

    torch.set_num_threads(1)
    assert run_ranks(size, work) == reference(size, case)[0]


def test_a_model_in_a_wrapper_that_is_gone_can_be_wrapped_again():
    case = Case(steps=4, options=OPTIONS)

    def work(group):
        model = wrap(group, case)[0].module
        gc.collect()
        return run_steps(*wrap(group, case, model=model), case)[0]

    torch.set_num_threads(1)
    assert run_ranks(2, work) == reference(2, case)[0]


def test_a_rank_that_cannot_share_memory_is_named_on_all(monkeypatch):
    create = SharedMemory.create
    refusing = threading.local()

    def refuse(num_bytes):
        if getattr(refusing, "is_on", False):
            raise PermissionError(1, "not allowed")
        return create(num_bytes)

    monkeypatch.setattr(SharedMemory, "create", refuse)

    def work(group):
        refusing.is_on = group.rank == 1
        with pytest.raises(CollectiveError, match=r"rank 1 cannot share memory: PermissionError: .*not allowed"):
            wrap(group, Case())

    run_ranks(2, work)


def test_a_rank_without_shared_memory_has_all_reduce_by_torch():
    found = run_script(HERE / "no_memory_rank.py", 2, limit_seconds=60)
    assert [line for (line,) in found] == [["TorchCollectives", True]] * 2


def test_a_rank_that_ends_lets_others_finish_their_gathers():
    found = run_script(HERE / "leaving_rank.py", 2, limit_seconds=60)
    assert found == [[True], []]


KEEPS_ITS_WRAPPERS = """
import time
import torch
from tests.support.models.data_parallel import Case, run_steps, wrap
from trackbed.comm import run_ranks

OPTIONS = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
kept = run_ranks(2, lambda group: wrap(group, Case(options=OPTIONS)))
run_ranks(2, lambda group: run_steps(*kept[group.rank], Case(), 0, 2))
print(time.monotonic(), flush=True)
"""


def test_a_program_that_keeps_its_wrappers_ends_at_once():
    command = [sys.executable, "-W", "ignore", "-c", KEEPS_ITS_WRAPPERS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    assert time.monotonic() - float(process.stdout) < 4
