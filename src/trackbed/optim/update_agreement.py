"""Agreement of the ranks on how they update parameters, checked in every step beside the norm."""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from trackbed.comm.difference import difference_of, unlike_ranks
from trackbed.errors import CollectiveError
from trackbed.files.checksum import crc32

_NOT_OPTIONS: Final = ("params", "param_names", "step")
"""Entries of parameter groups that ranks do not compare. Some optimizers count steps there, of groups with pieces."""


OPTIONS: Final = "the options of parameter groups"
"""Name of the lines about options."""


def describe_options(options: Mapping[str, Any], *, reads_gpu: bool = True) -> list[str]:
    """Texts of the options of a parameter group that are numbers, words or lists of them.

    Args:
        options: parameter group of an optimizer.
        reads_gpu: False to leave the values of tensors on a GPU out; True to wait for them.
    """
    own = {key: value for key, value in options.items() if key not in _NOT_OPTIONS}
    found = {key: _plain(value, reads_gpu=reads_gpu) for key, value in own.items()}
    return [f"{key}={value!r}" for key, value in found.items() if _is_plain(value)]


def numbers_on_gpu(options: Mapping[str, Any]) -> list[torch.Tensor]:
    """Numbers in tensors of a parameter group, also in lists, whose values the host would wait for."""
    found = []
    for value in options.values():
        values = value if isinstance(value, list | tuple) else [value]
        found += [one for one in values if _is_on_gpu(one)]
    return found


def _is_on_gpu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type != "cpu"


