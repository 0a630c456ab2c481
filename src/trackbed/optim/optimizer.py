"""Optimizer of the parameters that `DistributedDataParallel` wraps."""

import inspect
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import torch

from trackbed.checkpoint.state.objects_with_state import REFUSAL
from trackbed.errors import ArgumentError
from trackbed.grads import DistributedDataParallel
from trackbed.grads.buffer import arranged_like, fills_memory
from trackbed.grads.hooks import watch_steps
from trackbed.grads.parameter_set import is_expert, name_in_module
from trackbed.optim.loss_scale import LossScale, is_number
from trackbed.optim.norm import SquareSum, square_sum_numbers
from trackbed.optim.pieces import (
    Conversion,
    Copies,
    ParamPiece,
    is_low_precision,
    is_same_memory,
    owned_gradients,
    pieces_of,
    shared_gradients,
)
from trackbed.optim.state import OptimizerState
from trackbed.optim.state_parts import State, StatePart
from trackbed.optim.torch_optimizers import TorchOptimizers, check_elementwise
from trackbed.optim.update_agreement import (
    check_experts_agree,
    check_updates_agree,
    describe_update,
    digest_of_lines,
    digest_of_tensors,
    digests_of,
    groups_with,
    numbers_on_gpu,
)

logger = logging.getLogger(__name__)

