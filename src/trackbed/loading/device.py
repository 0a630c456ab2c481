"""Batches on their way to an accelerator, beside what it computes."""

from collections import deque
from typing import NamedTuple

import torch

from trackbed.datasets import Batch

__all__ = ["DeviceBatch", "DeviceCopies"]


class DeviceBatch(NamedTuple):
    """A batch that is being copied."""

    batch: Batch
    is_there: torch.cuda.Event

    def wait(self) -> Batch:
        """The batch, for work on the current stream, which begins when the copy has ended."""
        stream = torch.cuda.current_stream(next(iter(self.batch.values())).device)
        stream.wait_event(self.is_there)
        for tensor in self.batch.values():
            tensor.record_stream(stream)  # its memory is not given away before that work is done
        return self.batch


class DeviceCopies:
    """Copies batches to a device on a stream of its own; one is begun after the other.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._shared: dict[str, torch.Tensor] = {}
        self._under_way: deque[tuple[Batch, torch.cuda.Event]] = deque()

    def begin(self, batch: Batch) -> DeviceBatch:
        """Begin to copy a batch of pinned memory, which is held until its copy has ended."""
        while self._under_way and self._under_way[0][1].query():  # type: ignore[no-untyped-call]
            self._under_way.popleft()
        with torch.cuda.stream(self._stream):
            copied = Batch({name: self._copy(name, batch) for name in batch}, shared=batch.shared)
            is_there = self._stream.record_event()
        self._under_way.append((batch, is_there))
        return DeviceBatch(copied, is_there)

    def _copy(self, name: str, batch: Batch) -> torch.Tensor:
        tensor = batch[name]
        if name not in batch.shared:
            return tensor.to(self._device, non_blocking=True)
        if name not in self._shared:  # what all samples share is copied once
            self._shared[name] = tensor[0].to(self._device)
        return self._shared[name].expand(tensor.shape)
