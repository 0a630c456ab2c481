"""Functions that torch calls before a module runs, after a gradient has arrived, and before an optimizer steps."""

import weakref
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, ValuesView
from typing import Any, Final, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from trackbed.errors import GradientError
from trackbed.grads.automatic_reduction import PassState, adopt, check_not_fused
from trackbed.grads.bucket_group import _ParamAndGradBucketGroup

Parameter = torch.nn.Parameter

_MAX_DEPTH: Final = 5
"""Levels of containers and objects in which parameters of a module are looked for."""


def backward_hook(param: Parameter, group: _ParamAndGradBucketGroup, state: PassState) -> Callable[..., None]:
    """Makes the function that is called when a gradient of a parameter has arrived: it adds it to `main_grad`.

    Args:
        param: parameter.
        group: its bucket group, which counts the gradient if it is to be reduced.
        state: state of the pass, shared by all parameters.
    """
    # The hook runs for every parameter in every backward pass, so it looks up as little as possible. torch keeps it
    # where Python's garbage collector does not look, so it must not refer to the parameter, nor to what does.
    slot = group.slot_of(param)
    overlaps, has_arrived = group.ddp_config.overlap_grad_reduce, group.has_arrived
    issued, last = group.issued_flag, group.last_flag
    group_of, param_of = weakref.ref(group), weakref.ref(param)
    del group, param

    def count() -> None:
        group = group_of()
        if group is not None:
            group.count(slot, state.forces_all_reduce)

    def hook(param: Parameter | None = None, *unused: object) -> None:
        if param is None:  # called by a module
            param = param_of()
            if param is None or group_of() is None:
                return  # the wrapper is gone
        if issued[0]:
            param.grad = None  # the next step must not add to it
            if state.is_used:
                return
            group = group_of()
            raise GradientError("the wrapper is gone" if group is None else group.describe_late(slot))
        gradient = param.grad
        attributes = vars(param)
        if state.is_on:
            if attributes["grad_added_to_main_grad"]:
                check_not_fused(param)
            if gradient is not attributes["main_grad"]:
                adopt(param, attributes["main_grad"], state)
            if not state.reduces:
                state.has_unreduced = True
                return
            if not state.is_queued:
                state.queue()
            state.has_arrived = True
            if overlaps:
                count()
            return
        if gradient is not None:
            if not attributes["grad_added_to_main_grad"] or getattr(param, "zero_out_wgrad", False):
                attributes["main_grad"].add_(gradient.detach() if gradient.requires_grad else gradient)
            param.grad = None
            has_arrived[slot] = True
        elif attributes["grad_added_to_main_grad"]:
            has_arrived[slot] = True  # of a function of autograd that returns None, nothing has
        if not overlaps:
            state.is_touched = True
        elif last[0]:
            count()

    return hook


def register_backward_hook(
    param: Parameter, hook: Callable[..., None], model: torch.nn.Module, *, delays_wgrad: bool
) -> object | None:
    """Registers a hook for a parameter.

    Args:
        param: parameter.
        hook: called when its gradient has arrived.
        model: model with the parameter.
        delays_wgrad: True if parameters with `skip_backward_post_hook` have their gradients computed later, by modules
            that call the hook.

    Returns:
        The handle of a hook of the parameter; None for one of a module.
    """
    if not (delays_wgrad and getattr(param, "skip_backward_post_hook", False)):
        handle: object = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return handle
    for owner in model.modules():
        is_owner = any(param is own for own in owner.parameters())
        if is_owner and hasattr(owner, "register_wgrad_accumulation_and_reduce_hooks"):
            owner.register_wgrad_accumulation_and_reduce_hooks(hook)  # type: ignore[operator]
    return None


def forward_hook(
    groups: list[_ParamAndGradBucketGroup], finish: Callable[[_ParamAndGradBucketGroup], None], *, is_compiled: bool
) -> Callable[..., None]:
    """Makes the function that waits for the parameters of a module before it runs.

    Args:
        groups: bucket groups of the parameters.
        finish: gathers the parameters of a group, and waits for them.
        is_compiled: True if torch compiles the module with its hooks: waiting must not be traced.
    """

    def hook(*unused: object) -> None:
        for group in groups:
            if group.param_gather_handle is not None or not group.param_gather_dispatched:
                finish(group)

    return torch.compiler.disable(hook) if is_compiled else hook  # type: ignore[no-untyped-call]


