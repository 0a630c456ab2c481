"""Modules that have to wait for their parameters before they run."""

from collections.abc import Iterator

import torch

__all__ = ["is_compiled", "modules_to_hook"]


def modules_to_hook(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, list[torch.nn.Parameter]]]:
    """Yields each module that needs a hook, with the parameters that its hook waits for.

    A compiled module waits for all its parameters before it runs, because hooks inside would end up in its graph.
    """
    inside: set[torch.nn.Module] = set()
    for module in model.modules():
        if module in inside:
            continue
        if is_compiled(module):
            inside.update(module.modules())
            yield module, list(module.parameters())
        else:
            yield module, list(module.parameters(recurse=False))


def is_compiled(module: torch.nn.Module) -> bool:
    """True for a module that torch compiles, with its hooks if `module.compile()` was called."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
