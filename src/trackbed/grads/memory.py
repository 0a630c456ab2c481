"""Memory of buffers."""

import mmap
from typing import Final

import torch

from trackbed.comm.shared_memory import SharedMemory

__all__ = ["BufferMemory"]

_CPU: Final = torch.device("cpu")


class BufferMemory:
    """Zeros in memory that other ranks of the host can map, where the device is the CPU; otherwise a plain tensor.

    Args:
        numel: number of elements.
        dtype: type of the elements.
        device: device of the memory.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shared: SharedMemory | None = None
        """The memory as other processes can map it; None for other devices, for no elements, and with a problem."""
        self.problem: str | None = None
        """Reason why the system refuses memory that processes can share; None if it has not."""
        if device.type == _CPU.type and numel > 0:
            num_bytes = numel * dtype.itemsize
            try:
                self.shared = SharedMemory.create(-(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
            except OSError as error:  # a sandbox without memfd, for one
                self.problem = f"{type(error).__name__}: {error}"
        if self.shared is not None:
            self.tensor = torch.frombuffer(self.shared.mapping, dtype=dtype, count=numel)
        else:
            self.tensor = torch.zeros(numel, dtype=dtype, device=device)
        self._released_bytes = 0

    @property
    def is_released(self) -> bool:
        """True between `release` and `restore`."""
        return self._released_bytes > 0

    def release(self) -> None:
        """Gives the memory back to the system. Views stay valid, but must not be used before `restore`."""
        if self.is_released or self.tensor.numel() == 0:
            return
        self._released_bytes = self.tensor.untyped_storage().nbytes()
        if self.shared is not None:
            self.shared.release_pages()
        else:
            self.tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Takes the memory again; it holds zeros."""
        if not self.is_released:
            return
        if self.shared is None:
            self.tensor.untyped_storage().resize_(self._released_bytes)
            self.tensor.zero_()
        self._released_bytes = 0