class Hook:
    """Hook of a module, which does nothing in a copy of the module: copies have parameters of their own.

    Args:
        function: function that the hook calls.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        """Calls the function."""
        self._function(*arguments)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        """Copies and unpickles to a function that does nothing."""
        return _get_idle_hook, ()


def _idle_hook(*unused: Any) -> None:
    """Takes the place of a hook in a copy of a module."""


def _get_idle_hook() -> Callable[..., None]:
    return _idle_hook


class Waiting(Protocol):
    """Wrapper of a model whose parameters are gathered."""

    def wait_for_params(self) -> None:
        """Waits for parameters that are being gathered."""
        ...

    def note_change(self) -> None:
        """Called after parameters were replaced."""
        ...


def hooks_around_states(model: torch.nn.Module, wrapper: Waiting) -> list[Any]:
    """Has a wrapper wait before a state of the model is taken or loaded, and tells it after one was loaded.

    Returns:
        Handles of the hooks, which do not keep the wrapper alive.
    """
    wrapper_of = weakref.ref(wrapper)

    def wait(*unused: object) -> None:
        wrapper = wrapper_of()
        if wrapper is not None:
            wrapper.wait_for_params()

    def note(*unused: object) -> None:
        wrapper = wrapper_of()
        if wrapper is not None:
            wrapper.note_change()

    return [
        model.register_state_dict_pre_hook(Hook(wait)),  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(Hook(wait)),  # type: ignore[no-untyped-call]
        model.register_load_state_dict_post_hook(Hook(note)),  # type: ignore[no-untyped-call]
    ]


def modules_to_hook(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, list[Parameter], bool]]:
    """Yields each module that needs a hook, the parameters that its hook waits for, and True if it is compiled.

    A compiled module waits for all its parameters before it runs, because hooks inside would end up in its graph. A
    module of torch with others inside does too, because some, such as MultiheadAttention, do not call them. A module
    also waits for parameters that it has in containers and objects of its own.
    """
    inside: set[torch.nn.Module] = set()
    for module in model.modules():
        if module in inside:
            continue
        if _is_compiled(module):
            inside.update(module.modules())
            yield module, list(module.parameters()), True
        else:
            own = list(module.parameters(recurse=_reads_inside(module)))
            yield module, own + list(_held_elsewhere(module)), False


class GatheredParameters(dict[str, Parameter | None]):
    """Parameters of a module, in the place of its own dictionary, that are not read while they are being gathered.

    Other modules and programs may read a parameter without calling its module, so no hook runs before. Only gathers
    that are running are waited for; none is begun, which would take all ranks.

    Args:
        parameters: dictionary of the module.
        groups: bucket groups of the parameters.
    """

    def __init__(self, parameters: Mapping[str, Parameter | None], groups: Iterable[_ParamAndGradBucketGroup]) -> None:
        super().__init__(parameters)
        self._groups = tuple(groups)

    def __getitem__(self, name: str) -> Parameter | None:
        self._wait()
        return super().__getitem__(name)

    def items(self) -> ItemsView[str, Parameter | None]:  # type: ignore[override]
        """Names and parameters."""
        self._wait()
        return super().items()

    def values(self) -> ValuesView[Parameter | None]:  # type: ignore[override]
        """Parameters."""
        self._wait()
        return super().values()

    def __reduce__(self) -> tuple[type[dict[str, Parameter | None]], tuple[dict[str, Parameter | None]]]:
        """Copies and unpickles to a plain dictionary."""
        return dict, (dict(self.items()),)

    def is_waiting(self) -> bool:
        """True while a gather is running that is to be waited for."""
        return any(group.param_gather_handle is not None for group in self._groups)

    def _wait(self) -> None:
        for group in self._groups:
            if group.param_gather_handle is not None or group.gathered is not None:
                group.wait_for_params()


def _held_elsewhere(module: torch.nn.Module) -> Iterator[Parameter]:
    """Yields the parameters in containers and objects of a module, which it reads without asking for their names."""
    of_torch = vars(torch.nn.Module())
    values = [(value, 0) for name, value in vars(module).items() if name not in of_torch]
    seen: set[int] = set()
    while values:
        value, depth = values.pop()
        if isinstance(value, Parameter):
            yield value
            continue
        if depth == _MAX_DEPTH or id(value) in seen or isinstance(value, torch.nn.Module | torch.Tensor | type):
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            below: Iterable[Any] = value.values()
        elif isinstance(value, list | tuple | set | frozenset | deque):
            below = value
        else:
            below = getattr(value, "__dict__", {}).values()
        values += [(one, depth + 1) for one in list(below)]


def _reads_inside(module: torch.nn.Module) -> bool:
    """True for a module of torch that may use the parameters of modules inside without calling them."""
    place = type(module).__module__
    return place.startswith("torch.nn.modules.") and place != "torch.nn.modules.container"


def _is_compiled(module: torch.nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


_WRAPPERS: Final = WeakIdKeyDictionary()
"""Weak references to the wrapper of each tensor that an optimizer may update, and to its parameter."""


class Wrapper(Protocol):
    """Wrapper of a model."""

    def unseen_gradient(self, param: torch.nn.Parameter) -> str | None:
        """Error text for a step that finds no gradient in `grad` of a parameter; None if there is none elsewhere."""
        ...


def watch_steps(wrapper: Wrapper, params: Iterable[tuple[torch.Tensor, torch.nn.Parameter]]) -> None:
    """Has steps of optimizers over some tensors ask a wrapper, which is not kept alive.

    torch's optimizers skip a parameter whose `grad` is None, without a word. Where gradients lie in `main_grad` alone,
    a training loop that was written for torch would train nothing.

    Args:
        wrapper: wrapper of the parameters.
        params: tensors that an optimizer may have, each with the parameter of the model that it is, or is a part of.
    """
    if not _registered:
        _registered.append(register_optimizer_step_pre_hook(_check_step))
    of_wrapper = weakref.ref(wrapper)
    for tensor, param in params:
        _WRAPPERS[tensor] = (of_wrapper, weakref.ref(param))


_registered: Final[list[Any]] = []


def _check_step(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
    """Called before each step of each optimizer of torch."""
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if tensor.grad is None and tensor in _WRAPPERS:
                wrapper, param = _referents(_WRAPPERS[tensor])
                text = None if wrapper is None or param is None else wrapper.unseen_gradient(param)
                if text is not None:
                    raise GradientError(f"{type(optimizer).__name__}.step(): {text}")


def _referents(references: tuple[Callable[[], Any], Callable[[], Any]]) -> tuple[Any, Any]:
    return references[0](), references[1]()
