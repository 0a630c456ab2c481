"""Sums of squares of tensors on a GPU, which the host reads once."""

import functools
import logging
import math
from fractions import Fraction
from types import ModuleType

import torch

from trackbed.grads.collectives import Fetch

logger = logging.getLogger(__name__)

_LIMB_BITS = 40
_KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class GpuSquares:
    """Sum of squares of vectors on one GPU, in units of 2**-300: exact with Triton, which torch for CUDA brings.

    Without Triton, and for float64, the norm of each vector is computed in float64, and its square is rounded to a
    unit: the relative error is some 1e-15, and depends on how the gradients are cut.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._kernel = _kernel(device)
        size = 0 if self._kernel is None else self._kernel.SLOTS
        self._sums = torch.zeros(size, dtype=torch.int64, device=device)
        self._norms: list[torch.Tensor] = []

    def add(self, vector: torch.Tensor) -> None:
        """Adds the squares of `[N]` numbers, without a wait for the GPU."""
        if self._kernel is not None and vector.dtype in _KERNEL_TYPES:
            self._kernel.add_squares(vector.contiguous(), self._sums)
        else:
            self._norms.append(torch.linalg.vector_norm(vector, dtype=torch.float64))

    def total(self, fetch: Fetch = torch.Tensor.cpu) -> tuple[int, int, int]:
        """Returns the sum, and whether there is a NaN, and an infinity.

        Args:
            fetch: copies a tensor from the GPU to the host, and waits for the copy.
        """
        # As one tensor, whose norms are carried bit by bit, so that there is one copy.
        norms = torch.stack(self._norms).view(torch.int64) if self._norms else self._sums[:0]
        numbers = fetch(torch.cat([self._sums, norms]))
        sums = numbers[: len(self._sums)].tolist()
        units = num_nan = num_infinite = 0
        if self._kernel is not None:
            num_nan, num_infinite = sums[self._kernel.NAN_SLOT], sums[self._kernel.INFINITE_SLOT]
            units = sum(limb << _LIMB_BITS * place for place, limb in enumerate(sums[: self._kernel.NAN_SLOT]))
        for norm in numbers[len(self._sums) :].view(torch.float64).tolist():
            num_nan += math.isnan(norm)
            num_infinite += math.isinf(norm)
            units += round(Fraction(norm) ** 2 * 2**300) if math.isfinite(norm) else 0
        return units, int(num_nan > 0), int(num_infinite > 0)


@functools.cache
def _kernel(device: torch.device) -> ModuleType | None:
    """Module with the kernel; None if there is no Triton, or it cannot compile the kernel for this GPU."""
    try:
        from trackbed.optim import square_sum_kernel

        sums = torch.zeros(square_sum_kernel.SLOTS, dtype=torch.int64, device=device)
        square_sum_kernel.add_squares(torch.zeros(1, device=device), sums)
    except Exception as error:  # noqa: BLE001  Triton raises many types if a compiler is missing or a GPU is old
        reason = str(error).partition("\n")[0]
        logger.warning("norms of gradients on %s are rounded to float64, because Triton fails: %s", device, reason)
        return None
    return square_sum_kernel
