"""Parts of parameters that a rank's optimizer updates, and copies in float32 of parameters of 16 bits."""

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from trackbed.grads.buffer import dims_in_memory, fills_memory
from trackbed.grads.collectives import shard_of
from trackbed.grads.engine import GradientEngine
from trackbed.grads.parameter_set import name_in_module

_LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class ParamPiece:
    """Part of a parameter that this rank updates: all of it, unless the optimizer is sharded."""

    name: str
    """Name of the parameter in the model."""
    param: torch.nn.Parameter
    start: int
    """First element within the parameter."""
    stop: int
    """Element after the last one within the parameter."""
    data: torch.Tensor
    """View of the part in the model."""
    gradient: torch.Tensor
    """View of the part of its gradient, of the same shape."""
    main: torch.nn.Parameter
    """Tensor that the optimizer updates: the part itself, or a copy in float32 of one of 16 bits."""
    is_turned: bool
    """True if gradient and `main` have their elements in different orders in memory."""

    @property
    def is_whole(self) -> bool:
        """True if the piece has the shape of the parameter, because the optimizer is not sharded."""
        return self.main.shape == self.param.shape

    @property
    def is_copied(self) -> bool:
        """True if `main` is a copy."""
        return self.main.dtype != self.data.dtype


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors of one shape begin at the same place in memory, or have no elements."""
    return one.numel() == 0 or one.data_ptr() == other.data_ptr()


def is_low_precision(tensor: torch.Tensor) -> bool:
    """True for types of 16 bits. Parameters of such types are updated in copies in float32."""
    return tensor.dtype in _LOW_PRECISION


def pieces_of(engine: GradientEngine) -> dict[torch.nn.Parameter, list[ParamPiece]]:
    """Pieces of each parameter that this rank owns: one, or none if it owns no part of the parameter.

    The first rank owns the parameters without elements, whose states have counts of steps at least.
    """
    names = {param: name_in_module(name) for name, param in engine.module.named_parameters()}
    pieces: dict[torch.nn.Parameter, list[ParamPiece]] = {param: [] for param in engine.params}
    for buffer in engine.buffers():
        is_sharded = buffer.ddp_config.use_distributed_optimizer
        owned = buffer.layout.pieces(buffer.data_parallel_group.rank())
        for number, start, stop in zip(*(column.tolist() for column in owned), strict=True):
            param = buffer.params[number]
            pieces[param].append(_piece(names[param], param, start, stop, is_sharded=is_sharded))
        if is_sharded and buffer.data_parallel_group.rank() == 0:
            for param in buffer.params:
                if param.numel() == 0:
                    pieces[param].append(_piece(names[param], param, 0, 0, is_sharded=True))
    return pieces


class Conversion:
    """Conversion of gradients of 16 bits to float32, as a whole: on a GPU, kernels for each parameter take long.

    Args:
        owned: result of `owned_gradients`.
        pieces: pieces, whose gradients are views of these vectors.
    """

    def __init__(self, owned: Iterable[torch.Tensor], pieces: Iterable[ParamPiece]) -> None:
        self._vectors = [vector for vector in owned if is_low_precision(vector) and vector.numel()]
        starts = [vector.data_ptr() for vector in self._vectors]
        order = sorted(range(len(starts)), key=starts.__getitem__)
        sorted_starts = sorted(starts)
        self._places: list[tuple[ParamPiece, int, int]] = []
        """Pieces with a gradient of 16 bits, the vector that it lies in, and its first element there."""
        for piece in pieces:
            gradient = piece.gradient
            if is_low_precision(gradient) and gradient.numel():
                number = order[bisect.bisect_right(sorted_starts, gradient.data_ptr()) - 1]
                offset = (gradient.data_ptr() - starts[number]) // gradient.itemsize
                self._places.append((piece, number, offset))

    def convert(self, factors: Sequence[float]) -> dict[ParamPiece, torch.Tensor]:
        """Returns the gradients in float32, multiplied by some factors, one after the other."""
        converted = [vector.float() for vector in self._vectors]
        for vector in converted:
            for factor in factors:
                vector *= factor
        return {
            piece: converted[number].as_strided(piece.gradient.shape, piece.gradient.stride(), offset)
            for piece, number, offset in self._places
        }


def owned_gradients(engine: GradientEngine) -> Iterator[torch.Tensor]:
    """Yields contiguous vectors of the gradients that this rank's pieces are views of, with padding."""
    for buffer in engine.buffers():
        if buffer.ddp_config.use_distributed_optimizer:
            ranks = buffer.data_parallel_group
            for bucket in buffer.buckets:
                yield shard_of(bucket.grad_data, ranks.rank(), ranks.size())
        else:
            yield buffer.grad_data


