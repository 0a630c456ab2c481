"""Checks that an optimizer can go on from a state, and the types in which its tensors are loaded."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from trackbed.checkpoint.load import is_exact_cast
from trackbed.errors import ArgumentError
from trackbed.grads.buffer import arranged_like
from trackbed.grads.parameter_set import name_in_module
from trackbed.kernels.integers import is_integer
from trackbed.optim.pieces import ParamPiece, is_low_precision
from trackbed.optim.state_parts import CLASSES, MAIN, OTHERS, WHERE, State, is_elementwise

logger = logging.getLogger(__name__)

_PROBE_SIZE: Final = 2
_MAY_BE_NONE: Final = ("momentum_buffer",)
"""Keys whose tensor torch's optimizers make in the next step where it is None."""

StateLike = Mapping[str, Any]


def field_of(state: object, key: str, kind: type) -> Any:
    """Value of a state under a key."""
    if not isinstance(state, Mapping):
        raise ArgumentError(f"{WHERE}: must be a dictionary with {key!r}, but is of {type(state).__name__}")
    if not isinstance(value := state.get(key), kind):
        found = f"that is of {type(value).__name__}" if key in state else f"it has only {', '.join(map(repr, state))}"
        raise ArgumentError(f"{WHERE}: must have {key!r}, a {kind.__name__.lower()}, but {found}")
    return value


