"""Agreement of the ranks on how they update parameters, checked in every step beside the norm."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from trackbed.errors import CollectiveError
from trackbed.files.checksum import crc32

__all__ = ["brief", "check_same", "describe_options", "describe_update", "digest_of_state", "digests_of"]

_NOT_OPTIONS: Final = ("params", "param_names")


def describe_options(options: Mapping[str, Any]) -> str:
    """Text of the options of a parameter group that are numbers, words or lists of them."""
    found = {key: _plain(value) for key, value in options.items() if key not in _NOT_OPTIONS}
    return ", ".join(f"{key}={value!r}" for key, value in found.items() if _is_plain(value))


def describe_update(
    optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]], frozen: Sequence[str]
) -> dict[str, str]:
    """Texts, by name, that are the same on all ranks whose updates of some parameters are.

    Args:
        optimizer: optimizer.
        names: names of these parameters in each of its groups.
        frozen: names of those that are frozen.
    """
    groups = zip(optimizer.param_groups, names, strict=True)
    return {
        "the class of the optimizer": type(optimizer).__qualname__,
        "the parameter groups": f"{brief(names)} ({_digest_of(repr(names)):x})",
        "the options of parameter groups": "; ".join(describe_options(group) for group, own in groups if own),
        "parameters that are frozen after wrapping": ", ".join(frozen) or "none",
    }


def brief(groups: Sequence[Sequence[str]]) -> str:
    """Sizes of parameter groups, and the first name of each."""
    return ", ".join(f"{len(names)} parameters from {names[0]!r}" if names else "none" for names in groups)


def digest_of_state(states: Mapping[str, Mapping[str, Any]]) -> int:
    """CRC-32 of a state by parameter name, of tensors with their contents."""
    crc = 0
    for name, state in states.items():
        for key, value in state.items():
            is_tensor = isinstance(value, torch.Tensor)
            text = f"{name}/{key} {list(value.shape) if is_tensor else value}"
            crc = crc32(text.encode(), crc)
            if is_tensor:
                flat = value.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
                crc = crc32(flat.view(torch.uint8).numpy(), crc)
    return crc


def _digest_of(text: str) -> int:
    """Number of 63 bits that stands for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def digests_of(texts: Mapping[str, str]) -> npt.NDArray[np.int64]:
    """`[K]` numbers that stand for the texts."""
    return np.array([_digest_of(text) for text in texts.values()], dtype=np.int64)


def check_same(
    texts: Mapping[str, str], rows: npt.NDArray[np.int64], rank: int, ranks: Sequence[int] | None = None
) -> None:
    """Checks that all ranks have the same texts.

    Args:
        texts: those of this rank, by name.
        rows: `[ranks, K]` the `digests_of` the texts of each rank.
        rank: number of this rank.
        ranks: number of the rank of each row; by default in order from 0.

    Raises:
        CollectiveError: they do not. The message has the first name, a rank that differs, and this rank's text.
    """
    ranks = range(len(rows)) if ranks is None else ranks
    own = rows[ranks.index(rank)]
    for number, (name, text) in enumerate(texts.items()):
        other = np.flatnonzero(rows[:, number] != own[number])
        if len(other):
            msg = (
                f"optimizer: {name} must be the same on every rank, but rank {rank} has {text}, and rank "
                f"{ranks[other[0]]} does not"
            )
            raise CollectiveError(msg)


def _plain(value: Any) -> Any:
    """Numbers of any type, and tensors of one, as floats; lists as tuples."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool | np.complexfloating)
    return float(value) if is_number else value


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | float | str)
