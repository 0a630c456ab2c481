"""Whether the host waits for the GPU, and how often."""

import contextlib

import torch
from torch.profiler import ProfilerActivity, profile

from tests.gpu.card import IS_DRY

_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")


@contextlib.contextmanager
def no_sync_allowed():
    """In the block, an operation that waits for the GPU raises an error."""
    if IS_DRY:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def profiled(call):
    """Profile of a call, with everything that it has queued."""
    activities = [ProfilerActivity.CPU] + ([] if IS_DRY else [ProfilerActivity.CUDA])
    with profile(activities=activities) as found:
        call()
        torch.cuda.synchronize()
    return found


def num_syncs(found):
    """Waits of the host in a profile, without the last one, which ends it."""
    return max(0, sum(event.count for event in found.key_averages() if event.key in _WAITS) - 1)


def num_kernels(found):
    """Kernels, copies and fills that the GPU has run in a profile."""
    return sum(1 for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA)
