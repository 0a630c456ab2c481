"""Megatron Core's rerun state machine, which is asked about norms of gradients where that is loaded."""

import logging
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from trackbed.grads.gradient_check import choose_judge

logger = logging.getLogger("trackbed.grads")
"""Parent of the loggers of buffers and bucket groups, which a level or handler that is set here reaches."""

_MODULE: Final = "megatron.core.rerun_state_machine"
_TOLERANCE: Final = 0.001
"""Relative difference of the norms of two runs of a step that are taken for the same."""
_WHEN: Final = "in backward pass before data-parallel communication collective"


class RerunJudge:
    """Asks the rerun state machine about each norm, which may have the step run again, and raise only then."""

    def is_there(self) -> bool:
        """True if Megatron Core is loaded."""
        return _MODULE in sys.modules

    def check_finite(self, norm: float, bucket: int) -> bool:
        """Asks whether a norm is NaN or infinite. Returns False where there is no machine."""
        machine = _machine()
        if machine is None:
            return False
        for name, is_rejected in (("NaN", math.isnan), ("Inf", math.isinf)):
            text = f"found {name} in local grad norm for bucket #{bucket} {_WHEN}"
            _ask(machine, norm, text, is_rejected, fatal=True)
        return True

    def check_large(self, norm: float, bucket: int) -> bool:
        """Asks whether a norm is far larger than those before. Returns False where there is no machine."""
        machine = _machine()
        if machine is None:
            return False
        is_large = partial(machine.is_unexpectedly_large, threshold=10, context="grads")
        try:
            _ask(machine, norm, f"found unexpected large grads in bucket #{bucket} {_WHEN}", is_large, fatal=False)
        except Exception:
            if torch.cuda.is_available():
                raise
            return False  # it can name no device in its warning
        return True


def _machine() -> Any | None:
    """The rerun state machine; None if Megatron Core is not loaded."""
    module = sys.modules.get(_MODULE)
    return None if module is None else module.get_rerun_state_machine()


def _ask(machine: Any, norm: float, message: str, is_rejected: Callable[[Any], bool], *, fatal: bool) -> None:
    machine.validate_result(
        result=torch.tensor(norm),
        rejection_func=is_rejected,
        message=message,
        tolerance=_TOLERANCE,
        fatal=fatal,
    )


choose_judge(RerunJudge())
