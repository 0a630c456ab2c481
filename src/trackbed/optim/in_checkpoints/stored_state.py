"""State of optimizers in a checkpoint of Trackbed or of `torch.distributed.checkpoint`: keys, options, plain values."""

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from trackbed.checkpoint.folder import CheckpointFolder, put, with_lists
from trackbed.checkpoint.format.safe_pickle import RefusedClassError
from trackbed.checkpoint.io.boxes import BoxReader
from trackbed.errors import CheckpointError
from trackbed.grads.parameter_set import name_in_module
from trackbed.optim.state_parts import MAIN, State

logger = logging.getLogger(__name__)

KeyOrder: TypeAlias = Literal["megatron", "torch"]
"""Order of the keys of an optimizer's tensors: `optimizer.state.KEY.NAME`, or `optimizer.state.NAME.KEY`."""
KEY_ORDERS: Final = get_args(KeyOrder)
MEGATRONS_MAIN: Final = "param"
"""Key of parameters in float32 in Megatron Core's format `fully_reshardable`."""
_NAMES: Final = ("params", "param_names")


def optimizer_key(name: str, field: str, prefix: str, order: KeyOrder) -> str:
    """Key of a tensor of an optimizer.

    Args:
        name: name of the parameter.
        field: key in its state.
        prefix: text before the keys.
        order: order of the key.
    """
    return f"{prefix}optimizer.state." + (f"{field}.{name}" if order == "megatron" else f"{name}.{field}")


def stored_key(name: str, field: str, prefix: str, stored: Container[str]) -> str:
    """Key under which a tensor of an optimizer is stored, in either order."""
    keys = [optimizer_key(name, field, prefix, order) for order in KEY_ORDERS]
    if field == MAIN:
        keys.append(optimizer_key(name, MEGATRONS_MAIN, prefix, "megatron"))
    return next((key for key in keys if key in stored), keys[0])


@dataclass(frozen=True, slots=True, eq=False)
class StoredState:
    """State of optimizers in a checkpoint, without its tensors."""

    keys: Mapping[str, Mapping[str, str]]
    """Stored key of each tensor, by parameter name and field."""
    objects: Mapping[str, Mapping[str, str]]
    """Unique key of each object, likewise."""
    plain: Mapping[str, State]
    """Values that are neither, by parameter name."""
    options: Mapping[str, State]
    """Options of each parameter's group."""
    empty_groups: Sequence[State]
    """Options of groups without parameters, in order."""
    local: Mapping[str, Sequence[str]]
    """Fields whose tensors were each rank's part, by parameter name."""
    whole: Mapping[str, Sequence[str]]
    """Fields of `DTensor`s whose tensors every rank had whole, by parameter name."""
    is_own: bool
    """True for the state of a `DataParallelOptimizer`, whose tensors may have one dimension."""
    others: Mapping[str, Any]
    """Further entries of the states of optimizers, by their number."""


