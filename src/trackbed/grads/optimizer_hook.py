"""Check before each step of an optimizer of torch that it sees the gradients of wrapped parameters.

torch's optimizers skip a parameter whose `grad` is None, without a word. Where gradients lie in `main_grad` alone, a
training loop that was written for torch would train nothing.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from trackbed.errors import GradientError

__all__ = ["Wrapper", "watch_steps"]

_WRAPPERS: Final = WeakIdKeyDictionary()
"""Weak references to the wrapper of each tensor that an optimizer may update, and to its parameter."""


class Wrapper(Protocol):
    """Wrapper of a model."""

    def unseen_gradient(self, param: torch.nn.Parameter) -> str | None:
        """Error text for a step that finds no gradient in `grad` of a parameter; None if there is none elsewhere."""
        ...


def watch_steps(wrapper: Wrapper, params: Iterable[tuple[torch.Tensor, torch.nn.Parameter]]) -> None:
    """Has steps of optimizers over some tensors ask a wrapper, which is not kept alive.

    Args:
        wrapper: wrapper of the parameters.
        params: tensors that an optimizer may have, each with the parameter of the model that it is, or is a part of.
    """
    if not _registered:
        _registered.append(register_optimizer_step_pre_hook(_check))
    of_wrapper = weakref.ref(wrapper)
    for tensor, param in params:
        _WRAPPERS[tensor] = (of_wrapper, weakref.ref(param))


_registered: Final[list[Any]] = []


def _check(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:  # noqa: ARG001  torch's signature
    """Called before each step of each optimizer of torch.

    Raises:
        GradientError: it finds no gradient in a wrapped parameter whose gradient has arrived.
    """
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if tensor.grad is None and tensor in _WRAPPERS:
                wrapper, param = _referents(_WRAPPERS[tensor])
                text = None if wrapper is None or param is None else wrapper.unseen_gradient(param)
                if text is not None:
                    msg = f"{type(optimizer).__name__}.step(): {text}"
                    raise GradientError(msg)


def _referents(references: tuple[Callable[[], Any], Callable[[], Any]]) -> tuple[Any, Any]:
    return references[0](), references[1]()