def with_module_names(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a state with the names of the module, where it was saved with a compiled module's names."""
    groups, states = field_of(state, "param_groups", list), field_of(state, "state", Mapping)
    cleaned = [
        {
            **group,
            **{
                key: [name_in_module(name) if isinstance(name, str) else name for name in group[key]]
                for key in ("params", "param_names")
                if isinstance(group, Mapping) and isinstance(group.get(key), list | tuple)
            },
        }
        if isinstance(group, Mapping)
        else group
        for group in groups
    ]
    named = {name_in_module(key) if isinstance(key, str) else key: value for key, value in states.items()}
    return {**state, "param_groups": cleaned, "state": named}


def by_name(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> Mapping[str, Any]:
    """Returns a state with the names of parameters in the place of torch's numbers.

    Args:
        state: state with numbered parameters, or with names, which is returned as it is.
        names: names of the parameters of each group of the optimizer.
    """
    state = with_module_names(state)
    groups, states = field_of(state, "param_groups", list), field_of(state, "state", Mapping)
    numbers = [field_of(group, "params", list) for group in groups]
    flat = [number for group in numbers for number in group]
    if not flat or not all(map(is_integer, flat)):
        return state
    wanted, found = list(map(len, names)), list(map(len, numbers))
    if wanted != found or len(set(flat)) < len(flat):
        more = "" if len(set(flat)) == len(flat) else ", some of them twice"
        raise ArgumentError(f"{WHERE}: the parameter groups must have {wanted} parameters, but have {found}{more}")
    ordered = [name for group in names for name in group]
    theirs = [name for group in groups for name in group.get("param_names", ())]
    if sorted(theirs) == sorted(ordered) and theirs != ordered:
        pairs = enumerate(zip(ordered, theirs, strict=True))
        number, own, other = next((number, own, other) for number, (own, other) in pairs if own != other)
        raise ArgumentError(
            f"{WHERE}: parameter number {number} must be {own}, but is {other} by the param_names of the state"
        )
    name_of: dict[Any, str] = dict(zip(flat, ordered, strict=True))
    name_of |= {str(number): name for number, name in name_of.items()}  # as torch.distributed.checkpoint has them
    named = [{**group, "params": list(own)} for group, own in zip(groups, names, strict=True)]
    return {**state, "param_groups": named, "state": {name_of.get(key, key): value for key, value in states.items()}}


def is_of_one_rank(state: object) -> bool:
    """True for what `state_dict` of an older Trackbed returned: the state of one rank, in a format of its own."""
    return isinstance(state, Mapping) and "layout" in state and "num_ranks" in state


def from_numbered_pieces(
    state: Mapping[str, Any], names: Sequence[Sequence[str]], updated: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Converts what `state_dict` of an older Trackbed returned, of an optimizer that is not sharded.

    It has the states of torch's optimizers, whose numbers count the parameters that were trained, and beside them the
    copies in float32 and the states of frozen parameters.

    Args:
        state: state, of which `is_of_one_rank` is true.
        names: names of the parameters of each group of the optimizer.
        updated: of these, the names of the parameters that are trained.
    """
    is_list = CLASSES in state
    inners = field_of(state, "optimizers", list) if is_list else [field_of(state, "optimizer", Mapping)]
    groups = [group for inner in inners for group in field_of(inner, "param_groups", list)]
    numbers = [field_of(group, "params", list) for group in groups]
    counts, expected_counts = list(map(len, numbers)), list(map(len, updated))
    if counts != expected_counts:
        raise ArgumentError(f"{WHERE}: parameter groups must have {expected_counts} tensors, but have {counts}")
    named: dict[str, Any] = {}
    others: dict[Any, Any] = {}
    of_groups = iter(zip(numbers, updated, strict=True))
    for position, inner in enumerate(inners):
        name_of = {
            number: name
            for _, (own_numbers, own_names) in zip(inner["param_groups"], of_groups, strict=False)
            for number, name in zip(own_numbers, own_names, strict=True)
        }
        states = field_of(inner, "state", Mapping)
        named |= {name_of[key]: value for key, value in states.items() if key in name_of}
        rest = {key: value for key, value in states.items() if key not in name_of}
        if rest:
            others |= {str(position): rest} if is_list else rest
    for name, main in field_of(state, "main_params", Mapping).items():
        named[name] = {**named.get(name, {}), MAIN: main}
    named |= state.get("frozen", {})
    return {
        "state": named,
        "param_groups": [{**group, "params": list(own)} for group, own in zip(groups, names, strict=True)],
        "loss_scale": field_of(state, "loss_scale", Mapping),
        **({OTHERS: others} if others else {}),
        **({CLASSES: state[CLASSES]} if is_list else {}),
    }


def check_options(own_groups: Sequence[tuple[StateLike, StateLike]], groups: Sequence[StateLike]) -> None:
    """Checks that parameter groups of a state have the options of the optimizer that are numbers.

    Others may be missing: versions of torch differ in them.

    Args:
        own_groups: parameter groups of the optimizer, each with the defaults of its optimizer of torch.
        groups: parameter groups of the state.

    Raises:
        ArgumentError: one is missing, or is of another kind.
    """
    for number, ((own, defaults), other) in enumerate(zip(own_groups, groups, strict=True)):
        for key in defaults:
            wanted = _kind_of(own.get(key))
            if wanted is not None and (key not in other or _kind_of(other[key]) != wanted):
                found = repr(other[key]) if key in other else "none"
                raise ArgumentError(
                    f"{WHERE}: parameter group {number} must have {wanted} for {key!r}, but has {found}"
                )


def expected_state(optimizer: torch.optim.Optimizer, options: StateLike, num_dims: int) -> dict[str, torch.Tensor]:
    """State that a small parameter has after a step; empty if that cannot be told.

    Tensors without dimensions are single numbers; those with the dimensions of the parameter have its shape.

    Args:
        optimizer: optimizer.
        options: options of the parameter group.
        num_dims: number of dimensions of the parameter.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return {}
    param = torch.nn.Parameter(torch.zeros(_probe_shape(num_dims), device="cpu", dtype=torch.float32))
    param.grad = torch.zeros_like(param)
    plain = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
    known = {key: plain.get(key, options[key]) for key in optimizer.defaults if key in options}
    kind: Any = type(optimizer)  # torch's own classes take parameter groups alone
    try:
        probe = kind([{**known, "params": [param]}])
        probe.step()
    except (RuntimeError, TypeError, ValueError):
        return {}  # it needs a matrix, for example
    return {key: value for key, value in probe.state[param].items() if isinstance(value, torch.Tensor)}


def check_state(name: str, state: object, expected: Mapping[str, torch.Tensor], shape: torch.Size) -> None:
    """Checks the state of a parameter, or of a part of one.

    Args:
        name: name of the parameter.
        state: its state; one of a parameter that has not been updated has none of the expected tensors.
        expected: result of `expected_state`.
        shape: shape of the parameter or part.
    """
    if not isinstance(state, Mapping):
        raise ArgumentError(f"{WHERE}: that of {name} must be a dictionary, but is of {type(state).__name__}")
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and (value.layout is not torch.strided or value.device.type == "meta"):
            raise ArgumentError(
                f"{WHERE}: {key!r} of {name} must be a dense tensor with data, but is {value.layout} on {value.device}"
            )
    has_stepped = any(key in expected or key != MAIN for key in state)
    is_of_shape = {key: like.dim() > 0 and set(like.shape) == {_PROBE_SIZE} for key, like in expected.items()}
    for key, like in expected.items() if has_stepped else ():
        value = state.get(key)
        if key in _MAY_BE_NONE and key in state and value is None:
            continue
        if not isinstance(value, torch.Tensor | float | int) or (like.numel() > 1 and not torch.is_tensor(value)):
            raise ArgumentError(f"{WHERE}: {key!r} of {name} must be a tensor, but is {value!r}")
        if not torch.is_tensor(value):
            continue
        if is_of_shape[key] and value.shape != shape:
            raise ArgumentError(
                f"{WHERE}: {key!r} of {name} must have the shape {list(shape)}, but has {list(value.shape)}"
            )
        if like.numel() == 1 and value.numel() != 1:
            raise ArgumentError(
                f"{WHERE}: {key!r} of {name} must have one element, but has the shape {list(value.shape)}"
            )
        if like.numel() > 1 and like.is_floating_point() != value.is_floating_point():
            raise ArgumentError(f"{WHERE}: {key!r} of {name} must be of floating point, but is of {value.dtype}")


def warn_of_missing(states: Mapping[str, StateLike]) -> None:
    """Warns of parameters without a state where others have one: these begin anew, as in torch's own optimizers."""
    missing = [name for name, state in states.items() if not state]
    if 0 < len(missing) < len(states):
        logger.warning("%s: has none for %s (%d in all), which begin anew", WHERE, missing[0], len(missing))


def _probe_shape(num_dims: int) -> tuple[int, ...]:
    return (_PROBE_SIZE,) * max(num_dims, 1)


def _kind_of(value: object) -> str | None:
    """Description of an option that is a number or some numbers; None for any other."""
    if isinstance(value, torch.Tensor):
        return "a number" if value.numel() == 1 else f"{value.numel()} numbers"
    if isinstance(value, list | tuple):
        return f"{len(value)} numbers" if all(_kind_of(one) == "a number" for one in value) else None
    return "a number" if isinstance(value, int | float) and not isinstance(value, bool) else None


def check_types(
    name: str, state: Mapping[str, Any], expected: Mapping[str, torch.Tensor], param: torch.Tensor, who: str
) -> None:
    """Checks that no value of a state changes in the type in which it is loaded.

    Args:
        name: name of the parameter.
        state: its state.
        expected: result of `expected_state`.
        param: the parameter, or a part of one.
        who: class of the optimizer, for the error.
    """
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        target = _type_of(value, expected.get(key), param)
        if is_exact_cast(value.dtype, target) or _is_same(value.to(target).to(value.dtype), value):
            continue
        raise ArgumentError(
            f"{WHERE}: {key!r} of {name} must be of {target}, as {who} needs it, but is of {value.dtype}, and values "
            "would change: pass allow_cast=True to round them"
        )


def fitted(piece: ParamPiece, state: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> State:
    """Returns copies of the tensors of a state with type, device and strides as the optimizer of a piece has them."""
    return {
        key: _fitted(value, expected.get(key), piece, is_of_shape=is_elementwise(key, value, piece.main))
        if isinstance(value, torch.Tensor)
        else value
        for key, value in state.items()
    }


def _type_of(value: torch.Tensor, like: torch.Tensor | None, param: torch.Tensor) -> torch.dtype:
    """Type in which a tensor is loaded: its own, but for what torch's optimizer needs, and beside float32 copies."""
    is_copied = is_low_precision(param)
    if value.is_floating_point() and (
        (like is not None and like.dim() > 0 and like.is_floating_point()) or (is_copied and is_low_precision(value))
    ):
        return torch.float32 if is_copied else param.dtype
    return value.dtype


def _fitted(value: torch.Tensor, like: torch.Tensor | None, piece: ParamPiece, *, is_of_shape: bool) -> torch.Tensor:
    target = _type_of(value, like, piece.param)
    if not is_of_shape:
        return value.to(target, copy=True)
    return arranged_like(value.to(piece.main.device, target, copy=True), piece.main)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors of one type have the same values, where NaN is the same as NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
