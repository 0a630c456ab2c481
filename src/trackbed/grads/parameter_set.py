"""Parameters that are reduced over the same ranks: their checks, buffers, bucket groups and owner."""

import gc
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from trackbed.errors import ArgumentError, GradientError
from trackbed.grads.bucket_group import _ParamAndGradBucketGroup
from trackbed.grads.buffer import _ParamAndGradBucket, _ParamAndGradBuffer, quantized_data
from trackbed.grads.collectives import Collectives, SoloCollectives
from trackbed.grads.config import ReductionOptions

Parameter = torch.nn.Parameter


@dataclass(slots=True)
class BufferMembers:
    """Parameters of one buffer."""

    param_dtype: torch.dtype
    """Type of the parameters; uint8 for those of 8 bits."""
    grad_dtype: torch.dtype
    params: list[Parameter] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    """Number of each parameter among those of its type, where one of 8 bits counts under its high-precision type."""


@dataclass(frozen=True, slots=True)
class ScalingFactors:
    """Factors by which gradients are multiplied before they are reduced."""

    dense: float
    expert: float


def is_expert(param: torch.Tensor) -> bool:
    """True if only some of the data-parallel ranks have the parameter, as those of experts do."""
    return not getattr(param, "allreduce", True)


def name_in_module(name: str) -> str:
    """Name of a parameter or buffer without what `torch.compile` adds to it.

    >>> name_in_module("_orig_mod.layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod") if "_orig_mod" in name else name


def check_supported(named: Iterable[tuple[str, Parameter]]) -> None:
    """Checks that parameters can be moved to buffers."""
    device = None
    for name, param in named:
        if torch.nn.parameter.is_lazy(param):
            raise ArgumentError(f"{name} must have a shape, but is lazy: run the model once before wrapping it")
        if param.device.type == "meta":
            raise ArgumentError(
                f"{name} must have data, but lies on the device meta: call to_empty() before wrapping the model"
            )
        if is_traceable_wrapper_subclass(param) and quantized_data(param) is None:
            raise ArgumentError(
                f"{name} must be a plain tensor, but is of {type(param.data).__name__}, which has its data elsewhere"
            )
        if param.is_inference():
            raise ArgumentError(
                f"{name} must be a parameter that can be trained, but was made in torch.inference_mode()"
            )
        if param.is_complex():
            raise ArgumentError(f"{name} must be of real numbers, but is of {param.dtype}")
        device = param.device if device is None else device
        if param.device != device:
            raise ArgumentError(
                f"{name} must lie on {device}, like the parameters before it, but lies on {param.device}"
            )


def group_parameters(params: Iterable[Parameter], *, reduce_in_fp32: bool) -> list[BufferMembers]:
    """Divides parameters among buffers, by the types of parameter and gradient, in order of their first member.

    Args:
        params: parameters in order of definition.
        reduce_in_fp32: True to reduce all gradients in float32.
    """
    buffers: dict[tuple[torch.dtype, torch.dtype], BufferMembers] = {}
    counts: dict[tuple[torch.dtype, torch.dtype], int] = {}
    for param in params:
        param_dtype = param.dtype if quantized_data(param) is None else torch.uint8
        grad_dtype = torch.float32 if reduce_in_fp32 else param.dtype
        members = buffers.setdefault((param_dtype, grad_dtype), BufferMembers(param_dtype, grad_dtype))
        members.params.append(param)
        index = counts.get((param.dtype, grad_dtype), 0)
        members.indices.append(index)
        counts[param.dtype, grad_dtype] = index + 1
    return list(buffers.values())


def averaging_factors(*, num_ranks: int, num_expert_ranks: int, average_in_collective: bool) -> ScalingFactors:
    """Factors with which the gradients end as averages over all data-parallel ranks.

    Args:
        num_ranks: number of data-parallel ranks.
        num_expert_ranks: number of ranks with the same experts.
        average_in_collective: True if the collective divides by the number of its ranks.
    """
    if average_in_collective:
        return ScalingFactors(1.0, num_expert_ranks / num_ranks)
    return ScalingFactors(1.0 / num_ranks, 1.0 / num_ranks)


def check_unchanged(
    model: torch.nn.Module, wrapped: Collection[Parameter], buffers: Sequence[_ParamAndGradBuffer], rank: int
) -> None:
    """Checks that the parameters of a model are those that were wrapped.

    Args:
        model: model.
        wrapped: parameters that required a gradient.
        buffers: their buffers.
        rank: number of this rank.

    Raises:
        GradientError: a parameter that was frozen or not there requires a gradient now, or the data of one that was
            wrapped lies elsewhere.
    """
    advice = "wrap the model again after changing it"
    for name, param in model.named_parameters():
        if param.requires_grad and param not in wrapped:
            raise GradientError(
                f"rank {rank}: {name} must stay frozen, or the parameter that it was when the model was wrapped, but "
                f"is one that requires a gradient and was not there: {advice}"
            )
    for buffer in buffers:
        moved = buffer.first_moved()
        if moved is not None:
            raise GradientError(f"rank {rank}: the data of {moved} must stay where it was, but was replaced: {advice}")


def drop_gradients(params: Iterable[Parameter]) -> None:
    """Drops the gradients that autograd has left in `grad` of parameters, which buffers do not count."""
    for param in params:
        param.grad = None


def check_taken_over(buffers: Iterable[_ParamAndGradBuffer], rank: int) -> None:
    """Checks that all gradients are in buffers."""
    for buffer in buffers:
        for param in buffer.params:
            if param.grad is not None:
                raise GradientError(
                    f"rank {rank}: gradients must be in main_grad, but {buffer.param_to_name[param]} has one in grad, "
                    "set by the program, or left by a backward pass that failed: call zero_grad() and repeat the step, "
                    "and add gradients of your own to main_grad before the last backward pass"
                )


def partition_buckets(
    buffers: Sequence[_ParamAndGradBuffer],
    force_single_bucket_group: bool = False,  # noqa: FBT001, FBT002  Megatron Core's signature
) -> list[_ParamAndGradBucketGroup]:
    """Puts each bucket into a group of its own, with two exceptions.

    With 8-bit parameters, buckets of other types join the last group of the 8-bit buffer: its parameters are the first
    of the model, so by the time their gradients are there all others are too.

    Args:
        buffers: buffers of different types of parameters.
        force_single_bucket_group: True to put all buckets into one group.

    Raises:
        GradientError: two buffers have the same type of parameters, or the buffers of one group differ in options or
            process group.
    """
    if not buffers:
        return []
    by_type = {buffer.param_dtype: buffer for buffer in buffers}
    if len(by_type) != len(buffers):
        raise GradientError(
            f"buffers must have different types of parameters, but have {[buffer.param_dtype for buffer in buffers]}"
        )
    if force_single_bucket_group:
        _check_alike(buffers)
        return [_group([bucket for buffer in buffers for bucket in buffer.buckets], buffers[0])]
    quantized = by_type.get(torch.uint8)
    if quantized is None:
        return [_group([bucket], buffer) for buffer in buffers for bucket in buffer.buckets]
    others = [bucket for buffer in buffers if buffer is not quantized for bucket in buffer.buckets]
    *first, last = quantized.buckets
    return [*(_group([bucket], quantized) for bucket in first), _group([last, *others], quantized)]


def _check_alike(buffers: Sequence[_ParamAndGradBuffer]) -> None:
    first = buffers[0]
    for buffer in buffers:
        if buffer.ddp_config != first.ddp_config or buffer.data_parallel_group != first.data_parallel_group:
            raise GradientError(
                "buffers of one bucket group must have the same options and process group, but those of "
                f"{first.param_dtype} and {buffer.param_dtype} differ"
            )


def _group(buckets: list[_ParamAndGradBucket], buffer: _ParamAndGradBuffer) -> _ParamAndGradBucketGroup:
    return _ParamAndGradBucketGroup(
        buckets, buffer.ddp_config, buffer.data_parallel_group, buffer.data_parallel_world_size
    )


@dataclass(slots=True, eq=False)
class ParameterSet:
    """Parameters that are reduced over the same ranks."""

    params: list[torch.nn.Parameter]
    """Parameters in order of definition."""
    buffers: list[_ParamAndGradBuffer]
    groups: list[_ParamAndGradBucketGroup]
    ranks: Any
    """Process group over which they are reduced."""
    collectives: Collectives

    @classmethod
    def allocate(
        cls,
        params: Sequence[torch.nn.Parameter],
        names: Mapping[torch.nn.Parameter, str],
        config: ReductionOptions,
        ranks: Any,
        *,
        factor: float,
        bucket_size: int | None,
        is_one_group: bool,
    ) -> "ParameterSet":
        """Moves parameters to buffers. Does not communicate.

        Args:
            params: parameters in order of definition.
            names: name of each parameter.
            config: options.
            ranks: process group over which the parameters are reduced.
            factor: factor for the gradients before they are reduced.
            bucket_size: number of elements from which a bucket is closed; None for one bucket per buffer.
            is_one_group: True to communicate all buckets together.
        """
        buffers = [
            _ParamAndGradBuffer(
                config,
                members.param_dtype,
                members.grad_dtype,
                members.params,
                ranks,
                bucket_size,
                names,
                factor,
                members.indices,
                False,  # noqa: FBT003  Megatron Core's signature
            )
            for members in group_parameters(params, reduce_in_fp32=config.grad_reduce_in_fp32)
        ]
        groups = partition_buckets(buffers, force_single_bucket_group=is_one_group)
        if config.use_distributed_optimizer and config.overlap_param_gather:
            for group, following in zip(groups[:0:-1], groups[-2::-1], strict=True):
                group.next_param_gather_bucket_group = following
        return cls(list(params), buffers, groups, ranks, SoloCollectives())

    def lacking(self) -> list[int]:
        """Numbers of the parameters that require a gradient, and have none on this rank."""
        found = [param for group in self.groups for param in group.without_gradient()]
        if not found:
            return []
        numbers = {param: number for number, param in enumerate(self.params)}
        return sorted(numbers[param] for param in found)

    def use(self, collectives: Collectives) -> None:
        """Sets the collectives of all groups."""
        self.collectives = collectives
        for group in self.groups:
            group.collectives = collectives


class Owner(ABC):
    """Holder of the parameters of a wrapped model, in the name of its wrapper."""

    module: torch.nn.Module
    params: list[Parameter]
    """Parameters that require a gradient."""
    is_released: bool
    """True if another wrapper has taken the model over."""

    @abstractmethod
    def has_begun(self) -> bool:
        """True if the wrapper was used."""

    @abstractmethod
    def release(self, param: Parameter) -> None:
        """Lets go of the model, of which another wrapper takes over a parameter."""


_OWNERS: Final = WeakIdKeyDictionary()
"""Weak reference to the owner of each parameter."""


def check_unclaimed(named: Iterable[tuple[str, Parameter]], members: Iterable[Parameter]) -> None:
    """Checks that no other wrapper is about to train some of the parameters together with others.

    A model may be wrapped again, and a wrapper that was used may give up its place to one of another model. But two
    new wrappers with a parameter in common are meant to be used together, and one of them would be refused later.

    Args:
        named: names and parameters to be claimed.
        members: all parameters of the model.
    """
    found = _first_in_common(named, set(members))
    if found is not None:
        gc.collect()  # a wrapper that only waits for the collector is none
        found = _first_in_common(named, set(members))
    if found is not None:
        raise ArgumentError(
            f"module: a parameter must have one wrapper, but {found} is in another DistributedDataParallel, with "
            "parameters that this model lacks: wrap one module that has all of them"
        )


def claim(params: Iterable[Parameter], owner: Owner) -> None:
    """Makes an object the owner of parameters, after the one that had them has let go of them."""
    for param in params:
        before = _owner_of(param)
        if before is not None and before is not owner:
            before.release(param)
        _OWNERS[param] = weakref.ref(owner)


def _first_in_common(named: Iterable[tuple[str, Parameter]], members: set[Parameter]) -> str | None:
    """Name of the first parameter of a wrapper that was not used, and has parameters besides; None if there is none."""
    for name, param in named:
        owner = _owner_of(param)
        if owner is None or owner.has_begun():
            continue
        present = set(
            owner.module.parameters()
        )  # without those that were replaced, after which a model is wrapped again
        if any(other in present and other not in members for other in owner.params):
            return name
    return None


def _owner_of(param: Parameter) -> Owner | None:
    owner: Owner | None = _OWNERS.get(param, lambda: None)()  # type: ignore[no-untyped-call]
    return owner
