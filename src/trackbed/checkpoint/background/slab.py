"""Shared memory for the copies of what a rank writes. It outlives a save, and the next one uses it again.

Fresh pages cost the system more than the copy itself, so they are taken ahead, all at once, and kept.
"""

import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, Final

import numpy as np
import torch

from trackbed.checkpoint.background.copies import Copies, LaterCopies, num_copying_threads
from trackbed.checkpoint.io.pinned_blocks import is_on_gpu
from trackbed.errors import CheckpointError

_ALIGNMENT: Final = 64
"""Copies begin at multiples of this number of bytes, as torch's own memory does."""
_LARGE_BYTES: Final = 1 << 20
"""Copies from this size on begin at pages, so that they can be written to the disk from where they lie."""
_ROUNDING: Final = 2 << 20
_serials: Final = itertools.count(1)
_PORTABLE: Final = 1
"""`cudaHostRegisterPortable`: the memory is locked for all GPUs."""
_POPULATE_WRITE: Final = 23
"""`MADV_POPULATE_WRITE` of Linux 5.14: takes the pages of a range, without an access to each."""


class Slab:
    """Memory for copies, of a size that only grows."""

    def __init__(self) -> None:
        self._memory: _Memory | None = None
        self._num_bytes = 0
        self._is_locked = False
        self._descriptor = -1
        self._lease: weakref.ref[Any] | None = None
        self._process: int | None = None
        """Process that has taken the memory, which processes forked from it would share."""
        self.serial = 0
        """Number of the memory, which no other memory of this process has."""

    @property
    def is_in_use(self) -> bool:
        """True while a tensor, or a view of one, uses the memory of the last copies."""
        return self._lease is not None and self._lease() is not None

    @property
    def num_bytes(self) -> int:
        """Size of the memory."""
        return self._num_bytes

    @property
    def descriptor(self) -> int:
        """Descriptor of the memory, which another process can map; -1 if there is none."""
        return self._descriptor

    def reserve(self, num_bytes: int, *, is_locked: bool = False) -> None:
        """Takes memory, if there is less than that. What it held is lost then.

        Args:
            num_bytes: number of bytes.
            is_locked: True for page-locked memory, to which a GPU copies by itself.

        Raises:
            CheckpointError: there is not so much.
        """
        is_own = self._process in (None, os.getpid())
        if is_own and num_bytes <= self._num_bytes and is_locked <= self._is_locked:
            return
        num_bytes, is_locked = max(num_bytes, self._num_bytes), is_locked or self._is_locked
        self.release()
        size = _rounded(num_bytes, _ROUNDING)
        try:
            self._memory, self._descriptor = _taken(size)
            if is_locked:
                self._memory.lock_pages()
        except (OSError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"snapshot: must have {size:,} bytes of memory for the copies of this rank, but: {error}"
            ) from error
        self._process = os.getpid()
        self._num_bytes, self._is_locked, self.serial = size, is_locked, next(_serials)

    def reserve_for(self, values: Sequence[torch.Tensor | bytes]) -> list[int]:
        """Takes memory for copies of values, if there is too little. Returns the first byte of each copy.

        Raises:
            CheckpointError: there is not enough.
        """
        places, num_bytes = places_of(value.nbytes if isinstance(value, torch.Tensor) else 0 for value in values)
        self.reserve(num_bytes, is_locked=any(map(_is_on_gpu, values)))
        return places

    def release(self) -> None:
        """Gives the memory back, as soon as no copy in it is used any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._memory, self._num_bytes, self._is_locked, self._descriptor = None, 0, False, -1

    def place_of(self, copy: torch.Tensor) -> int:
        """First byte of a copy in the memory."""
        if self._memory is None or not copy.numel():
            return 0
        return copy.data_ptr() - torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()

    def copies_of(
        self,
        values: Sequence[torch.Tensor | bytes],
        poll: Callable[[], None] = lambda: None,
        later: LaterCopies | None = None,
    ) -> list[torch.Tensor | bytes]:
        """Copies tensors into the memory. Overwrites what earlier copies had.

        Args:
            values: tensors of any strides and devices, and bytes, which need no copy.
            poll: called after each tensor; may raise to end the work.
            later: gets the copies that can be made later; None to make all of them.

        Returns:
            Contiguous tensors on the CPU with the same shapes, types and values; and the bytes.

        Raises:
            CheckpointError: there is not enough memory.
        """
        places = self.reserve_for(values)
        found: list[torch.Tensor | bytes] = []
        # The storage of each copy keeps this array, however many tensors share it.
        lease = None if self._memory is None else np.frombuffer(self._memory, dtype=np.uint8)
        self._lease = None if lease is None else weakref.ref(lease)
        now = Copies()
        for value, place in zip(values, places, strict=True):
            if not isinstance(value, torch.Tensor):
                found.append(value)
            elif lease is None or not value.numel():
                found.append(torch.empty_like(value, device="cpu"))
            else:
                copy = view_of_memory(lease, place, value.dtype, value.shape)
                found.append(copy)
                (later if later is not None and later.takes(value) else now).add(copy, value)
        now.finish(poll, num_threads=num_copying_threads())
        return found


def places_of(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Places of copies of some sizes, one after the other, and the end of the last one. Pure.

    >>> places_of([3, 100, 0, 1, 1 << 20])
    ([0, 64, 192, 192, 4096], 1052672)
    """
    starts, end = [], 0
    for size in sizes:
        start = _rounded(end, _alignment_of(size))
        starts.append(start)
        end = start + size
    return starts, end


def padded(size: int) -> int:
    """Bytes that a copy takes at most, wherever it lies among others.

    >>> padded(100), padded(1 << 20)
    (128, 1052672)
    """
    return _rounded(size, _alignment_of(size)) + (mmap.PAGESIZE if size >= _LARGE_BYTES else 0)


def _alignment_of(size: int) -> int:
    return _ALIGNMENT if size < _LARGE_BYTES else mmap.PAGESIZE


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def view_of_memory(memory: Any, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Tensor in some memory.

    Args:
        memory: object with the buffer protocol, which the tensor keeps.
        start: its first byte.
        dtype: type of the elements.
        shape: shape.
    """
    num_bytes = prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=num_bytes).view(dtype).view(tuple(shape))


class _Memory(mmap.mmap):
    """Memory that may be page-locked, until nothing refers to it."""

    _locked_at: int | None = None

    def lock_pages(self) -> None:
        """Locks the pages for GPUs. Where that fails, copies are slow, and right all the same."""
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        if int(_cudart().cudaHostRegister(address, len(self), _PORTABLE)) == 0:
            self._locked_at = address

    def __del__(self) -> None:
        if self._locked_at is not None:
            _cudart().cudaHostUnregister(self._locked_at)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _is_on_gpu(value: torch.Tensor | bytes) -> bool:
    return isinstance(value, torch.Tensor) and is_on_gpu(value.device)


def _taken(size: int) -> tuple[_Memory, int]:
    """Memory with all of its pages, and its descriptor; -1 where the system has none."""
    if not hasattr(os, "memfd_create"):
        return _Memory(-1, size), -1
    descriptor = os.memfd_create("trackbed-snapshot", os.MFD_CLOEXEC)
    try:
        # An access to a page that cannot be had would end the process.
        os.posix_fallocate(descriptor, 0, size)
        memory = _Memory(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    try:
        memory.madvise(_POPULATE_WRITE)
    except (OSError, ValueError):  # of an older system
        torch.frombuffer(memory, dtype=torch.uint8)[:: mmap.PAGESIZE] = 0
    return memory, descriptor
