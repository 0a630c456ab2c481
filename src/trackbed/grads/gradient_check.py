"""Checks of gradients before they are reduced."""

import math
from typing import Final, Protocol

import torch

from trackbed.errors import GradientError
from trackbed.grads.buffer import _ParamAndGradBucket

_MIN_NORMS = 100
_LARGE = 10.0


class NonFiniteGradientError(GradientError, RuntimeError):
    """A gradient is NaN or infinite. Also a RuntimeError, as Megatron Core raises."""


class Judge(Protocol):
    """Program that is asked about each norm, and may have a step run again in the place of an error."""

    def check_finite(self, norm: float, bucket: int) -> bool:
        """Judges a norm that should be finite. Returns False to leave it to Trackbed; raises to refuse it."""
        ...

    def check_large(self, norm: float, bucket: int) -> bool:
        """Judges a norm that should not be far larger than others. Returns False to leave it to Trackbed."""
        ...


_judge: Final[list[Judge | None]] = [None]


def choose_judge(judge: Judge | None) -> None:
    """Has all bucket groups of this process ask a program about each norm; None for no one."""
    _judge[0] = judge


def is_judged_large(norm: float, bucket: int) -> bool:
    """True if a program was asked about the size of the norm of a bucket, and has said what is to be said."""
    judge = _judge[0]
    return judge is not None and judge.check_large(norm, bucket)


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


def check_finite(bucket: _ParamAndGradBucket, norm: float, number: int, rank: int) -> None:
    """Checks that the norm of a bucket is finite, unless the program that is asked has that step run again.

    Args:
        bucket: bucket.
        norm: norm of its gradients.
        number: number of the bucket in its group.
        rank: number of this rank.

    Raises:
        NonFiniteGradientError: names the rank, the first parameter with such a gradient, and the bucket.
    """
    judge = _judge[0]
    refusal: Exception | None = None
    try:
        if judge is not None and judge.check_finite(norm, number):
            return
    except Exception as error:
        if math.isfinite(norm):
            raise
        refusal = error
    if not math.isfinite(norm):
        raise NonFiniteGradientError(_describe(bucket, norm, rank)) from refusal


def _describe(bucket: _ParamAndGradBucket, norm: float, rank: int) -> str:
    """Text of the error for a bucket whose norm is not finite."""
    for param in bucket.params_list:
        gradient = param.main_grad  # type: ignore[attr-defined]
        if not math.isfinite(own := norm_of(gradient)):
            kind = "NaN" if bool(torch.isnan(gradient).any()) else "infinite"
            name = bucket.names.get(param, f"a parameter of shape {list(param.shape)}")
            return (
                f"rank {rank}: gradients must be finite, but that of {name} in bucket {bucket.bucket_id} is {kind}: "
                f"its norm is {own}"
            )
    return f"rank {rank}: gradients must be finite, but the norm of bucket {bucket.bucket_id} is {norm}"
