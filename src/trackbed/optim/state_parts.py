"""State of an optimizer by parameter name, whole, as torch's own and any number of ranks can use it.

    {"state": {name: {"step": tensor, "exp_avg": tensor, ...}},
     "param_groups": [{"lr": ..., ..., "params": [name, ...]}]}

Tensors have the shape of their parameter, and `main_param` is the copy in float32 of one of 16 bits. States that an
optimizer keeps under keys that are no parameters are under "other_state", if there are any. The state of several
optimizers has "classes", such as `[["Muon", 1], ["AdamW", 2]]`: class and number of parameter groups of each.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np
import orjson
import torch

from trackbed.checkpoint.format.safe_pickle import load_torch_item, torch_bytes
from trackbed.errors import ArgumentError, CheckpointError, CollectiveError
from trackbed.grads.buffer import arranged_like
from trackbed.grads.collectives import Collectives
from trackbed.grads.collectives.protocol import OPTIMIZER_STATE
from trackbed.grads.failure_aware_wait import Waiter
from trackbed.optim.pieces import ParamPiece

MAIN: Final = "main_param"
WHERE: Final = "state of the optimizer"
OTHERS: Final = "other_state"
CLASSES: Final = "classes"
"""Key of the classes of several optimizers of torch, with their numbers of parameter groups."""
_OTHER: Final = "other"
"""In the place of a type: a value that is neither a tensor nor one that JSON has."""
_PIECE_BYTES: Final = 256 << 20

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StatePart:
    """One value of the state of one piece."""

    name: str
    """Name of the parameter."""
    key: str
    value: Any
    """Tensor or number."""
    span: tuple[int, int] | None
    """Start and stop of the piece within the parameter; None for a value that the whole parameter has."""

    def without_elements(self) -> Self:
        """Returns the part with an empty tensor of its type, to tell other ranks of it."""
        return replace(self, value=self.value.new_empty(0))


def is_elementwise(key: str, value: torch.Tensor, param: torch.Tensor) -> bool:
    """True for a value with an element for each one of a parameter. A count of steps is none, also of one element."""
    return value.shape == param.shape and not (key == "step" and value.numel() == 1)


def parts_of(piece: ParamPiece, own: Mapping[str, Any], main_value: torch.Tensor) -> Iterator[StatePart]:
    """Yields the values of the state of a piece, with the value of its main parameter if that is a copy."""
    for key in own:
        if not isinstance(key, str) or key == MAIN:
            raise ArgumentError(
                f"optimizer: the keys of its states must be texts, and not {MAIN!r}, which is Trackbed's own, but "
                f"that of {piece.name} has {key!r}"
            )
    main = {MAIN: main_value} if piece.is_copied else {}
    for key, value in {**own, **main}.items():
        is_part = isinstance(value, torch.Tensor) and is_elementwise(key, value, piece.main)
        yield StatePart(piece.name, key, value, (piece.start, piece.stop) if is_part else None)


def gather_parts(parts: Iterable[StatePart], collectives: Collectives, waiter: Waiter) -> list[StatePart]:
    """Collective over the ranks of `collectives`: returns the parts of all ranks, in rank order, on every rank."""
    own = _encode(parts)
    sizes = collectives.exchange(np.array([own.numel()], dtype=np.int64), label=OPTIMIZER_STATE)
    waiter.wait(sizes.work, "the state of the optimizer")
    gathered: list[StatePart] = []
    for rank, (size,) in enumerate(sizes.read(waiter.read).tolist()):
        content = own if rank == collectives.rank() else torch.empty(size, dtype=torch.uint8, device="cpu")
        for start in range(0, size, _PIECE_BYTES):  # staged on a GPU where the group sends from there alone
            piece = content[start : start + _PIECE_BYTES]
            waiter.wait(collectives.broadcast([piece], source=rank), "broadcast of the optimizer's state")
        gathered += _decode(content)
    return gathered


def assemble(parts: Iterable[StatePart], params: Mapping[str, torch.Tensor]) -> dict[str, State]:
    """Joins parts to the state of whole parameters, by name.

    Args:
        parts: parts of all ranks.
        params: parameters by name, for their shapes.

    Raises:
        CollectiveError: a rank has no state of its part of a parameter, and others have; or a tensor of several
            elements that has not the shape of the parts differs between ranks.
    """
    parts = list(parts)
    check_covered(parts, params)
    whole: dict[str, State] = {}
    for part in parts:
        state = whole.setdefault(part.name, {})
        if part.span is None:
            _check_same(part, state.get(part.key))
            state[part.key] = part.value.clone() if isinstance(part.value, torch.Tensor) else part.value
            continue
        shape = params[part.name].shape
        tensor = state.setdefault(part.key, torch.empty(shape, dtype=part.value.dtype, device=part.value.device))
        tensor.view(-1)[slice(*part.span)] = part.value.reshape(-1)
    return {name: arranged_state(state, params[name]) for name, state in whole.items()}


def _check_same(part: StatePart, other: Any) -> None:
    """Checks that a tensor of several elements, which is not divided, is the same on all ranks that have it."""
    values = part.value, other
    if all(isinstance(value, torch.Tensor) and value.numel() > 1 for value in values) and not _has_same_bits(*values):
        raise CollectiveError(
            f"{WHERE}: {part.key!r} of {part.name} has the shape {list(part.value.shape)}, which is not that of the "
            "parts, and must be the same on all ranks, but differs: keep one value for each element of the parameter, "
            "or use use_distributed_optimizer=False"
        )


def _has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors have the same type, shape and bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (value.contiguous().view(-1).view(torch.uint8) for value in (one, other))
    return torch.equal(first, second)


def arranged_state(state: Mapping[str, Any], like: torch.Tensor) -> State:
    """Returns a state whose tensors lie in memory as the parameter, or the part of one, that has their shape."""
    return {
        key: arranged_like(value, like)
        if isinstance(value, torch.Tensor) and value.shape == like.shape and value.layout is torch.strided
        else value
        for key, value in state.items()
    }


def check_covered(parts: Iterable[StatePart], params: Mapping[str, torch.Tensor]) -> None:
    """Checks that the parts of a tensor have as many elements as its parameter.

    Args:
        parts: parts of all ranks.
        params: parameters by name, for their shapes.
    """
    found: Counter[tuple[str, str]] = Counter()
    for part in parts:
        if part.span is not None:
            found[part.name, part.key] += part.span[1] - part.span[0]
    for (name, key), count in found.items():
        if count != params[name].numel():
            raise CollectiveError(
                f"optimizer: all ranks must have the state of their parts, but {key!r} of {name} is there for "
                f"{count:,} of {params[name].numel():,} elements: load the same state on every rank"
            )


def cut_state(piece: ParamPiece, whole: Mapping[str, Any]) -> State:
    """Cuts the state of a piece from that of its parameter, as views. Tensors of other shapes are not divided."""
    cut: State = {}
    for key, value in whole.items():
        if not isinstance(value, torch.Tensor):
            cut[key] = value
        elif is_elementwise(key, value, piece.param):
            cut[key] = value.reshape(-1)[piece.start : piece.stop].reshape(piece.main.shape)
        else:
            cut[key] = value
    return cut


def _encode(parts: Iterable[StatePart]) -> torch.Tensor:
    """Serializes parts: length of the description, description in JSON, bytes of the tensors, then all other values."""
    rows, contents, others = [], [], {}
    for part in parts:
        if isinstance(part.value, torch.Tensor):
            value = part.value.detach().cpu().contiguous()
            rows.append([part.name, part.key, part.span, str(value.dtype).removeprefix("torch."), list(value.shape)])
            contents.append(value.view(-1).view(torch.uint8))
        elif _is_of_json(part.value):
            rows.append([part.name, part.key, part.span, None, part.value])
        else:
            where = f"{part.key!r} of {part.name}"
            _check_undivided(part.value, where)
            rows.append([part.name, part.key, part.span, _OTHER, where])
            others[where] = part.value
    if others:
        contents.append(torch.frombuffer(bytearray(_pickled(others)), dtype=torch.uint8))
    text = orjson.dumps(rows)
    head = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    return torch.cat([head, *contents])


def _pickled(others: Mapping[str, Any]) -> bytes:
    """Bytes of values by their place."""
    try:
        return torch_bytes(others, WHERE)
    except CheckpointError:
        for where, value in others.items():
            torch_bytes(value, f"{WHERE}: {where}")
        raise


def _is_of_json(value: Any) -> bool:
    """True for a value that JSON has, of the same type."""
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return value is None or type(value) is bool or (type(value) is str and value.isprintable())


def _check_undivided(value: Any, where: str) -> None:
    """Checks that no tensor with several elements lies inside a value, where nobody can tell whose parts they are."""
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        raise ArgumentError(
            f"{WHERE}: {where} must have tensors of one element, as the optimizer is sharded, but has one of shape "
            f"{list(value.shape)}: keep each tensor in the state under a key of its own, or use "
            "use_distributed_optimizer=False"
        )
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple | set | frozenset | deque):
        return
    for below in value:
        _check_undivided(below, where)


def _decode(content: torch.Tensor) -> Iterator[StatePart]:
    """Parses the result of `_encode`."""
    length = int.from_bytes(bytes(content[:8].tolist()), "little")
    position = 8 + length
    rows = orjson.loads(content[8:position].numpy().tobytes())
    sizes = [_num_bytes(dtype, shape) for _, _, _, dtype, shape in rows if dtype not in (None, _OTHER)]
    rest = content[position + sum(sizes) :]
    others = load_torch_item(rest.numpy().tobytes(), WHERE) if len(rest) else {}
    for name, key, span, dtype, value in rows:
        if dtype == _OTHER:
            value = others[value]
        elif dtype is not None:
            num_bytes = _num_bytes(dtype, value)
            value = content[position : position + num_bytes].clone().view(getattr(torch, dtype)).view(value)
            position += num_bytes
        yield StatePart(name, key, value, None if span is None else (span[0], span[1]))


def _num_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * int(getattr(torch, dtype).itemsize)
