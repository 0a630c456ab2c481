"""Optimizers whose update of an element depends on that element alone."""

from typing import Final

import torch

from trackbed.errors import ArgumentError

_ELEMENTWISE: Final = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Checks that an optimizer may update parts of parameters.

    Known are those of torch; another class, also one derived from them, says so with an attribute
    `is_elementwise = True`.
    """
    known = tuple(getattr(torch.optim, name) for name in _ELEMENTWISE if hasattr(torch.optim, name))
    if not getattr(optimizer, "is_elementwise", type(optimizer) in known):
        raise ArgumentError(
            "optimizer: its update must be elementwise to be sharded, which is not known of "
            f"{type(optimizer).__name__}: set is_elementwise = True on the class if it is, or "
            "use_distributed_optimizer=False"
        )
