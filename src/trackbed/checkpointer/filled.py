"""Plain tensors of a state, filled with those that a load has put into new memory."""

from typing import Any

import torch


def filled(own: Any, loaded: Any) -> Any:
    """Returns loaded values, with the tensors of a state in the places of plain ones of the same shape.

    Args:
        own: state, whose tensors are filled.
        loaded: loaded state, whose containers are changed.
    """
    if isinstance(own, dict) and isinstance(loaded, dict):
        for key in own.keys() & loaded.keys():
            loaded[key] = filled(own[key], loaded[key])
    elif isinstance(own, list) and isinstance(loaded, list):
        loaded[:] = [*map(filled, own, loaded), *loaded[len(own) :]]
    elif _can_be_filled(own, loaded):
        with torch.no_grad():
            return own.copy_(loaded)
    return loaded


def _can_be_filled(own: Any, loaded: Any) -> bool:
    are_tensors = isinstance(own, torch.Tensor) and isinstance(loaded, torch.Tensor)
    return are_tensors and own is not loaded and own.shape == loaded.shape and not own.is_meta
