"""Norm of gradients, with the same bits however they are cut, ordered or distributed.

The square of a float32 number is an integer times a power of two, so sums of them are computed exactly, in integers,
and rounded once at the end.
"""

import functools
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from types import ModuleType
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from trackbed.errors import ArgumentError
from trackbed.grads.collectives.protocol import SUMMABLE, array_of
from trackbed.kernels import square_sum

logger = logging.getLogger(__name__)

_KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class GpuSquares:
    """Sum of squares of vectors on one GPU, in units of 2**-300: exact with Triton, which torch for CUDA brings.

    Without Triton, and for float64, the norm of each vector is computed in float64, and the sum of their squares is
    rounded: the relative error is some 1e-15, and depends on how the gradients are cut.

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

    def numbers(self) -> torch.Tensor:
        """`[K]` numbers of `SquareSum.numbers`, on the GPU, without a wait for it."""
        device = self._sums.device
        special = torch.zeros(2, dtype=torch.int64, device=device)
        limbs = torch.zeros(_NUM_LIMBS, dtype=torch.int64, device=device)
        rounded = torch.zeros(1, dtype=torch.float64, device=device)
        if self._kernel is not None:
            special = self._sums[self._kernel.NAN_SLOT : self._kernel.NAN_SLOT + 2]
            limbs = self._sums[:_NUM_LIMBS]
            # What is over 40 bits goes to the next limb, so that the limbs of 2**22 ranks can be added in 64 bits.
            over = limbs >> _LIMB_BITS
            limbs = limbs & (1 << _LIMB_BITS) - 1
            limbs[1:] += over[:-1]
        if self._norms:
            squares = torch.stack(self._norms) ** 2
            special = special + torch.stack([squares.isnan().sum(), squares.isinf().sum()])
            rounded = squares.nan_to_num(nan=0.0, posinf=0.0).sum().view(1)
        return torch.cat([special, limbs, rounded.view(torch.int64)])


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


_UNIT: Final = -300
"""Binary exponent of the unit in which sums are counted: twice that of the smallest float32, and 2 more."""
_UNITS: Final = 2**-_UNIT
"""Units in 1."""
_LIMB_BITS: Final = 40
_NUM_LIMBS: Final = 18
"""Limbs of 40 bits hold the squares of 2**164 numbers of the largest size; 2**22 ranks can add theirs in 64 bits."""
_CHUNK: Final = 1 << 24


def global_norm(gradients: Iterable[torch.Tensor]) -> float:
    """Square root of the sum of all squares, correctly rounded. Does not communicate.

    Args:
        gradients: tensors of this process, of any shape, in float32, bfloat16 or float16; of float64, each square is
            rounded to float64 and to a multiple of 2**-300 first, and numbers from 2**128 on count as infinite.

    Returns:
        The norm; NaN if there is a NaN, else infinite if there is an infinity.

    Raises:
        ArgumentError: a tensor is of another type.

    >>> global_norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
    5.0
    """
    return SquareSum.of(gradients).norm()


@dataclass(frozen=True, slots=True)
class SquareSum:
    """Exact sum of squares."""

    units: int = 0
    """The sum of the finite numbers' squares, in multiples of 2**-300."""
    num_nan: int = 0
    """Number of tensors with a NaN."""
    num_infinite: int = 0
    """Number of tensors with an infinity."""

    @staticmethod
    def of(tensors: Iterable[torch.Tensor]) -> "SquareSum":
        """Sums the squares of all elements of some tensors, on any device."""
        return SquareSum.total(square_sum_numbers(tensors).cpu().numpy()[np.newaxis])

    @staticmethod
    def total(rows: npt.NDArray[np.int64]) -> "SquareSum":
        """Adds the sums of several ranks.

        Args:
            rows: `[ranks, K]` the `numbers()` of each rank.
        """
        nan, infinite, *limbs = (int(column) for column in rows[:, :-1].sum(axis=0, dtype=np.int64))
        units = sum(limb << _LIMB_BITS * place for place, limb in enumerate(limbs))
        rounded = np.ascontiguousarray(rows[:, -1]).view(np.float64)
        return SquareSum(
            units + sum(round(Fraction(number) * _UNITS) for number in rounded.tolist() if number), nan, infinite
        )

    def __add__(self, other: "SquareSum") -> "SquareSum":
        return SquareSum(self.units + other.units, self.num_nan + other.num_nan, self.num_infinite + other.num_infinite)

    def numbers(self) -> npt.NDArray[np.int64]:
        """`[K]` numbers from which `total` makes the sum over up to 2**22 ranks.

        They are the counts of tensors with a NaN and with an infinity, the limbs of the sum in units, the lowest first,
        and the bits of a float64: a further part of the sum, which a GPU has rounded.
        """
        mask = (1 << _LIMB_BITS) - 1
        limbs = [self.units >> _LIMB_BITS * place & mask for place in range(_NUM_LIMBS)]
        return np.array([self.num_nan, self.num_infinite, *limbs, 0], dtype=np.int64)

    def norm(self) -> float:
        """Square root of the sum, correctly rounded."""
        if self.num_nan or self.num_infinite:
            return math.nan if self.num_nan else math.inf
        # Twice as many bits as a float has, of which the last says whether any are missing.
        shift = max(0, 130 - self.units.bit_length()) // 2 * 2
        root = math.isqrt(self.units << shift)
        if root * root != self.units << shift:
            root = root << 1 | 1
            shift += 2
        return math.ldexp(root, (_UNIT - shift) // 2)


def square_sum_numbers(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns `[K]` `SquareSum.numbers` of the elements of some tensors, without a wait for a GPU.

    They are on the device of the tensors; on the CPU, after a wait, if the tensors are on several.
    """
    on_cpu = SquareSum()
    on_gpus: dict[torch.device, GpuSquares] = {}
    for tensor in tensors:
        vector = tensor.detach().reshape(-1)
        _check_type(vector)
        if vector.is_cuda:
            if vector.device not in on_gpus:
                on_gpus[vector.device] = GpuSquares(vector.device)
            on_gpus[vector.device].add(vector)
            continue
        for chunk in vector.split(_CHUNK):  # type: ignore[no-untyped-call]
            on_cpu += _sum_of(chunk)
    rows = [squares.numbers() for squares in on_gpus.values()]
    if on_cpu != SquareSum() or not rows:
        rows.append(torch.from_numpy(on_cpu.numbers()))
    if len(rows) == 1:
        return rows[0]
    return torch.from_numpy(SquareSum.total(np.stack([row.cpu().numpy() for row in rows])).numbers())


def _check_type(vector: torch.Tensor) -> None:
    if vector.dtype not in SUMMABLE:
        raise ArgumentError(f"gradients must be of float32, float64, bfloat16 or float16, but one is of {vector.dtype}")


def _sum_of(vector: torch.Tensor) -> SquareSum:
    *digits, num_nan, num_infinite = square_sum(array_of(vector.cpu().contiguous())).tolist()
    if num_nan or num_infinite:
        return SquareSum(0, int(num_nan > 0), int(num_nan == 0))
    return SquareSum(int.from_bytes(np.array(digits, dtype="<u4").tobytes(), "little"))
