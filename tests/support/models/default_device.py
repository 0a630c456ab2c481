"""Whether the optimizers of torch work where the default device is "meta"."""

import functools

import pytest
import torch


@functools.cache
def has_steps_on_cpu():
    """False with torch 2.9, whose optimizers make the tensor of their steps on the default device."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with torch.device("meta"):
        try:
            torch.optim.AdamW([parameter]).step()
        except RuntimeError:
            return False
    return True


def needs_steps_on_cpu():
    """Skips a test where it is so."""
    if not has_steps_on_cpu():
        pytest.skip(f"an AdamW of torch {torch.__version__} makes its steps on the default device")
