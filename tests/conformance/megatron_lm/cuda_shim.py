"""A pytest plugin: Megatron Core's CUDA calls, answered by the CPU.

Importing this module changes torch for the whole process: "cuda" as a device means "cpu", `Tensor.cuda` returns its
tensor, `Tensor.type` reports CUDA's names of types, which Megatron Core compares as strings, and streams and events do
nothing, as every operation is complete when it returns.
"""

from contextlib import nullcontext

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class CudaOnCpu(TorchFunctionMode):
    """Executes on the CPU each torch function that names CUDA."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()})
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def on_cpu(value):
    """The CPU for a CUDA device or its name, every other value as it is."""
    is_cuda = (isinstance(value, str) and value.partition(":")[0] == "cuda") or (
        isinstance(value, torch.device) and value.type == "cuda"
    )
    return CPU if is_cuda else value


class Stream:
    """A stream whose work is complete."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return event or Event()

    def synchronize(self):
        pass


class Event:
    """An event that has happened."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def query(self):
        return True

    def elapsed_time(self, end):
        return 0.0

    def synchronize(self):
        pass


STREAM = Stream()

REPLACEMENTS = {
    "Event": Event,
    "Stream": Stream,
    "current_device": lambda: CPU,
    "current_stream": lambda device=None: STREAM,
    "default_stream": lambda device=None: STREAM,
    "device_count": lambda: 1,
    "empty_cache": lambda: None,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "is_current_stream_capturing": lambda: False,
    "max_memory_allocated": lambda device=None: 0,
    "memory_allocated": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
    "set_device": lambda device: None,
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "stream": lambda stream: nullcontext(),
    "synchronize": lambda device=None: None,
}

for name, replacement in REPLACEMENTS.items():
    setattr(torch.cuda, name, replacement)
torch.accelerator.current_accelerator = lambda check_available=False: None
MODE = CudaOnCpu()
MODE.__enter__()
