"""Checks of what an optimizer of a wrapped model is built from."""

import inspect
from collections.abc import Mapping, Sequence

import torch

from trackbed.errors import ArgumentError
from trackbed.grads import DistributedDataParallel

__all__ = ["check_kinds", "check_known", "list_of"]


def list_of(optimizer: object) -> list[torch.optim.Optimizer]:
    """Returns the optimizers of an argument that is one, or a list or tuple of some.

    Raises:
        ArgumentError: it is an empty list.
    """
    if not isinstance(optimizer, list | tuple):
        return [optimizer]  # type: ignore[list-item]  # check_kinds follows
    if not optimizer:
        msg = "optimizer must be one of torch, or a list of some, but is an empty list"
        raise ArgumentError(msg)
    return list(optimizer)


def check_kinds(optimizers: Sequence[object], model: object) -> None:
    """Checks that a model is wrapped, and that its optimizers are those of torch that need no closure.

    Raises:
        ArgumentError: one is not.
    """
    if not isinstance(model, DistributedDataParallel):
        msg = f"model must be a DistributedDataParallel, but is of {type(model).__name__}"
        raise ArgumentError(msg)
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            msg = f"optimizer must be one of torch, or a list of some, but is of {type(optimizer).__name__}"
            raise ArgumentError(msg)
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            msg = f"optimizer: its step() must need no closure, but that of {type(optimizer).__name__} does"
            raise ArgumentError(msg)


def check_known(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[torch.Tensor, str]) -> None:
    """Checks that optimizers have parameters of the model, each once, and no states of others.

    Raises:
        ArgumentError: one has another, or two have the same.
    """
    owners: dict[torch.Tensor, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for place, param in enumerate(group["params"]):
                if param not in names:
                    msg = (
                        "optimizer: its parameters must be those of the model, but number "
                        f"{place} of group {number}, of shape {list(param.shape)}, is not"
                    )
                    raise ArgumentError(msg)
                if param in owners:
                    msg = (
                        f"optimizer: each parameter must be in one optimizer of the list, but {names[param]} is in "
                        f"{type(owners[param]).__name__} and {type(optimizer).__name__}"
                    )
                    raise ArgumentError(msg)
                owners[param] = optimizer
        for param, state in optimizer.state.items():
            if isinstance(param, torch.Tensor) and state and param not in names:
                msg = (
                    "optimizer: its states must be of parameters of the model, but one of shape "
                    f"{list(param.shape)} is not"
                )
                raise ArgumentError(msg)