def digest_of_tensors(values: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns `[1]` number that stands for the values of tensors of one number each, without a wait for a GPU."""
    if not values:
        return torch.zeros(1, dtype=torch.int64, device=device)
    bits = torch.stack([value.detach().to(device, torch.float64).reshape(()) for value in values]).view(torch.int64)
    # Odd factors, so that neither equal changes of two values nor exchanged values have the same sum.
    factors = torch.arange(len(values), device=device) * _FACTOR + 1
    return (bits * factors).sum().view(1)


_FACTOR: Final = 0x1E3779B97F4A7C16


def describe_update(
    optimizers: Sequence[torch.optim.Optimizer],
    names: Sequence[Sequence[str]],
    frozen: Sequence[str],
    *,
    reads_gpu: bool = True,
) -> dict[str, list[str]]:
    """Lines, by name, that are the same on all ranks whose updates of some parameters are.

    Args:
        optimizers: optimizers of torch.
        names: names of these parameters in each of its groups.
        frozen: names of the frozen parameters.
        reads_gpu: False to leave the values of tensors on a GPU out; True to wait for them.
    """
    groups = groups_with(optimizers, names)
    return {
        "the class of the optimizer": [
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" for optimizer in optimizers
        ],
        "the parameter groups": [
            f"{brief([own])} in group {number} ({_digest_of(repr(own)):x})" for number, own in enumerate(names)
        ],
        OPTIONS: [
            f"{option} in group {number}"
            for number, group in groups
            for option in describe_options(group, reads_gpu=reads_gpu)
        ],
        "parameters that are frozen after wrapping": list(frozen) or ["none"],
    }


def groups_with(
    optimizers: Sequence[torch.optim.Optimizer], names: Sequence[Sequence[str]]
) -> list[tuple[int, dict[str, Any]]]:
    """Number and parameter group of each group of some optimizers that has names."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [(number, group) for number, group in enumerate(groups) if names[number]]


def brief(groups: Sequence[Sequence[str]]) -> str:
    """Sizes of parameter groups, and the first name of each."""
    return ", ".join(f"{len(names)} parameters from {names[0]!r}" if names else "none" for names in groups)


def digest_of_state(states: Mapping[str, Mapping[str, Any]]) -> int:
    """CRC-32 of a state by parameter name, of tensors with their contents."""
    crc = 0
    for name, state in states.items():
        for key, value in state.items():
            crc = _add_value(value, crc32(f"{name}/{key} ".encode(), crc))
    return crc


def _add_value(value: Any, crc: int) -> int:
    """Adds a value to a CRC-32. Of a class that is not known, its name alone: its text may have an address."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
        return crc32(flat.view(torch.uint8).numpy(), crc32(str(list(value.shape)).encode(), crc))
    if isinstance(value, Mapping):
        for key, below in value.items():
            crc = _add_value(below, crc32(f"{key!r}:".encode(), crc))
        return crc
    if isinstance(value, list | tuple):
        for below in value:
            crc = _add_value(below, crc32(b",", crc))
        return crc
    if isinstance(value, set | frozenset):
        return crc32(repr(sorted(map(repr, value))).encode(), crc)
    is_plain = value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic)
    return crc32((str(value) if is_plain else type(value).__qualname__).encode("utf-8", "replace"), crc)


def _digest_of(text: str) -> int:
    """Number of 63 bits that stands for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def digests_of(texts: Mapping[str, list[str]]) -> npt.NDArray[np.int64]:
    """`[K]` numbers that stand for the lines of each name."""
    return np.array([_digest_of("; ".join(lines)) for lines in texts.values()], dtype=np.int64)


def digest_of_lines(texts: Mapping[str, list[str]]) -> int:
    """Number that stands for all lines."""
    return _digest_of(repr(dict(texts)))


def check_updates_agree(
    texts: Mapping[str, list[str]],
    rows: npt.NDArray[np.int64],
    gather: Callable[[str, Collection[int]], dict[int, list[str]]],
) -> None:
    """Collective over the ranks if they differ: checks that all have the same lines.

    Args:
        texts: lines of this rank, by name.
        rows: `[ranks, K + 1]` the `digests_of` the lines of each rank, and of tensors that are `OPTIONS`, the same rows
            on every rank.
        gather: returns the lines of some ranks, given their name and the rows of these ranks; called on all ranks, or
            on none.

    Raises:
        CollectiveError: they do not. The message has the first name, two ranks, and the first line that differs.
    """
    different = (rows != rows[0]).any(axis=0)
    if not different.any():
        return
    column = int(np.argmax(different))
    name = [*texts, OPTIONS][column]
    # Two ranks alone send their lines, which may be long: every rank reads all that is sent.
    unlike = unlike_ranks(rows[:, column].tolist()) or ()
    difference = difference_of(gather(name, unlike), absent="no more")
    # A number on one rank, and a tensor with the same one on another, have the same lines.
    ranks = " and ".join(f"rank {rank}" for rank in unlike)
    found = difference or f"{ranks} have them in other types, or NaN in other bits"
    raise CollectiveError(f"optimizer: {name} must be the same on every rank, but {found}")


def check_experts_agree(digests: Sequence[int], groups: Sequence[int]) -> None:
    """Checks that ranks with the same experts agree, which each rank can tell of all.

    So that no rank updates its dense parameters where those with other experts than its own have raised an error.

    Args:
        digests: number of each rank that stands for how it updates its experts.
        groups: label of the ranks with the same experts as each rank.

    Raises:
        CollectiveError: they do not.
    """
    first = dict(reversed([(label, rank) for rank, label in enumerate(groups)]))
    for rank, label in enumerate(groups):
        if digests[rank] != digests[first[label]]:
            raise CollectiveError(
                f"optimizer: ranks with the same experts must update them alike, but rank {rank} and rank "
                f"{first[label]} do not: their errors say more"
            )


def _plain(value: Any, *, reads_gpu: bool = True) -> Any:
    """Numbers of any type, and arrays and tensors of one, as floats; lists as tuples."""
    if isinstance(value, list | tuple):
        return tuple(_plain(one, reads_gpu=reads_gpu) for one in value)
    if not reads_gpu and _is_on_gpu(value):
        return "a tensor"
    if (isinstance(value, torch.Tensor) and value.numel() == 1) or (isinstance(value, np.ndarray) and value.size == 1):
        value = value.item()
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool | np.complexfloating)
    return float(value) if is_number else value


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | float | str)
