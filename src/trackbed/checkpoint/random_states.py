"""Random states of all ranks, as a plain value of a state."""

import logging
import random
import sys
from collections.abc import Sequence
from typing import Any, Final, TypeGuard

import numpy as np
import torch

from trackbed.checkpoint.format.safe_pickle import load_torch_item, torch_bytes
from trackbed.checkpoint.ranks import Ranks, meet
from trackbed.errors import CheckpointError

logger = logging.getLogger(__name__)

_WHERE: Final = "random states"
_NUMPYS: Final = "MT19937"
_PYTHONS: Final = 3
_NUM_KEYS: Final = 624
_FIELDS: Final = ("python", "numpy", "torch", "devices", "trackers")
_MEGATRON: Final = "megatron.core.tensor_parallel.random"


def random_states(*, group: Ranks = None) -> dict[str, Any]:
    """Collective over `group`: returns the states of the random generators of all ranks, to be saved with a state.

    These are the generators of Python's `random`, NumPy's legacy functions, torch, torch on each GPU of the rank, and
    Megatron Core's tensor-parallel ones by their names, about 11 KB of each rank. The value is the same on all ranks,
    and a plain one: save it under a key of the state on every rank, and give what a load returns under this key to
    `restore_random_states`.

    Args:
        group: the ranks, as a `comm.Group` or a process group of torch; by default those of `torch.distributed`, or
            this process alone.

    Raises:
        CheckpointError: on every rank, with the rank that failed and its message.
    """
    with meet("random_states", group) as meeting:
        return {"seed": int(torch.initial_seed()) % 2**63, "ranks": meeting.gather(_own_state())}


def restore_random_states(saved: Any, *, group: Ranks = None) -> bool:
    """Collective over `group`: sets the random generators of each rank to what `random_states` has returned.

    On another number of ranks there is no state for each: every rank then begins streams of its own, made of the seed
    of the first rank when it saved, and its number, with a warning. So they do if a rank has other GPUs than before.

    Args:
        saved: value that was saved.
        group: the ranks; see `random_states`.

    Returns:
        True if each rank goes on where it was, False for new streams.

    Raises:
        CheckpointError: on every rank: the value is none of `random_states`.
    """
    with meet("restore_random_states", group) as meeting:
        ranks = saved.get("ranks") if isinstance(saved, dict) else None
        seed = saved.get("seed") if isinstance(saved, dict) else None
        if not isinstance(ranks, list) or not all(isinstance(one, bytes) for one in ranks) or not _is_seed(seed):
            raise CheckpointError(f"{_WHERE}: must be what random_states() returned, found {type(saved).__name__}")
        # All ranks agree on each of these, before the first of them is changed.
        has_own = len(ranks) == meeting.size
        own = _checked(_decoded(ranks[meeting.rank])) if has_own else None
        fits = own is not None and len(own["devices"]) in (0, _num_devices())
        found = meeting.group.all_gather([has_own, fits])
        if own is not None and all(fits for _, fits in found):
            _set_state(own)
            return True
        if not all(has_own for has_own, _ in found):
            logger.warning(
                "%s: saved by %d ranks, and there are %d now: each begins a stream of its own",
                _WHERE,
                len(ranks),
                meeting.size,
            )
        else:
            logger.warning("%s: saved with other GPUs: each rank begins a stream of its own", _WHERE)
        _begin_streams(seed, meeting.rank)
        return False


def _is_seed(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _own_state() -> bytes:
    """States of this rank's generators."""
    kind, keys, place, has_gauss, gauss = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.array(keys, dtype=np.int64)), place, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "devices": [torch.cuda.get_rng_state(number) for number in range(_num_devices())],
        "trackers": tracker.get_states() if (tracker := _megatrons_tracker()) is not None else {},
    }
    return torch_bytes(state, _WHERE)


def _num_devices() -> int:
    """Number of GPUs, where the program uses them."""
    cuda: Any = torch.cuda
    return int(cuda.device_count()) if cuda.is_initialized() else 0


def _decoded(content: bytes) -> dict[str, Any]:
    state = load_torch_item(content, _WHERE)
    if not isinstance(state, dict) or state.keys() != set(_FIELDS):
        raise CheckpointError(f"{_WHERE}: must have {', '.join(_FIELDS)} for each rank, found {type(state).__name__}")
    return state


def _checked(state: dict[str, Any]) -> dict[str, Any]:
    """Checks that the generators take a state. Returns it.

    Raises:
        CheckpointError: they do not.
    """
    try:
        _checked_numpy(state["numpy"])
        _check_python(*state["python"])
        torch.Generator(device="cpu").set_state(state["torch"])
        _check_bytes([*state["devices"], *state["trackers"].values()])
    except (TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{_WHERE}: must be states of generators, but {error}") from error
    return state


def _check_python(version: object, keys: Sequence[int], gauss: object) -> None:
    if version != _PYTHONS or len(keys) != _NUM_KEYS + 1 or not 0 <= keys[-1] <= _NUM_KEYS:
        raise ValueError(f"that of Python has version {version!r} and {len(keys)} numbers")
    if not all(0 <= key < 2**32 for key in keys) or not (gauss is None or isinstance(gauss, float)):
        raise ValueError("that of Python has other numbers")


def _check_bytes(states: Sequence[torch.Tensor]) -> None:
    if any(own.dtype != torch.uint8 or own.dim() != 1 for own in states):
        raise ValueError("those of GPUs are no bytes")


def _checked_numpy(state: Any) -> tuple[str, np.ndarray[Any, np.dtype[np.uint32]], int, int, float]:
    """State of NumPy's generator, whose place in its numbers NumPy itself does not check."""
    kind, keys, place, has_gauss, gauss = state
    numbers = keys.numpy()
    if kind != _NUMPYS or numbers.shape != (_NUM_KEYS,) or numbers.dtype != np.int64:
        raise ValueError(f"that of NumPy must have {_NUM_KEYS} numbers of {_NUMPYS}")
    if not ((numbers >= 0) & (numbers < 2**32)).all() or has_gauss not in (0, 1):
        raise ValueError("that of NumPy has other numbers")
    if type(place) is not int or not 0 <= place <= _NUM_KEYS:
        raise ValueError(f"that of NumPy must have a place from 0 to {_NUM_KEYS}, and has {place!r}")
    return kind, numbers.astype(np.uint32), place, int(has_gauss), float(gauss)


def _set_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(_checked_numpy(state["numpy"]))
    torch.set_rng_state(state["torch"])
    for number, of_device in enumerate(state["devices"]):
        torch.cuda.set_rng_state(of_device, number)
    tracker = _megatrons_tracker()
    if tracker is not None and state["trackers"]:
        tracker.set_states(state["trackers"])


def _megatrons_tracker() -> Any:
    """Megatron Core's named states of tensor-parallel ranks, where the program has imported it; None otherwise."""
    module = sys.modules.get(_MEGATRON)
    return None if module is None else module.get_cuda_rng_tracker()


def _begin_streams(seed: int, rank: int) -> None:
    """Seeds all generators of this rank, each with a number of its own."""
    numbers = np.random.SeedSequence([seed, rank]).generate_state(3, dtype=np.uint64)
    random.seed(int(numbers[0]))
    np.random.seed(int(numbers[1]) % 2**32)
    torch.manual_seed(int(numbers[2]) % 2**63)