def shared_gradients(engine: GradientEngine) -> Iterator[torch.Tensor]:
    """Yields contiguous parts of the reduced gradients, such that each element is in the part of one rank.

    Where the optimizer is sharded, these are this rank's shards. Where it is not, each rank has all reduced gradients,
    and takes an equal part of them. Padding, which is zero, is included.
    """
    if engine.config.use_distributed_optimizer:
        yield from owned_gradients(engine)
        return
    for buffer in engine.buffers():
        rank, size = buffer.data_parallel_group.rank(), buffer.data_parallel_group.size()
        yield buffer.grad_data[buffer.numel * rank // size : buffer.numel * (rank + 1) // size]


def _piece(name: str, param: torch.nn.Parameter, start: int, stop: int, *, is_sharded: bool) -> ParamPiece:
    data: torch.Tensor = param.data
    gradient: torch.Tensor = param.main_grad  # type: ignore[attr-defined]
    if is_sharded:
        data, gradient = data.view(-1)[start:stop], gradient.view(-1)[start:stop]
    if is_low_precision(param):
        main = torch.nn.Parameter(data.float())
    elif is_sharded:
        main = torch.nn.Parameter(data)
    else:
        main = param
    is_turned = fills_memory(main) and dims_in_memory(gradient) != dims_in_memory(main)
    return ParamPiece(name, param, start, stop, data, gradient, main, is_turned)


_UNKNOWN: Final = -1
"""Number of changes of a parameter that is to be looked at."""


class Copies:
    """Copies of pieces, with the number of changes that torch had counted of each parameter when they last agreed.

    Steps and gathers write through other tensors, so that torch does not count them. A copy is not written before the
    next step: weights that are exchanged for an evaluation, and put back, lose no bit.

    Args:
        pieces: all pieces of a rank, of which some have copies.
        wait: waits for parameters that are being gathered.
    """

    def __init__(self, pieces: Iterable[ParamPiece], wait: Callable[[], None]) -> None:
        self._places = {piece: place for place, piece in enumerate(piece for piece in pieces if piece.is_copied)}
        self._params = [piece.param for piece in self._places]
        self._versions = self._count_changes()
        self._wait = wait

    def note_written(self) -> None:
        """Has all parameters be looked at, as if each had been written."""
        self._versions = [_UNKNOWN] * len(self._versions)

    @torch.no_grad()
    def take_over(self) -> None:
        """Sets the copies of parameters that were written, except where a copy rounds to the value."""
        if not self._places:
            return
        self._wait()
        found = self._count_changes()
        if found == self._versions:
            return
        for piece, place in self._places.items():
            if found[place] != self._versions[place]:
                piece.main.copy_(_followed(piece))
        self._versions = found

    @torch.no_grad()
    def value_of(self, piece: ParamPiece) -> torch.Tensor:
        """Value that the copy of a piece has after `take_over`: the copy itself, unless the parameter was written."""
        place = self._places.get(piece)
        if place is None or piece.param._version == self._versions[place]:
            return piece.main.detach()
        self._wait()
        return _followed(piece)

    def _count_changes(self) -> list[int]:
        return [param._version for param in self._params]


def _followed(piece: ParamPiece) -> torch.Tensor:
    """The copy, with the values of the parameter where it does not round to them, bit for bit."""
    is_same = piece.main.to(piece.data.dtype).view(torch.int16) == piece.data.view(torch.int16)
    return torch.where(is_same, piece.main, piece.data)
