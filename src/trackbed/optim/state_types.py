"""Types of the tensors in the state of an optimizer: each keeps its own, unless torch's optimizer needs another."""

from collections.abc import Mapping
from typing import Any

import torch

from trackbed.checkpoint.exact_cast import is_exact_cast
from trackbed.errors import ArgumentError
from trackbed.grads.memory_order import arranged_like
from trackbed.optim.pieces import Piece, is_low_precision
from trackbed.optim.state_parts import WHERE, State

__all__ = ["check_types", "fitted"]


def check_types(
    name: str, state: Mapping[str, Any], expected: Mapping[str, torch.Tensor], param: torch.Tensor, who: str
) -> None:
    """Checks that no value of a state changes in the type in which it is loaded.

    Args:
        name: name of the parameter.
        state: its state.
        expected: result of `expected_state`.
        param: the parameter, or a part of one.
        who: class of the optimizer, for the error.

    Raises:
        ArgumentError: one would.
    """
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        target = _type_of(value, expected.get(key), param)
        if is_exact_cast(value.dtype, target) or _is_same(value.to(target).to(value.dtype), value):
            continue
        msg = (
            f"{WHERE}: {key!r} of {name} must be of {target}, as {who} needs it, but is of {value.dtype}, and values "
            "would change: pass allow_cast=True to round them"
        )
        raise ArgumentError(msg)


def fitted(piece: Piece, state: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> State:
    """Returns copies of the tensors of a state with type, device and strides as the optimizer of a piece has them."""
    return {
        key: _fitted(value, expected.get(key), piece, is_of_shape=value.shape == piece.main.shape and key != "step")
        if isinstance(value, torch.Tensor)
        else value
        for key, value in state.items()
    }


def _type_of(value: torch.Tensor, like: torch.Tensor | None, param: torch.Tensor) -> torch.dtype:
    """Type in which a tensor is loaded: its own, but for what torch's optimizer needs, and beside float32 copies."""
    is_copied = is_low_precision(param)
    if value.is_floating_point() and (
        (like is not None and like.dim() > 0 and like.is_floating_point()) or (is_copied and is_low_precision(value))
    ):
        return torch.float32 if is_copied else param.dtype
    return value.dtype


def _fitted(value: torch.Tensor, like: torch.Tensor | None, piece: Piece, *, is_of_shape: bool) -> torch.Tensor:
    target = _type_of(value, like, piece.param)
    if not is_of_shape:
        return value.to(target, copy=True)
    return arranged_like(value.to(piece.main.device, target, copy=True), piece.main)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors of one type have the same values, where NaN is the same as NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
