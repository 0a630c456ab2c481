"""The device that these tests use: a GPU, or in a rehearsal the CPU, at a thousandth of the size.

A rehearsal finds typing errors where there is no GPU: `TRACKBED_GPU_DRY=1`, or `accept.py --dry`. Streams and events of
CUDA do nothing then, as every operation on a CPU is over when it returns.
"""

import os

import pytest
import torch

IS_DRY = bool(os.environ.get("TRACKBED_GPU_DRY"))
if IS_DRY:
    import tests.conformance.megatron_lm.cuda_shim  # noqa: F401 - replaces streams and events
DEVICE = "cpu" if IS_DRY else "cuda"
needs_cuda = pytest.mark.skipif(IS_DRY, reason="a rehearsal has no streams that run beside each other")


def scaled(number):
    """A size, of which a rehearsal uses a thousandth."""
    return max(1, number // 1000) if IS_DRY else number


def fewer(choices, *names):
    """Choices to test; of them, a rehearsal takes those with these names."""
    return {name: choices[name] for name in names} if IS_DRY else choices


def sleep(seconds):
    """Keeps the current stream busy; returns at once."""
    if not IS_DRY:
        torch.cuda._sleep(int(seconds * _cycles_per_second()))


def _cycles_per_second():
    if not _measured:
        torch.cuda._sleep(1000)  # loads the kernel
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        end.synchronize()
        _measured.append(20_000_000 / start.elapsed_time(end) * 1000)
    return _measured[0]


_measured = []
