"""Random states of all ranks, as a plain value of a state."""

import logging
import random
import sys
from typing import Any, Final, TypeGuard

import numpy as np
import torch

from trackbed.checkpoint.format.safe_pickle import load_torch_item, torch_bytes
from trackbed.checkpoint.ranks import Ranks, meet
from trackbed.errors import CheckpointError

logger = logging.getLogger(__name__)

_WHERE: Final = "random states"
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
        states = [_decoded(ranks[meeting.rank])] if len(ranks) == meeting.size else []
        fits = [len(state["devices"]) in (0, _num_devices()) for state in states]
        # Either all ranks go on where they were, or none does.
        if fits and all(meeting.group.all_gather(all(fits))):
            _set_state(states[0])
            return True
        if not fits:
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


def _set_state(state: dict[str, Any]) -> None:
    kind, keys, place, has_gauss, gauss = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), place, has_gauss, gauss))
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
