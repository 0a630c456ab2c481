"""Asynchronous copies of batches to an accelerator."""

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import NamedTuple

import torch

from trackbed.datasets import Batch


def with_index(device: torch.device, current: int | None) -> torch.device:
    """Returns the device with its number; of "cuda" alone the current one."""
    return torch.device(device.type, current) if device.index is None else device


def on_device(number: int | None) -> AbstractContextManager[object]:
    """Makes a CUDA device the current one of this thread in a block; None for no change."""
    return nullcontext() if number is None else torch.cuda.device(number)


class DeviceBatch(NamedTuple):
    """A batch whose copy to the device is in progress."""

    batch: Batch
    copied: torch.cuda.Event

    def wait(self) -> Batch:
        """Returns the batch for use on the current stream, which is made to wait for the copy."""
        stream = torch.cuda.current_stream(next(iter(self.batch.values())).device)
        stream.wait_event(self.copied)
        for tensor in self.batch.values():
            tensor.record_stream(stream)  # keeps the allocator from reusing the memory before that work is done
        return self.batch


class DeviceCopies:
    """Copies batches to a device, in order, on a separate stream.

    It has to live as long as the memory of the batches is reused: a copy may still be queued when the iteration that
    began it has ended.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._shared: dict[str, torch.Tensor] = {}
        self._in_flight: deque[tuple[Batch, torch.cuda.Event]] = deque()
        self._lock = Lock()  # the threads of an iteration that has been left and of the next one may both be here

    def begin(self, batch: Batch) -> DeviceBatch:
        """Starts the copy of a batch in pinned memory, which is kept alive until the copy is complete."""
        with self._lock:
            while self._in_flight and self._in_flight[0][1].query():  # type: ignore[no-untyped-call]
                self._in_flight.popleft()
            with torch.cuda.stream(self._stream):
                copy = Batch({name: self._copy(name, batch) for name in batch}, shared=batch.shared)
                copied = self._stream.record_event()
            self._in_flight.append((batch, copied))
        return DeviceBatch(copy, copied)

    def _copy(self, name: str, batch: Batch) -> torch.Tensor:
        tensor = batch[name]
        if name not in batch.shared or not len(tensor):  # a batch without samples has no row to copy
            return tensor.to(self._device, non_blocking=True)
        if name not in self._shared:  # tensors that all samples share are copied once
            self._shared[name] = tensor[0].to(self._device)
        return self._shared[name].expand(tensor.shape)
