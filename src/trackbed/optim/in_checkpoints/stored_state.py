"""State of optimizers in a checkpoint of Trackbed or of `torch.distributed.checkpoint`: keys, options, plain values."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from trackbed.checkpoint.folder import CheckpointFolder
from trackbed.checkpoint.io.boxes import BoxReader
from trackbed.errors import CheckpointError
from trackbed.grads.parameter_set import name_in_module
from trackbed.optim.state_parts import MAIN, State

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
            groups = [{**group, "params": [names[str(number)] for number in group["params"]]} for group in groups]
            keys = {names.get(number, number): fields for number, fields in keys.items()}
            objects = {names.get(number, number): fields for number, fields in objects.items()}
    if not (keys or objects or groups or more):
        tops = sorted({key.partition(".")[0] for key in (*catalogue.tensors, *catalogue.objects, *common)})
        raise CheckpointError(
            f"{folder.path}: must have a state of the optimizer, but has no {start}* keys, found "
            f"{', '.join(tops[:8])}: leave the optimizer out, or use trackbed.load for what has another name"
        )
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
        saved.get("others", {}) if isinstance(saved, Mapping) else {},
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
        for key in folder.catalogue.objects:
            if key.startswith(start):
                values[key[len(start) :]] = reader.read_object(key)
        for key in folder.catalogue.tensors:
            if key.startswith(start):
                values[key[len(start) :]] = reader.read_tensor(key)
    of_place: dict[str, State] = {}
    for key, value in values.items():
        place, _, option = key.rpartition(".")
        of_place.setdefault(place, {})[option] = value
    if all(place.isdecimal() and "params" in group for place, group in of_place.items()):
        return [group for _, group in sorted(of_place.items(), key=lambda one: int(one[0]))], {}
    return [], {name_in_module(name): group for name, group in of_place.items()}


def _names_of_numbers(
    groups: Sequence[State], members: Sequence[Sequence[str]] | None, folder: CheckpointFolder
) -> dict[str, str]:
    """Names of the parameters that the `state_dict()` of an optimizer has by number, as torch's `load_state_dict` does.

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
    numbers = (str(number) for group in groups for number in group["params"])
    return dict(zip(numbers, (name for group in members for name in group), strict=True))


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