def find_state(
    folder: CheckpointFolder,
    common: Mapping[str, Any],
    prefix: str,
    rank: int,
    members: Sequence[Sequence[str]] | None = None,
) -> StoredState:
    """Finds the state of optimizers in a checkpoint of Trackbed, or of `torch.distributed.checkpoint`.

    Args:
        folder: opened checkpoint.
        common: its plain values.
        prefix: text before the keys.
        rank: number of this rank, whose objects are found.
        members: names of the parameters of each group of the program's optimizer; None if it is no single one of torch.

    Raises:
        CheckpointError: there is none.
    """
    start, catalogue = f"{prefix}optimizer.", folder.catalogue
    saved = common.get(f"{prefix}optimizer", {})
    objects = _by_name(catalogue.objects, f"{start}state.", rank)
    if isinstance(saved, Mapping) and isinstance(saved.get("divided"), Mapping):
        # That of a DataParallelOptimizer, whose keys may have another order.
        clean = {name_in_module(key): key for key in catalogue.tensors} | {key: key for key in catalogue.tensors}
        keys = {
            name_in_module(name): {
                field: clean.get(key := stored_key(name_in_module(name), field, prefix, clean), key)
                for field in types
                if field != MAIN
            }
            for name, types in saved["divided"].items()
        }
    else:
        keys = _by_name(catalogue.tensors, f"{start}state.")
    if isinstance(saved, Mapping) and "param_groups" in saved:
        groups, more = list(saved["param_groups"]), dict[str, State]()
        if any(isinstance(name, int) for group in groups for name in group["params"]):
            raise CheckpointError(
                f"{folder.path}: must have a state of the optimizer that sharded_state saved, found a plain value: "
                f"leave the optimizer out here, and give what is returned as {f'{prefix}optimizer'!r} to its "
                "load_state_dict()"
            )
    else:
        groups, more = _groups_of_dcp(folder, f"{start}param_groups.")
        if any(isinstance(name, int) for group in groups for name in group["params"]):
            names = _names_of_numbers(groups, members, folder)
            _check_numbered({**keys, **objects}, names, folder)
            groups = [{**group, "params": [names[str(number)] for number in group["params"]]} for group in groups]
            keys = {names.get(number, number): fields for number, fields in keys.items()}
            objects = {names.get(number, number): fields for number, fields in objects.items()}
    if not (keys or objects or groups or more):
        tops = sorted({key.partition(".")[0] for key in (*catalogue.tensors, *catalogue.objects, *common)})
        raise CheckpointError(
            f"{folder.path}: must have a state of the optimizer, but has no {start}* keys, found "
            f"{', '.join(tops[:8])}: leave the optimizer out, or use trackbed.load for what has another name"
        )
    others = saved.get("others", {}) if isinstance(saved, Mapping) else {}
    if folder.is_plain and not others and (more_of_dcp := _others_of_dcp(folder, start)):
        others = {"0": more_of_dcp}
    options = {name_in_module(name): without_names(group) for group in groups for name in group["params"]}
    plain = saved.get("state", {}) if isinstance(saved, Mapping) else {}
    return StoredState(
        keys,
        objects,
        {name_in_module(name): dict(state) for name, state in plain.items()},
        options | more,
        [without_names(group) for group in groups if not group["params"]],
        saved.get("local", {}) if isinstance(saved, Mapping) else {},
        saved.get("whole", {}) if isinstance(saved, Mapping) else {},
        isinstance(saved, Mapping) and isinstance(saved.get("divided"), Mapping),
        others,
    )


def without_names(group: Mapping[str, Any]) -> State:
    """Options of a parameter group."""
    return {key: value for key, value in group.items() if key not in _NAMES}


def _by_name(stored: Iterable[str], start: str, rank: int | None = None) -> dict[str, dict[str, str]]:
    """Keys of tensors or objects below a prefix, by parameter name and field, which has no dots."""
    found: dict[str, dict[str, str]] = {}
    for key in stored:
        if not key.startswith(start):
            continue
        name, _, field = key[len(start) :].rpartition(".")
        field, _, place = field.partition("/shard_")
        if rank is not None and place and place.partition("_")[0] != str(rank):
            continue
        found.setdefault(name_in_module(name), {})[field] = key
    return found


def _groups_of_dcp(folder: CheckpointFolder, start: str) -> tuple[list[State], dict[str, State]]:
    """Parameter groups that `torch.distributed.checkpoint` has stored value by value.

    Returns:
        The groups; or nothing and the options of each parameter, if the state was flattened.
    """
    values: dict[str, Any] = {}
    with BoxReader(folder.path, folder.catalogue) as reader:
        keys = [key for key in folder.catalogue.objects if key.startswith(start)]
        reader.expect(keys)
        for key in keys:
            values[key[len(start) :]] = reader.read_object(key)
        for key in folder.catalogue.tensors:
            if key.startswith(start):
                values[key[len(start) :]] = reader.read_tensor(key)
    groups: dict[int, State] = {}
    for key, value in values.items():
        path = _path_below(folder.catalogue.paths.get(start + key, ()), start)
        if path and isinstance(path[0], int):
            if len(path) == 1:
                raise CheckpointError(f"{start}{key}: must be a parameter group, but is of {type(value).__name__}")
            put(groups.setdefault(path[0], {}), path[1:], value)
    if groups:
        found = [with_lists(group) for _, group in sorted(groups.items())]
        for number, group in enumerate(found):
            _check_params(group.get("params"), f"{start}{number}.params")
        return found, {}
    of_name: dict[str, State] = {}
    for key, value in values.items():
        name, _, option = key.rpartition(".")
        of_name.setdefault(name_in_module(name), {})[option] = value
    return [], of_name


