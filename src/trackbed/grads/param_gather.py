"""Gather of updated parameters, for which modules wait before they run."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from trackbed.errors import GradientError
from trackbed.grads.bucket_group import _ParamAndGradBucketGroup
from trackbed.grads.hooks import GatheredParameters, Hook, forward_hook, modules_to_hook

Parameter = torch.nn.Parameter


class HookedModule(NamedTuple):
    """Module that waits for its parameters."""

    module: weakref.ref[torch.nn.Module]
    handle: Any
    """Handle of its hook."""


def remove_hooks(hooked: list[HookedModule]) -> None:
    """Empties a list of modules, which wait no more, but for gathers that are running. Does not wait."""
    for one in hooked:
        one.handle.remove()
        module = one.module()
        params = None if module is None else module._parameters
        if module is not None and isinstance(params, GatheredParameters) and not params.is_waiting():
            module._parameters = dict(params)
    hooked.clear()


class ParameterGather:
    """Gathers the parameters of bucket groups in one order, which is the same on every rank.

    Args:
        groups: bucket groups in the order in which a forward pass needs them.
        is_overlapped: True if parameters are gathered while the forward pass runs.
        begins_next: True if the gather of the next group begins when one is waited for.
    """

    def __init__(self, groups: Sequence[_ParamAndGradBucketGroup], *, is_overlapped: bool, begins_next: bool) -> None:
        self._groups = list(groups)
        self._is_overlapped = is_overlapped
        self._begins_next = begins_next
        self.is_begun_by_optimizer = False
        """True if the optimizer begins the gathers itself, while it steps."""
        self.hooked: list[HookedModule] = []
        """Modules that wait for their parameters."""
        self.note_gathered()

    @property
    def handles(self) -> dict[torch.nn.Module, Any]:
        """Handle of the hook of each module; empty if there are none."""
        return {module: one.handle for one in self.hooked if (module := one.module()) is not None}

    def note_gathered(self) -> None:
        """Marks all parameters as gathered: each rank has them as they are, and a forward pass begins no gather."""
        for group in self._groups:
            group.param_gather_dispatched = True

    def start(self, *, force_sync: bool) -> None:
        """Begins all gathers, and waits for the end unless modules do."""
        for group in self._groups:
            group.start_param_sync(force_sync=force_sync)
        if not self.hooked:
            self.wait()

    def wait(self) -> None:
        """Waits for gathers that are running."""
        for group in self._groups:
            group.wait_for_params()

    def enable_hooks(
        self,
        model: torch.nn.Module,
        group_of: Mapping[Parameter, _ParamAndGradBucketGroup],
        decorate: Callable[[Callable[..., None]], Callable[..., None]],
    ) -> None:
        """Has each module wait for its parameters before it runs, and every read of them.

        Args:
            model: model.
            group_of: bucket group of each parameter that is gathered.
            decorate: makes the function that is registered from a hook.
        """
        self._check("enable_forward_pre_hook", is_enabled=False)
        for module, params, is_compiled in modules_to_hook(model):
            groups = list(dict.fromkeys(group_of[param] for param in params if param in group_of))
            hook = Hook(decorate(forward_hook(groups, self._finish, is_compiled=is_compiled)))
            self.hooked.append(HookedModule(weakref.ref(module), module.register_forward_pre_hook(hook)))
            if not is_compiled:
                module._parameters = GatheredParameters(module._parameters, groups)

    def disable_hooks(self) -> None:
        """Undoes `enable_hooks`."""
        self._check("disable_forward_pre_hook", is_enabled=True)
        self.wait()
        remove_hooks(self.hooked)

    def _finish(self, group: _ParamAndGradBucketGroup) -> None:
        """Waits for the parameters of a group. All gathers before it begin first."""
        place = self._groups.index(group)
        begins_next = self._begins_next and not self.is_begun_by_optimizer
        for other in self._groups[: place + (2 if begins_next else 1)]:
            if not other.param_gather_dispatched:
                other.start_param_sync()
        group.wait_for_params()

    def _check(self, method: str, *, is_enabled: bool) -> None:
        if not self._is_overlapped:
            raise GradientError(f"{method}() must be called with overlap_param_gather=True only, but that is False")
        if bool(self.hooked) != is_enabled:
            other = "enable_forward_pre_hook" if is_enabled else "disable_forward_pre_hook"
            raise GradientError(f"{other}() must be called before another {method}(), but was not")
