"""Copies between a GPU and files through few blocks of page-locked memory, beside the work of the host.

A copy from or to memory that is not page-locked takes several times as long, and nothing else is done meanwhile.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trackbed.checkpoint.io.box_parts import cut_box

Bytes = npt.NDArray[np.uint8]

BLOCK_BYTES: Final = 8 << 20
_NUM_BLOCKS: Final = 3
"""Blocks of a save: one that is being written, and two that are on their way."""
_NUM_LANE_BLOCKS: Final = 2
_POLL_SECONDS: Final = 0.0002


def is_on_gpu(device: torch.device) -> bool:
    """True if copies from and to a device go through page-locked memory."""
    return device.type == "cuda"


class Copies(Protocol):
    """Copies between the host and a GPU."""

    def new_block(self, num_bytes: int) -> torch.Tensor:
        """Returns `[num_bytes]` uint8 on the host, from and to which copies are quick."""
        ...

    def begin(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], bool]:
        """Begins to copy a contiguous tensor. Returns a function that says whether the copy is over."""
        ...

    def contiguous(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the elements of a part of a tensor in row-major order, on its device."""
        ...


class StreamCopies:
    """Copies on a stream, which is the current one, or one of its own that waits for the current one.

    Args:
        device: the GPU.
        is_own: True for a stream of its own.
    """

    def __init__(self, device: torch.device, *, is_own: bool) -> None:
        self._stream = torch.cuda.current_stream(device)
        if is_own:
            waits_for, self._stream = self._stream, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(waits_for)

    def new_block(self, num_bytes: int) -> torch.Tensor:
        """Page-locked memory, which torch keeps for later use."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def begin(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], bool]:
        """Begins to copy on the stream."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event().query  # type: ignore[no-any-return]

    def order_before(self, stream: torch.cuda.Stream) -> None:
        """Has what a stream is given from now on begin after these copies. The host does not wait."""
        stream.wait_stream(self._stream)

    def wait(self) -> None:
        """Waits for all copies."""
        self._stream.synchronize()

    def contiguous(self, part: torch.Tensor) -> torch.Tensor:
        """Copies on the stream, unless the part is contiguous."""
        with torch.cuda.stream(self._stream):
            return part.resolve_conj().resolve_neg().contiguous()


def wait_for(is_over: Callable[[], bool], poll: Callable[[], None]) -> None:
    """Waits for a copy. A wait inside the driver could not be ended if another rank fails.

    Args:
        is_over: result of `Copies.begin`.
        poll: called again and again; may raise to end the wait.
    """
    while not is_over():
        poll()
        time.sleep(_POLL_SECONDS)


def blocks_of(tensor: torch.Tensor, copies: Copies, poll: Callable[[], None]) -> Iterator[Bytes]:
    """Yields the bytes of a tensor on a GPU in row-major order, in blocks that are valid until the next one.

    Args:
        tensor: tensor, with at least one element.
        copies: copies from its device.
        poll: called while a copy is waited for; may raise.
    """
    parts = _parts_of(tensor)
    free = [copies.new_block(min(BLOCK_BYTES, tensor.nbytes)) for _ in range(_NUM_BLOCKS)]
    begun: deque[tuple[torch.Tensor, int, Callable[[], bool], torch.Tensor]] = deque()

    def begin_next() -> None:
        part = next(parts, None)
        if part is not None:
            flat = copies.contiguous(part).as_strided((part.numel(),), (1,))  # a single element may have any stride
            block, source = free.pop(), flat.view(torch.uint8)
            begun.append((block, len(source), copies.begin(block[: len(source)], source), source))

    for _ in range(_NUM_BLOCKS - 1):
        begin_next()
    while begun:
        begin_next()  # into the block that was yielded last: the file has it
        block, size, is_over, _ = begun[0]
        wait_for(is_over, poll)
        yield block[:size].numpy()
        begun.popleft()
        free.append(block)


def _parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields parts of a tensor that have its elements in row-major order, each of at most `BLOCK_BYTES`."""
    for first, shape in cut_box((0,) * tensor.ndim, tuple(tensor.shape), tensor.itemsize, BLOCK_BYTES):
        yield tensor[tuple(slice(low, low + size) for low, size in zip(first, shape, strict=True))]


class UploadLane:
    """Two blocks of page-locked memory, of which one is filled while the other one is copied to a GPU.

    Args:
        copies: copies to the GPU.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._blocks: deque[tuple[torch.Tensor, Callable[[], bool]]] = deque()
        """Blocks that are or were on their way, and whether they have arrived; the first one was begun first."""
        self._taken = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int, poll: Callable[[], None]) -> torch.Tensor:
        """Returns `[num_bytes]` uint8 to be filled, for `upload`.

        Args:
            num_bytes: size.
            poll: called while a copy is waited for; may raise.
        """
        if len(self._blocks) == _NUM_LANE_BLOCKS:
            block, is_over = self._blocks.popleft()
            wait_for(is_over, poll)
        else:
            block = self._copies.new_block(num_bytes)
        if len(block) < num_bytes:
            block = self._copies.new_block(num_bytes)
        self._taken = block
        return block[:num_bytes]

    def upload(self, target: torch.Tensor, box: torch.Tensor, wanted: tuple[slice, ...]) -> None:
        """Fills a tensor on the GPU.

        Args:
            target: tensor of any strides and type.
            box: what `take` returned, in its type and shape.
            wanted: part of the box, of the shape of the target.
        """
        is_plain = target.is_contiguous() and target.dtype == box.dtype and not (target.is_conj() or target.is_neg())
        if is_plain and target.shape == box.shape:
            is_over = self._copies.begin(target, box)
        else:
            # Types are converted, and gaps left, on the GPU: torch would do so on the host, and wait.
            there = torch.empty_like(box, device=target.device)
            is_over = self._copies.begin(there, box)
            target.copy_(there[wanted])
        self._blocks.append((self._taken, is_over))
