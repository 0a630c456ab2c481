"""Wrappers that are dropped leave nothing behind, and can be used in unusual orders."""

import gc
import os
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from data_parallel import Case, reference, run_steps, wrap
from trackbed.comm import run_ranks

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
        return len(os.listdir("/proc/self/fd")), threading.active_count(), maps  # noqa: PTH208  a count

    run_ranks(size, work)
    gc.collect()
    before = held()
    found = [run_ranks(size, work) for _ in range(3)]
    gc.collect()
    assert all(reference() is None for ranks in found for rank in ranks for reference in rank)
    deadline = time.monotonic() + 10
    while held() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert held() == before


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
            step = wrapper.waiter.step
            with wrapper.guarded():
                assert wrapper.waiter.step is not step
            assert wrapper.waiter.step is step

    run_ranks(2, work)
