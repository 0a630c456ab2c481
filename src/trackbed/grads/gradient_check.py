"""Checks of gradients before they are reduced."""

import math
from collections.abc import Collection, Sequence
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

    def is_there(self) -> bool:
        """True if there is anything to be asked. If not, the host need not wait for norms of gradients on a GPU."""
        ...

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


def has_judge() -> bool:
    """True if a program is asked about each norm."""
    judge = _judge[0]
    return judge is not None and judge.is_there()


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


class FiniteCheck:
    """Finds the first gradient of a step that is not finite on the GPU, so that the host waits for nothing.

    What was found is sent to all ranks with the other numbers of the step, and each of them raises the same error.

    Args:
        buckets: all buckets of a wrapper, those of experts last.
        experts: parameters of experts.
        has_same_experts: for each rank, whether it has the experts of this one.
    """

    def __init__(
        self,
        buckets: Sequence[_ParamAndGradBucket],
        experts: Collection[torch.nn.Parameter] = (),
        has_same_experts: Sequence[bool] = (),
    ) -> None:
        self._experts = frozenset(experts)
        self._has_same_experts = has_same_experts
        self._places = [(bucket, param) for bucket in buckets for param in bucket.params_list if param.numel()]
        """Bucket and parameter of each number that ranks send."""
        self._numbers: dict[_ParamAndGradBucket, torch.Tensor] = {}
        for bucket in buckets:
            own = [number for number, (other, _) in enumerate(self._places) if other is bucket]
            self._numbers[bucket] = torch.tensor(own, dtype=torch.int64, device=bucket.grad_data.device)
        self._first: torch.Tensor | None = None

    def look_at(self, bucket: _ParamAndGradBucket) -> None:
        """Looks at the gradients of a bucket, before they are reduced."""
        gradients = [param.main_grad for param in bucket.params_list if param.numel()]  # type: ignore[attr-defined]
        if not gradients:
            return
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(gradients, dtype=dtype))
        first = torch.where(torch.isfinite(norms), _ALL_FINITE, self._numbers[bucket]).min()
        self._first = first if self._first is None else torch.minimum(self._first, first)

    def take(self, device: torch.device) -> torch.Tensor:
        """Returns `[1]` number of the first gradient that is not finite, for `check`, and begins anew."""
        first, self._first = self._first, None
        return torch.full((1,), _ALL_FINITE, device=device) if first is None else first.to(device).view(1)

    def forget(self) -> None:
        """Forgets what was found."""
        self._first = None

    def check(self, numbers: Sequence[int]) -> None:
        """Checks that the gradients of all ranks were finite.

        Args:
            numbers: result of `take` of each rank.

        Raises:
            NonFiniteGradientError: names the first rank with one that was not, the parameter, and the bucket.
        """
        for rank, number in enumerate(numbers):
            if number != _ALL_FINITE:
                name = self._describe(number, rank)
                raise NonFiniteGradientError(
                    f"rank {rank}: gradients must be finite, but that of {name} is NaN or infinite"
                )

    def _describe(self, number: int, rank: int) -> str:
        is_known = number < len(self._places)  # a rank may have more experts than this one
        if not is_known or (self._places[number][1] in self._experts and not self._has_same_experts[rank]):
            return "a parameter of an expert"
        bucket, param = self._places[number]
        name = bucket.names.get(param, f"a parameter of shape {list(param.shape)}")
        return f"{name} in bucket {bucket.bucket_id}"


_ALL_FINITE: Final = torch.iinfo(torch.int64).max