_EPSILON: Final = 1e-6
_SMALLEST_NORM: Final = 1e-30


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of a step: the norm before clipping, the loss scale, and if the step was skipped."""

    is_skipped: bool
    """True if no parameter was updated, because the norm of the gradients is not finite."""
    norm: float
    """Norm of the gradients of the whole model, before clipping."""
    loss_scale: float
    """Factor of the loss in this step."""


class DataParallelOptimizer:
    """Updates the parameters of a `DistributedDataParallel` with an optimizer of torch.

    If the wrapper shards the optimizer, each rank updates one shard of every bucket, and keeps the state of this shard
    alone; then the updated parameters are gathered on all ranks. Parameters of 16 bits have copies in float32, which
    are updated.

    The parameter groups of the torch optimizer stay the same objects, so that learning-rate schedulers work. The list
    "params" of each group becomes the list of the parts that this rank updates.

    Several optimizers of torch are given as a list, with each parameter in one of them: they have one norm, one clip
    and one state, in which the parameter groups are in the order of the list.

    Args:
        optimizer: optimizer of torch over `model.parameters()`, built before or after the wrapper; or a list of some.
        model: wrapper of the model.
        max_norm: norm to which larger gradients are clipped, at least 1e-30; None not to clip.
        loss_scale: factor by which the program multiplies the loss; "dynamic" to adapt it; None for 1.

    Raises:
        ArgumentError: an argument is out of range; the update of a sharded optimizer is not elementwise; or the
            optimizer has a parameter that the model does not have, or needs a closure.
        GradientError: a parameter of the model was replaced after wrapping.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        model: DistributedDataParallel,
        *,
        max_norm: float | None = None,
        loss_scale: float | Literal["dynamic"] | None = None,
    ) -> None:
        if max_norm is not None and not (is_number(max_norm) and max_norm >= _SMALLEST_NORM):
            raise ArgumentError(f"max_norm must be a number of at least {_SMALLEST_NORM}, or None, but is {max_norm!r}")
        optimizers = _list_of(optimizer)
        _check_kinds(optimizers, model)
        engine = model.engine
        engine.check_unchanged()
        if engine.config.use_distributed_optimizer:
            for one in optimizers:
                check_elementwise(one)
        for one in optimizers:
            if type(one).state_dict is not torch.optim.Optimizer.state_dict:
                logger.warning(
                    "optimizer: what state_dict() of %s adds to a state is not stored: it is not called",
                    type(one).__name__,
                )
        self._torchs = TorchOptimizers(optimizers)
        self.model = model
        self._engine = engine
        self._max_norm = max_norm
        self._loss_scale = LossScale(loss_scale)
        self._params = {name_in_module(name): param for name, param in engine.module.named_parameters()}
        names: dict[torch.Tensor, str] = {param: name for name, param in self._params.items()}
        self._names = names
        _check_known(optimizers, names)
        pieces_of_params = pieces_of(engine)
        group_names = [[names[param] for param in group["params"]] for group in self._torchs.groups]
        self.group_names = group_names
        """Names of the parameters of each parameter group, of the whole model."""
        self._names_of = {
            of_experts: [
                [name for name in group if is_expert(self._params[name]) == of_experts] for group in group_names
            ]
            for of_experts in (False, True)
        }
        self._pieces: list[ParamPiece] = []
        before = self._torchs.states()
        others = self._torchs.other_states()
        for group in self._torchs.groups:
            pieces = [piece for param in group["params"] for piece in pieces_of_params.get(param, [])]
            # In place: some optimizers, such as torch's LBFGS, keep the list.
            group["params"][:] = [piece.main for piece in pieces]
            self._pieces += pieces
        self._torchs.note_tensors()
        self._group_sizes = [len(group["params"]) for group in self._torchs.groups]
        self._conversion = Conversion(owned_gradients(engine), self._pieces)
        self._copies = Copies(self._pieces, engine.wait_for_params)
        self._scattered = [piece for piece in self._pieces if not fills_memory(piece.main)]
        """Pieces whose memory has gaps or overlaps."""
        self._check_fused()
        if engine.config.use_distributed_optimizer or any(piece.is_copied for piece in self._pieces):
            for optimizer in optimizers:
                setattr(optimizer, REFUSAL, _REFUSAL)
        self._state = OptimizerState(engine, self._torchs, self._pieces, self._copies, self._loss_scale, group_names)
        self._state.adopt({names[param]: state for param, state in before.items() if param in names}, others)
        engine.attach(self)
        watch_steps(engine, ((piece.main, piece.param) for piece in self._pieces))

    def __repr__(self) -> str:
        """Shows the torch optimizer, whose parameter groups have the parts of this rank, and how it is used."""
        way = "sharded" if self._engine.config.use_distributed_optimizer else "not sharded"
        options = f"max_norm={self._max_norm}, loss_scale={self.loss_scale}"
        return f"<DataParallelOptimizer, {way}, {options}, of {', '.join(map(repr, self._torchs.members))}>"

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers of torch."""
        return self._torchs.members

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of torch, if it is one alone.

        Raises:
            ArgumentError: there are several.
        """
        if len(self.optimizers) > 1:
            raise ArgumentError(f"optimizer: must be one alone, but there are {len(self.optimizers)}: see optimizers")
        return self.optimizers[0]

    @property
    def loss_scale(self) -> float:
        """Factor by which the program multiplies the loss before its backward pass."""
        return self._loss_scale.value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the torch optimizer; of several, in their order. A scheduler takes one of them."""
        return self.optimizers[0].param_groups if len(self.optimizers) == 1 else self._torchs.groups

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  torch's signature
        """Sets all gradients to zero. They lie in buffers, which stay: `set_to_none` makes no difference."""
        self._engine.zero_gradients()

    @torch.no_grad()
    def step(self) -> StepReport:
        """Collective over the ranks: reduces and clips the gradients, updates the parameters and gathers them.

        Gradients are cast to float32, divided by the loss scale, and multiplied by
        `float32(max_norm / (norm + 1e-6))` where that is below 1. With `overlap_param_gather`, parameters are gathered
        during the next forward pass.

        Raises:
            GradientError: a gradient is missing, is in `param.grad`, or is not finite with `check_for_nan_in_grad`;
                `zero_grad` was not called since the last step; a parameter was replaced, moved or converted; or the
                model has a newer optimizer.
            ArgumentError: a parameter group was added.
            Exception: as torch's optimizer raises it. Other ranks may have finished this step: all further ones are
                refused, unless this rank is alone.
            CollectiveError: another rank failed, or has other parameter groups, options or frozen parameters.
        """
        self._check_groups()
        self._engine.take_gradients(self)
        self._copies.take_over()
        scale = self._loss_scale.value
        norm, unused = self._agree_on_update()
        with self._engine.agreed_update():
            norm /= scale
            is_finite = math.isfinite(norm)
            if is_finite:
                self._update(self._factors(norm, scale), unused)
            self._loss_scale.update(is_finite=is_finite)
        return StepReport(not is_finite, norm, scale)

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Copies the parameters of 16 bits to their copies in float32, except where the copy rounds to the same value.

        Each step and each state does so by itself for parameters that were written in a way that torch counts, such as
        a load of any part of the model, or `copy_`. Call it after you write through `param.data`, a NumPy array or
        `torch.distributed`, which torch does not count.
        """
        self.note_model_params()
        self._copies.take_over()

    def note_model_params(self) -> None:
        """Has the next step or state look at all parameters of 16 bits, as if each had been written."""
        self._copies.note_written()

    def state_dict(self) -> dict[str, Any]:
        """Returns the complete state by parameter name, the same on every rank.

        Collective over the ranks where the optimizer is sharded: then all ranks must call it. Otherwise it does not
        communicate.

        The format is torch's: `load_state_dict` of the torch optimizer takes it, with the parameters in the same order
        of groups, and `torch.load(weights_only=True)` reads it. Tensors are copies with the shapes of their parameters,
        and `main_param` is the copy in float32 of a parameter of 16 bits.

        Memory: each calling rank holds a copy of the whole state, as that of AdamW of 8 bytes per parameter of the
        model, or 12 of 16 bits. Where the optimizer is sharded, that is as many times a rank's own share as there are
        ranks, on the CPU, and for a moment twice that. `trackbed.sharded_state` saves without copies.
        """
        return self._state.whole()

    def full_state_dict(self) -> dict[str, Any]:
        """Returns the complete state: another name of `state_dict`."""
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, allow_cast: bool = False) -> None:
        """Loads the complete state of an optimizer. Not collective.

        The state is the result of `state_dict` on any number of ranks, or that of an optimizer of torch. Its parameters
        are named, or numbered as torch numbers them, in the order of the parameter groups. So the results of
        `torch.optim.AdamW.state_dict()` and of `ZeroRedundancyOptimizer.state_dict()` are loaded as they are, if their
        parameter groups had the parameters of this optimizer in the same order. A state of one rank, which an older
        Trackbed has saved, is loaded where no optimizer was sharded, neither then nor now.

        Parameters of 16 bits are set from `main_param` where the state has it, and a dynamic loss scale from
        `loss_scale`. A parameter without a state begins anew, with a warning if others have one.

        Tensors keep their types, but for those of 16 bits beside copies in float32, which become float32. torch's own
        optimizers need the type of the parameter, or float32 beside a copy.

        Args:
            state: complete state, the same on every rank.
            allow_cast: True to round values where torch's optimizer needs another type; otherwise that is an error.

        Raises:
            ArgumentError: the state does not fit this optimizer: its parameter groups differ, an option or a tensor
                is missing or of another shape, a value would change, or it is that of one rank of a sharded optimizer.
                The message names what differs, and nothing is loaded.
        """
        self._state.load_whole(state, allow_cast=allow_cast)

    def load_full_state_dict(self, state: Mapping[str, Any], *, allow_cast: bool = False) -> None:
        """Loads the complete state of an optimizer: another name of `load_state_dict`."""
        self.load_state_dict(state, allow_cast=allow_cast)

    def split_state_dict(self) -> tuple[dict[str, Any], list[StatePart]]:
        """Collective over the ranks: like `state_dict`, but each rank keeps its parts of the tensors to itself.

        Returns:
            State without the tensors that are divided among the ranks, the same on every rank. Under "divided" it has
            their types, by parameter name and key, such as `{"weight": {"exp_avg": "float32"}}`.
            This rank's parts of these tensors.

        Raises:
            CollectiveError: a rank has no state of its part of a parameter, and others have.
        """
        return self._state.split()

    def spans(self) -> dict[str, tuple[int, int]]:
        """First element of each parameter that this rank updates, and the element after its last one."""
        return self._state.spans()

    def load_split_state_dict(
        self, state: Mapping[str, Any], parts: Mapping[str, State], *, allow_cast: bool = False
    ) -> None:
        """Loads the result of `split_state_dict`, of any number of ranks. Not collective.

        Args:
            state: state without the tensors that are divided among the ranks, the same on every rank.
            parts: these tensors by parameter name and key, one-dimensional: the elements of `spans`, and all elements
                of a parameter that was frozen when the model was wrapped.
            allow_cast: True to round values where torch's optimizer needs another type; see `load_state_dict`.

        Raises:
            ArgumentError: the state does not fit this optimizer. The message names what differs, and nothing is loaded.
        """
        self.check_split_state_dict(state, parts, allow_cast=allow_cast)()

    def check_split_state_dict(
        self, state: Mapping[str, Any], parts: Mapping[str, State], *, allow_cast: bool = False
    ) -> Callable[[], None]:
        """Checks what `load_split_state_dict` takes, and returns a function that loads it. Not collective.

        So that all ranks can check before the first of them loads.

        Args:
            state: see `load_split_state_dict`.
            parts: see there.
            allow_cast: see there.

        Raises:
            ArgumentError: the state does not fit this optimizer. The message names what differs.
        """
        return self._state.check_split(state, parts, allow_cast=allow_cast)

    def _agree_on_update(self) -> tuple[float, set[str]]:
        """Collective over the ranks: returns the norm of the gradients, and names of parameters without a gradient.

        The norm is that of the reduced gradients of the whole model, the same bits for every layout and number of
        ranks. Beside the numbers of which it is made, the ranks exchange digests of what they are about to do, and how
        many gradients they lack. Only if each lacks some, they also exchange which.
        """
        parts = (False, True) if self._engine.experts.buffers else (False,)
        squares = square_sum_numbers(shared_gradients(self._engine))
        texts = {part: self._describe_update(of_experts=part) for part in parts}
        # Ranks with other experts must not update where these disagree.
        experts = self._tensor_numbers([], squares.device, of_experts=True) + digest_of_lines(texts.get(True, {}))
        lacking = {part: self._engine.lacking_gradients(of_experts=part) for part in parts}
        more = {False: [experts, squares], True: []}
        found = self._engine.exchange_update(
            {part: np.array([len(lacking[part]), *digests_of(texts[part])], dtype=np.int64) for part in parts},
            {part: self._tensor_numbers(more[part], squares.device, of_experts=part) for part in parts},
        )
        unused = set[str]()
        for part, rows in found.items():
            digests = rows[:, 1 : len(texts[part]) + 2]
            check_updates_agree(texts[part], digests, partial(self._gather_lines, of_experts=part))
            params = self._engine.unused_params(lacking[part], rows[:, 0], of_experts=part)
            unused.update(self._names[param] for param in params)
        rows = found[False][:, -len(squares) - 1 :]
        check_experts_agree(rows[:, 0].tolist(), self._engine.expert_groups)
        return SquareSum.total(rows[:, 1:]).norm(), unused

    def _tensor_numbers(self, more: list[torch.Tensor], device: torch.device, *, of_experts: bool) -> torch.Tensor:
        """Numbers on the device of the gradients: what stands for options that are tensors, and more."""
        groups = groups_with(self.optimizers, self._names_of[of_experts])
        options = [value for _, group in groups for value in numbers_on_gpu(group)]
        return torch.cat([digest_of_tensors(options, device), *more])

    def _gather_lines(self, name: str, ranks: Collection[int], *, of_experts: bool) -> dict[int, list[str]]:
        """Lines of some ranks, in which options have their values."""
        lines = self._describe_update(of_experts=of_experts, reads_gpu=True)[name]
        return self._engine.gather_lines(lines, ranks, of_experts=of_experts)

    def _describe_update(self, *, of_experts: bool, reads_gpu: bool = False) -> dict[str, list[str]]:
        groups = self._names_of[of_experts]
        frozen = [name for names in groups for name in names if not self._params[name].requires_grad]
        more = {
            "max_norm": [repr(None if self._max_norm is None else float(self._max_norm))],
            "the loss scale": [repr(self._loss_scale.value)],
        }
        return (
            describe_update(self.optimizers, groups, frozen, reads_gpu=reads_gpu)
            | {"the state that was loaded": [self._state.origins[of_experts]]}
            | more
        )

    def _factors(self, norm: float, scale: float) -> list[float]:
        """Factors by which the gradients are multiplied, one after the other, each in float32."""
        factors = [] if scale == 1.0 else [1.0 / scale]
        if self._max_norm is not None and (clip := self._max_norm / (norm + _EPSILON)) < 1.0:
            factors.append(clip)
        return [float(np.float32(factor)) for factor in factors]

    def _update(self, factors: list[float], unused: set[str]) -> None:
        """Multiplies the gradients, updates the pieces of all parameters but the unused, and gathers the parameters."""
        for gradients in owned_gradients(self._engine):
            if not is_low_precision(gradients):
                for factor in factors:
                    gradients *= factor
        converted = self._conversion.convert(factors)
        try:
            for piece in self._pieces:
                # As without a wrapper, a parameter that is frozen later, or has no gradient, stays as it is.
                is_updated = piece.param.requires_grad and piece.name not in unused
                piece.main.grad = _gradient_of(piece, converted) if is_updated else None
            self._engine.is_updating = True
            self._torchs.step()
            self._take_back()
        finally:
            self._engine.is_updating = False
            for piece in self._pieces:
                piece.main.grad = None
        copied = [piece for piece in self._pieces if piece.is_copied]
        if copied:
            torch._foreach_copy_([piece.data for piece in copied], [piece.main for piece in copied])
        if self._engine.config.use_distributed_optimizer:
            self._engine.start_param_sync()

    def _take_back(self) -> None:
        """Undoes what optimizers of programs may do to tensors, after a step of theirs."""
        if self._torchs.is_of_torch:
            return
        for piece in self._pieces:
            if not piece.is_copied and piece.main is not piece.param and not is_same_memory(piece.main, piece.data):
                # `p.data = p.data - ...` leaves the memory of the model.
                piece.data.copy_(piece.main)
                piece.main.data = piece.data
        self._torchs.own_gradients([buffer.grad_data for buffer in self._engine.buffers()])

    def _check_groups(self) -> None:
        found = [len(group["params"]) for group in self._torchs.groups]
        if found != self._group_sizes:
            raise ArgumentError(
                "optimizer: its parameter groups must stay as they are, but have "
                f"{found} tensors in place of {self._group_sizes}: add groups before DataParallelOptimizer is built"
            )
        self._check_fused()

    def _check_fused(self) -> None:
        """Checks that no fused kernel, which would write into gaps, updates a parameter that has some."""
        for piece in self._scattered:
            for group in self._torchs.groups:
                if group.get("fused") and any(piece.main is main for main in group["params"]):
                    raise ArgumentError(
                        f"optimizer: {piece.name} must fill its memory for fused=True, but has the shape "
                        f"{list(piece.main.shape)} with the strides {list(piece.main.stride())}: leave fused out, or "
                        "give the model a parameter without gaps and overlaps, as clone() makes them"
                    )


