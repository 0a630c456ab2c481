"""Checks of what an optimizer of a wrapped model is built from."""

import inspect
from collections.abc import Mapping

import torch

from trackbed.errors import ArgumentError
from trackbed.grads import DistributedDataParallel

__all__ = ["check_kinds", "check_known"]


def check_kinds(optimizer: object, model: object) -> None:
    """Checks that a model is wrapped, and that an optimizer is one of torch that needs no closure.

    Raises:
        ArgumentError: one is not.
    """
    if not isinstance(model, DistributedDataParallel):
        msg = f"model must be a DistributedDataParallel, but is of {type(model).__name__}"
        raise ArgumentError(msg)
    if not isinstance(optimizer, torch.optim.Optimizer):
        msg = f"optimizer must be one of torch, but is of {type(optimizer).__name__}"
        raise ArgumentError(msg)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        msg = f"optimizer: its step() must need no closure, but that of {type(optimizer).__name__} does"
        raise ArgumentError(msg)


def check_known(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
    """Checks that an optimizer has parameters of the model, and no states of others.

    Raises:
        ArgumentError: it has another.
    """
    for number, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            if param not in names:
                msg = (
                    "optimizer: its parameters must be those of the model, but number "
                    f"{place} of group {number}, of shape {list(param.shape)}, is not"
                )
                raise ArgumentError(msg)
    for param, state in optimizer.state.items():
        if isinstance(param, torch.Tensor) and state and param not in names:
            msg = (
                f"optimizer: its states must be of parameters of the model, but one of shape {list(param.shape)} is not"
            )
            raise ArgumentError(msg)
