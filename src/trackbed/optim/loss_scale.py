"""Factor of the loss that keeps small gradients of 16 bits from vanishing."""

import sys
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeGuard

from trackbed.errors import ArgumentError

_FIRST: Final = 2.0**16
_SMALLEST: Final = 1.0
_LARGEST: Final = 2.0**24
_GROWTH_STEPS: Final = 2000
_LOWEST: Final = 2.0**-126
"""Smallest normal number of float32, whose inverse is one too."""


def is_number(value: object) -> TypeGuard[int | float]:
    """True for a number that a float can hold; a bool is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) <= sys.float_info.max
    return isinstance(value, float)


class LossScale:
    """Factor of the loss, by which gradients are divided again.

    A dynamic one begins at 65,536. It is halved by each step whose gradients are not finite, down to 1, and doubled
    after 2,000 steps in a row that are, up to 2**24.

    Args:
        loss_scale: factor, which float32 and its inverse can hold as normal numbers; "dynamic"; or None for 1.

    Raises:
        ArgumentError: it is something else.
    """

    def __init__(self, loss_scale: "float | Literal['dynamic'] | None") -> None:
        self.is_dynamic = loss_scale == "dynamic"
        if self.is_dynamic:
            self.value = _FIRST
        elif loss_scale is None:
            self.value = 1.0
        elif is_number(loss_scale) and _LOWEST <= loss_scale <= 1 / _LOWEST:
            self.value = float(loss_scale)
        else:
            raise ArgumentError(
                f"loss_scale must be a number from 2**-126 to 2**126, 'dynamic' or None, but is {loss_scale!r}"
            )
        self._good_steps = 0

    def update(self, *, is_finite: bool) -> None:
        """Adapts a dynamic scale to the outcome of a step."""
        if not self.is_dynamic:
            return
        if not is_finite:
            self.value, self._good_steps = max(self.value / 2, _SMALLEST), 0
            return
        self._good_steps += 1
        if self._good_steps == _GROWTH_STEPS:
            self.value, self._good_steps = min(self.value * 2, _LARGEST), 0

    def state_dict(self) -> dict[str, Any]:
        """State of a dynamic scale."""
        return {"scale": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the state over, if the scale is dynamic: a fixed one stays what the program asks for."""
        self.check_state_dict(state)
        if self.is_dynamic:
            self.value, self._good_steps = float(state["scale"]), state["good_steps"]

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checks a state that is to be loaded."""
        scale, good_steps = state.get("scale"), state.get("good_steps")
        is_allowed = is_number(scale) and _SMALLEST <= scale <= _LARGEST and isinstance(good_steps, int)
        if self.is_dynamic and not is_allowed:
            raise ArgumentError(
                f"state of the optimizer: loss_scale must have a 'scale' from {_SMALLEST:g} to {_LARGEST:g} and a "
                f"whole number of 'good_steps', but is {dict(state)}"
            )