_REFUSAL: Final = (
    "its state is that of this rank's parts, or of copies of the parameters: put the DataParallelOptimizer, or "
    "sharded_state(model, optimizer), into the state"
)


def _gradient_of(piece: ParamPiece, converted: Mapping[ParamPiece, torch.Tensor]) -> torch.Tensor:
    """Gradient of a piece, in the type of its main parameter."""
    gradient = converted.get(piece, piece.gradient).to(piece.main.dtype)
    return arranged_like(gradient, piece.main) if piece.is_turned else gradient


def _list_of(optimizer: object) -> list[torch.optim.Optimizer]:
    """Returns the optimizers of an argument that is one, or a list or tuple of some."""
    if not isinstance(optimizer, list | tuple):
        return [optimizer]  # type: ignore[list-item]  # _check_kinds follows
    if not optimizer:
        raise ArgumentError("optimizer must be one of torch, or a list of some, but is an empty list")
    return list(optimizer)


def _check_kinds(optimizers: Sequence[object], model: object) -> None:
    """Checks that a model is wrapped, and that its optimizers are those of torch that need no closure."""
    if not isinstance(model, DistributedDataParallel):
        raise ArgumentError(f"model must be a DistributedDataParallel, but is of {type(model).__name__}")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentError(
                f"optimizer must be one of torch, or a list of some, but is of {type(optimizer).__name__}"
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ArgumentError(
                f"optimizer: its step() must need no closure, but that of {type(optimizer).__name__} does"
            )


def _check_known(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[torch.Tensor, str]) -> None:
    """Checks that optimizers have parameters of the model, each once, and no states of others."""
    owners: dict[torch.Tensor, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for place, param in enumerate(group["params"]):
                if param not in names:
                    raise ArgumentError(
                        "optimizer: its parameters must be those of the model, but number "
                        f"{place} of group {number}, of shape {list(param.shape)}, is not"
                    )
                if param in owners:
                    raise ArgumentError(
                        f"optimizer: each parameter must be in one optimizer of the list, but {names[param]} is in "
                        f"{type(owners[param]).__name__} and {type(optimizer).__name__}"
                    )
                owners[param] = optimizer
        for param, state in optimizer.state.items():
            if isinstance(param, torch.Tensor) and state and param not in names:
                raise ArgumentError(
                    "optimizer: its states must be of parameters of the model, but one of shape "
                    f"{list(param.shape)} is not"
                )
