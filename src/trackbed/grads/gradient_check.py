"""Checks of gradients before they are reduced."""

import math

import torch

from trackbed.errors import GradientError
from trackbed.grads.buffer import _ParamAndGradBucket

__all__ = ["NormHistory", "check_finite", "norm_of"]

_MIN_NORMS = 100
_LARGE = 10.0


class NormHistory:
    """Largest norm of many, to notice one that is far larger."""

    def __init__(self) -> None:
        self.largest = 0.0
        self._count = 0

    def is_large(self, norm: float) -> bool:
        """True if a norm is over 10 times the largest of at least 100 before; if not, it joins them."""
        if self._count >= _MIN_NORMS and norm > _LARGE * self.largest:
            return True
        if math.isfinite(norm):
            self.largest = max(self.largest, norm)
            self._count += 1
        return False


def norm_of(gradients: torch.Tensor) -> float:
    """Euclidean norm, in float32 at least: in float16 it would be infinite above 65,504."""
    dtype = torch.promote_types(gradients.dtype, torch.float32)
    return float(torch.linalg.vector_norm(gradients, dtype=dtype))


def check_finite(bucket: _ParamAndGradBucket, norm: float, rank: int) -> None:
    """Raises the error for a bucket whose norm is not finite.

    Raises:
        GradientError: names the rank, the first parameter with such a gradient, and the bucket.
    """
    for param in bucket.params_list:
        gradient = param.main_grad  # type: ignore[attr-defined]
        if not math.isfinite(own := norm_of(gradient)):
            kind = "NaN" if bool(torch.isnan(gradient).any()) else "infinite"
            name = bucket.names.get(param, f"a parameter of shape {list(param.shape)}")
            msg = (
                f"rank {rank}: gradients must be finite, but that of {name} in bucket {bucket.bucket_id} is {kind}: "
                f"its norm is {own}"
            )
            raise GradientError(msg)
    msg = f"rank {rank}: gradients must be finite, but the norm of bucket {bucket.bucket_id} is {norm}"
    raise GradientError(msg)