def _path_below(path: tuple[Any, ...], start: str) -> tuple[Any, ...]:
    """The end of a path, behind a prefix of its key; empty if the path is not below it."""
    for depth in range(1, len(path)):
        if ".".join(map(str, path[:depth])) + "." == start:
            return path[depth:]
    return ()


def _check_params(params: Any, where: str) -> None:
    """Checks the numbers or names of the parameters of a group."""
    is_list = isinstance(params, list | tuple) and all(type(one) in (int, str) for one in params)
    if not is_list or len({type(one) for one in params}) > 1 or len(set(params)) < len(params):
        raise CheckpointError(f"{where}: must be different numbers or names of parameters, found {str(params)[:80]}")


def _others_of_dcp(folder: CheckpointFolder, start: str) -> dict[str, Any]:
    """Further entries of the `state_dict()` of an optimizer that `torch.distributed.checkpoint` has stored."""
    found: dict[str, Any] = {}
    with BoxReader(folder.path, folder.catalogue) as reader:
        for keys, read in (
            (folder.catalogue.objects, reader.read_object),
            (folder.catalogue.tensors, reader.read_tensor),
        ):
            for key in keys:
                path = _path_below(folder.catalogue.paths.get(key, ()), start)
                # In a flattened state the whole key, "state.weight.exp_avg", is the end of the path.
                if not path or str(path[0]).partition(".")[0] in ("state", "param_groups"):
                    continue
                try:
                    put(found, path, read(key))
                except RefusedClassError as error:
                    logger.warning("%s: an entry of the optimizer is left out: %s", folder.path, error)
    return {key: with_lists(value) for key, value in found.items()}


def _names_of_numbers(
    groups: Sequence[State], members: Sequence[Sequence[str]] | None, folder: CheckpointFolder
) -> dict[str, str]:
    """Names of the parameters that the `state_dict()` of an optimizer has by number.

    They are those that the checkpoint has, if the program has the same; otherwise those in the same places of the
    program's groups, as in torch's `load_state_dict`.

    Raises:
        CheckpointError: the program's groups have other numbers of parameters.
    """
    stored = [len(group["params"]) for group in groups]
    own = None if members is None else [len(group) for group in members]
    if members is None or own != stored:
        found = "its optimizer is no single one of torch" if own is None else f"those of the program have {own}"
        raise CheckpointError(
            f"{folder.path}: has the parameters of the optimizer by number, in groups of {stored}, and must be loaded "
            f"into groups of as many, in the same order, but {found}"
        )
    numbers = [str(number) for group in groups for number in group["params"]]
    names = [name for group in members for name in group]
    stored_names = [name_in_module(str(name)) for group in groups for name in group.get("param_names", ())]
    if set(stored_names) == set(names) and len(stored_names) == len(names):
        names = stored_names  # the program may have another order
    return dict(zip(numbers, names, strict=True))


def _check_numbered(keys: Mapping[str, Any], names: Mapping[str, str], folder: CheckpointFolder) -> None:
    """Checks that states by number have values alone: what lies deeper has no place."""
    for key in keys:
        number, _, field = key.partition(".")
        if key not in names and number in names:
            raise CheckpointError(
                f"{folder.path}: states of the optimizer must have tensors and values directly in them to be loaded by "
                f"number, but {field!r} of that of {names[number]} has some further down: leave the optimizer out, and "
                "load its state with trackbed.load"
            )


def options_of_groups(members: Sequence[str], stored: StoredState) -> State:
    """Stored options of a group: those of most of its members."""
    found = [stored.options[name] for name in members if name in stored.options]
    return max(found, key=lambda one: sum(_are_same(one, other) for other in found)) if found else {}


def differing_options(members: Sequence[str], stored: StoredState) -> list[str]:
    """Names of options that were not the same for all members of a group, sorted."""
    found = [stored.options[name] for name in members if name in stored.options]
    first = found[0] if found else {}
    return sorted(
        {key for other in found if other is not first for key in first if not _are_same(first[key], other.get(key))}
    )


def _are_same(one: Any, other: Any) -> bool:
    """True for options of one group, or equal values."""
    if one is other:
        return True
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # tensors of several elements
        return False
