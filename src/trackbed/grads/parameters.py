"""Which parameters share a buffer, and how their gradients are scaled."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trackbed.errors import ArgumentError, GradientError
from trackbed.grads.buffer import _ParamAndGradBuffer, quantized_data

__all__ = [
    "BufferMembers",
    "ScalingFactors",
    "averaging_factors",
    "check_supported",
    "check_taken_over",
    "check_unchanged",
    "drop_gradients",
    "group_parameters",
    "is_expert",
    "name_in_module",
]

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
    """Checks that parameters can be moved to buffers.

    Raises:
        ArgumentError: one is a DTensor or the like, is complex, has no data yet, was made in inference mode, or lies on
            another device than the first.
    """
    device = None
    for name, param in named:
        if torch.nn.parameter.is_lazy(param):
            msg = f"{name} must have a shape, but is lazy: run the model once before wrapping it"
            raise ArgumentError(msg)
        if param.device.type == "meta":
            msg = f"{name} must have data, but lies on the device meta: call to_empty() before wrapping the model"
            raise ArgumentError(msg)
        if is_traceable_wrapper_subclass(param) and quantized_data(param) is None:
            msg = f"{name} must be a plain tensor, but is of {type(param.data).__name__}, which has its data elsewhere"
            raise ArgumentError(msg)
        if param.is_inference():
            msg = f"{name} must be a parameter that can be trained, but was made in torch.inference_mode()"
            raise ArgumentError(msg)
        if param.is_complex():
            msg = f"{name} must be of real numbers, but is of {param.dtype}"
            raise ArgumentError(msg)
        device = param.device if device is None else device
        if param.device != device:
            msg = f"{name} must lie on {device}, like the parameters before it, but lies on {param.device}"
            raise ArgumentError(msg)


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
            msg = (
                f"rank {rank}: {name} must stay frozen, or the parameter that it was when the model was wrapped, but "
                f"is one that requires a gradient and was not there: {advice}"
            )
            raise GradientError(msg)
    for buffer in buffers:
        moved = buffer.first_moved()
        if moved is not None:
            msg = f"rank {rank}: the data of {moved} must stay where it was, but was replaced: {advice}"
            raise GradientError(msg)


def drop_gradients(params: Iterable[Parameter]) -> None:
    """Drops the gradients that autograd has left in `grad` of parameters, which buffers do not count."""
    for param in params:
        param.grad = None


def check_taken_over(buffers: Iterable[_ParamAndGradBuffer], rank: int) -> None:
    """Checks that all gradients are in buffers.

    Raises:
        GradientError: a parameter has one in `grad`.
    """
    for buffer in buffers:
        for param in buffer.params:
            if param.grad is not None:
                msg = (
                    f"rank {rank}: gradients must be in main_grad, but {buffer.param_to_name[param]} has one in grad, "
                    "set by the program, or left by a backward pass that failed: call zero_grad() and repeat the step, "
                    "and add gradients of your own to main_grad before the last backward pass"
                )
                raise GradientError(msg)
