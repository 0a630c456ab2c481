"""Optimizer of the parameters that `DistributedDataParallel` wraps."""

import copy
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import torch

from trackbed.errors import ArgumentError
from trackbed.grads import DistributedDataParallel
from trackbed.grads.collectives.protocol import NORM
from trackbed.grads.memory_order import arranged_like, fills_memory
from trackbed.grads.optimizer_hook import watch_steps
from trackbed.grads.parameters import is_expert, name_in_module
from trackbed.optim.agreement import brief, check_same, describe_update, digest_of_state, digests_of
from trackbed.optim.arguments import check_kinds, check_known, list_of
from trackbed.optim.copies import Copies
from trackbed.optim.elementwise import check_elementwise
from trackbed.optim.full_state import (
    CLASSES,
    MAIN,
    OTHERS,
    WHERE,
    Part,
    State,
    arranged_state,
    assemble,
    check_covered,
    cut_state,
    gather_parts,
    parts_of,
)
from trackbed.optim.loss_scale import LossScale, is_number
from trackbed.optim.norm import SquareSum
from trackbed.optim.pieces import Piece, is_low_precision, owned_gradients, pieces_of, shared_gradients
from trackbed.optim.state_check import (
    by_name,
    check_options,
    check_state,
    expected_state,
    field_of,
    warn_of_missing,
    with_module_names,
)
from trackbed.optim.state_types import check_types, fitted, restored
from trackbed.optim.torch_optimizers import TorchOptimizers
from trackbed.plural import number_of

__all__ = ["DataParallelOptimizer", "StepReport"]

_VERSION: Final = 1
_EPSILON: Final = 1e-6
_EXPECTED_MAIN: Final = {MAIN: torch.zeros(2, dtype=torch.float32, device="cpu")}
_NAMES: Final = ("params", "param_names")
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
            msg = f"max_norm must be a number of at least {_SMALLEST_NORM}, or None, but is {max_norm!r}"
            raise ArgumentError(msg)
        optimizers = list_of(optimizer)
        check_kinds(optimizers, model)
        engine = model.engine
        engine.check_unchanged()
        if engine.config.use_distributed_optimizer:
            for one in optimizers:
                check_elementwise(one)
        self._torchs = TorchOptimizers(optimizers)
        self.model = model
        self._engine = engine
        self._max_norm = max_norm
        self._loss_scale = LossScale(loss_scale)
        self._params = {name_in_module(name): param for name, param in model.module.named_parameters()}
        names: dict[torch.Tensor, str] = {param: name for name, param in self._params.items()}
        self._names = names
        check_known(optimizers, names)
        found = pieces_of(engine)
        self._group_names = [[names[param] for param in group["params"]] for group in self._torchs.groups]
        self._names_of = {
            of_experts: [
                [name for name in group if is_expert(self._params[name]) == of_experts] for group in self._group_names
            ]
            for of_experts in (False, True)
        }
        self._origins = dict.fromkeys((False, True), "none")
        """Description of the state that was loaded last, that of other parameters and that of experts."""
        self._num_steps = 0
        """Number of updates of this optimizer, and of those whose state of a rank was loaded."""
        self._pieces: list[Piece] = []
        before = self._torchs.states()
        others = self._torchs.other_states()
        for group in self._torchs.groups:
            pieces = [piece for param in group["params"] for piece in found.get(param, [])]
            group["params"] = [piece.main for piece in pieces]
            self._pieces += pieces
        self._torchs.note_tensors()
        self._group_sizes = [len(group["params"]) for group in self._torchs.groups]
        self._copies = Copies(self._pieces, engine.wait_for_params)
        self._scattered = [piece for piece in self._pieces if not fills_memory(piece.main)]
        """Pieces whose memory has gaps or overlaps."""
        self._check_fused()
        self._frozen_states: dict[str, State] = {}
        """States of parameters that were frozen when the model was wrapped: they are kept for whoever trains them."""
        states = {names[param]: state for param, state in before.items() if param in names}
        self._set_states(self._cut(states, self._expected_states(self._torchs.groups)), states, others)
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
            msg = f"optimizer: must be one alone, but there are {len(self.optimizers)}: see optimizers"
            raise ArgumentError(msg)
        return self.optimizers[0]

    @property
    def loss_scale(self) -> float:
        """Factor by which the program multiplies the loss before its backward pass."""
        return self._loss_scale.value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the torch optimizer; of several, in their order. A scheduler takes one of them."""
        return self.optimizers[0].param_groups if len(self.optimizers) == 1 else self._torchs.groups

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002  torch's signature
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
            CollectiveError: another rank failed, or has other parameter groups, options or frozen parameters.
        """
        self._check_groups()
        self._engine.check_attached(self)
        self._copies.take_over()
        self._engine.take_gradients(self)
        scale = self._loss_scale.value
        norm, unused = self._agree_on_update()
        norm /= scale
        is_finite = math.isfinite(norm)
        if is_finite:
            self._update(self._factors(norm, scale), unused)
            self._num_steps += 1
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
        """Returns the state of this rank, for `load_state_dict` on the same number of ranks with the same layout.

        If the optimizer is sharded over several ranks, the state has "of_rank", and `trackbed.save`, which saves plain
        values of rank 0 alone, refuses it.
        """
        size, is_sharded = self._engine.ranks.size(), self._engine.config.use_distributed_optimizer
        self._torchs.check_tensors(self._names)
        return {
            **({"of_rank": self._engine.ranks.rank()} if is_sharded and size > 1 else {}),
            "version": _VERSION,
            "num_ranks": size,
            "layout": self._layout(),
            **self._torchs_state_dict(),
            "main_params": {piece.name: self._copies.value_of(piece) for piece in self._pieces if piece.is_copied},
            "loss_scale": self._loss_scale.state_dict(),
            "num_steps": self._num_steps,
            "frozen": copy.deepcopy(self._frozen_states),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow_cast: bool = False) -> None:
        """Loads a state of this rank, and sets the 16-bit parameters that it updates from their copies in float32.

        Load the state of the model, too: the parameters that other ranks update come from there.

        Args:
            state: result of `state_dict`.
            allow_cast: True to round values where torch's optimizer needs another type; see `load_full_state_dict`.

        Raises:
            ArgumentError: the state is of another version, number of ranks or layout; the message has both values. Or
                it does not fit this optimizer, see `load_full_state_dict`.
        """
        own = {"version": _VERSION, "num_ranks": self._engine.ranks.size(), "layout": self._layout()}
        for key, value in own.items():
            if field_of(state, key, object) != value:
                msg = (
                    f"{WHERE}: {key} must be {value!r}, but is {state.get(key)!r}: full_state_dict() "
                    "gives a state for any number of ranks and any layout"
                )
                raise ArgumentError(msg)
        mains = field_of(state, "main_params", Mapping)
        inners = self._torchs_states_in(state)
        groups = [group for inner in inners for group in field_of(inner, "param_groups", list)]
        states = [field_of(inner, "state", Mapping) for inner in inners for _ in inner["param_groups"]]
        scale = field_of(state, "loss_scale", Mapping)
        numbers = [field_of(group, "params", list) for group in groups]
        if [len(group) for group in numbers] != self._group_sizes:
            msg = f"{WHERE}: parameter groups must have {self._group_sizes} tensors, but have {list(map(len, numbers))}"
            raise ArgumentError(msg)
        pieces = iter(self._pieces)
        members = [
            [(piece.name, found.get(key, {}), piece.main.shape) for key, piece in zip(group, pieces, strict=False)]
            for group, found in zip(numbers, states, strict=True)
        ]
        expected = self._expected_states(groups)
        self._check_loaded(groups, members, expected, allow_cast=allow_cast)
        given = {name: found for group in members for name, found, _ in group}
        for piece in self._pieces:
            if piece.is_copied:
                check_state(piece.name, {MAIN: mains.get(piece.name)}, _EXPECTED_MAIN, piece.main.shape)
        self._loss_scale.load_state_dict(scale)
        for member, inner in zip(self.optimizers, inners, strict=True):
            member.load_state_dict(copy.deepcopy(dict(inner)))  # torch would share the tensors
        for piece in self._pieces:
            loaded = self._torchs.state_of(piece.main)
            if loaded:
                self._torchs.set_state(piece.main, restored(piece, loaded, given[piece.name], expected[piece.name]))
        self._frozen_states = copy.deepcopy(dict(state.get("frozen", {})))
        self._num_steps = state.get("num_steps", 0)
        self._origins = dict.fromkeys(self._origins, f"that of a rank after {self._num_steps} steps")
        self._set_mains(mains)

    def full_state_dict(self) -> dict[str, Any]:
        """Collective over the ranks: returns the state of all ranks by parameter name, complete on every rank.

        The format is torch's, and can be loaded by `torch.load(weights_only=True)`; see `trackbed.optim.full_state`.
        """
        return self._full_state(assemble(self._gathered(self._parts()), self._params))

    def split_state_dict(self) -> tuple[dict[str, Any], list[Part]]:
        """Collective over the ranks: like `full_state_dict`, but each rank keeps its parts of the tensors to itself.

        Returns:
            State without the tensors that are divided among the ranks, the same on every rank. Under "divided" it has
            their types, by parameter name and key, such as `{"weight": {"exp_avg": "float32"}}`.
            This rank's parts of these tensors.

        Raises:
            CollectiveError: a rank has no state of its part of a parameter, and others have.
        """
        own = self._parts()
        found = self._gathered([part if part.span is None else part.without_elements() for part in own])
        check_covered(found, self._params)
        divided: dict[str, dict[str, str]] = {}
        for part in found:
            if part.span is not None:
                divided.setdefault(part.name, {})[part.key] = str(part.value.dtype).removeprefix("torch.")
        whole = assemble([part for part in found if part.span is None], self._params)
        return self._full_state(whole) | {"divided": divided}, [part for part in own if part.span is not None]

    def load_full_state_dict(self, state: Mapping[str, Any], *, allow_cast: bool = False) -> None:
        """Loads the complete state of an optimizer. Not collective.

        The state is the result of `full_state_dict`, or that of an optimizer of torch. Its parameters are named, or
        numbered as torch numbers them, in the order of the parameter groups. So the results of
        `torch.optim.AdamW.state_dict()` and of `ZeroRedundancyOptimizer.state_dict()` are loaded as they are, if their
        parameter groups had the parameters of this optimizer in the same order.

        Parameters of 16 bits are set from `main_param` where the state has it, and a dynamic loss scale from
        `loss_scale`. A parameter without a state begins anew, with a warning if others have one.

        Tensors keep their types, but for those of 16 bits beside copies in float32, which become float32. torch's own
        optimizers need the type of the parameter, or float32 beside a copy.

        Args:
            state: complete state, the same on every rank.
            allow_cast: True to round values where torch's optimizer needs another type; otherwise that is an error.

        Raises:
            ArgumentError: the state does not fit this optimizer: its parameter groups differ, an option or a tensor
                is missing or of another shape, or a value would change. The message names what differs, and nothing is
                loaded.
        """
        groups, states = self._checked_fields(by_name(state, self._group_names))
        scale = field_of(state, "loss_scale", Mapping) if "loss_scale" in state else None
        params = self._params
        expected = self._expected_states(groups)
        self._check_loaded(
            groups,
            [[(name, states.get(name, {}), params[name].shape) for name in names] for names in self._group_names],
            expected,
            allow_cast=allow_cast,
        )
        cuts = self._cut(states, expected)
        if scale is not None:
            self._loss_scale.load_state_dict(scale)
        for cut in cuts.values():
            cut.pop(MAIN, None)
        self._set_options(groups)
        self._set_states(cuts, states, field_of(state, OTHERS, Mapping) if OTHERS in state else {})
        self._set_origins("a full one", states)
        self._set_whole_mains(states)

    def spans(self) -> dict[str, tuple[int, int]]:
        """First element of each parameter that this rank updates, and the element after its last one."""
        return {piece.name: (piece.start, piece.stop) for piece in self._pieces}

    def load_split_state_dict(
        self, state: Mapping[str, Any], parts: Mapping[str, State], *, allow_cast: bool = False
    ) -> None:
        """Loads the result of `split_state_dict`, of any number of ranks. Not collective.

        Args:
            state: state without the tensors that are divided among the ranks, the same on every rank.
            parts: these tensors by parameter name and key, one-dimensional: the elements of `spans`, and all elements
                of a parameter that was frozen when the model was wrapped.
            allow_cast: True to round values where torch's optimizer needs another type; see `load_full_state_dict`.

        Raises:
            ArgumentError: the state does not fit this optimizer. The message names what differs, and nothing is loaded.
        """
        groups, whole = self._checked_fields(state)
        scale = field_of(state, "loss_scale", Mapping) if "loss_scale" in state else None
        params = self._params
        frozen = {
            name: {**whole.get(name, {}), **{key: value.view(params[name].shape) for key, value in found.items()}}
            for name, found in parts.items()
            if name not in self.spans()
        }
        cuts = {}
        for piece in self._pieces:
            own = {key: value.view(piece.main.shape) for key, value in parts.get(piece.name, {}).items()}
            cuts[piece.name] = cut_state(piece, whole.get(piece.name, {})) | own
        pieces = {piece.name: piece for piece in self._pieces}
        expected = self._expected_states(groups)
        self._check_loaded(
            groups,
            [
                [(name, cuts[name], pieces[name].main.shape) for name in names if name in pieces]
                for names in self._group_names
            ],
            expected,
            allow_cast=allow_cast,
        )
        if scale is not None:
            self._loss_scale.load_state_dict(scale)
        mains = {name: cut.pop(MAIN) for name, cut in cuts.items() if MAIN in cut}
        self._set_options(groups)
        self._set_states(
            {name: fitted(pieces[name], cut, expected[name]) for name, cut in cuts.items()},
            {**dict(whole), **frozen},
            field_of(state, OTHERS, Mapping) if OTHERS in state else {},
        )
        self._set_origins("a sharded one", whole)
        self._set_mains(mains)

    def _parts(self) -> list[Part]:
        """Values of the states of this rank's pieces."""
        self._torchs.check_tensors(self._names)
        return [
            part
            for piece in self._pieces
            for part in parts_of(piece, self._torchs.state_of(piece.main), self._copies.value_of(piece))
        ]

    def _gathered(self, parts: list[Part]) -> list[Part]:
        """Collective over the ranks: the parts of all ranks, where the optimizer is sharded."""
        engine = self._engine
        if not engine.config.use_distributed_optimizer:
            return parts
        experts = [part for part in parts if is_expert(self._params[part.name])]
        dense = [part for part in parts if not is_expert(self._params[part.name])]
        return [
            *gather_parts(dense, engine.dense_collectives, engine.waiter),
            *gather_parts(experts, engine.expert_collectives, engine.waiter),
        ]

    def _full_state(self, states: Mapping[str, State]) -> dict[str, Any]:
        """State with the options and the loss scale, in the order of the parameter groups."""
        groups = [
            {**{key: copy.deepcopy(value) for key, value in group.items() if key != "params"}, "params": list(names)}
            for group, names in zip(self._torchs.groups, self._group_names, strict=True)
        ]
        states = {**states, **copy.deepcopy(self._frozen_states)}
        ordered = {name: states[name] for names in self._group_names for name in names if name in states}
        scale = {"loss_scale": self._loss_scale.state_dict()} if self._loss_scale.is_dynamic else {}
        others = copy.deepcopy(self._torchs.other_states())
        more = {**({OTHERS: others} if others else {}), **({CLASSES: self._torchs.classes()} if self._is_list else {})}
        return {"state": ordered, "param_groups": groups, **scale, **more}

    @property
    def _is_list(self) -> bool:
        """True if there are several optimizers of torch."""
        return len(self.optimizers) > 1

    def _torchs_state_dict(self) -> dict[str, Any]:
        """States of this rank of the optimizers of torch."""
        if self._is_list:
            return {"optimizers": [one.state_dict() for one in self.optimizers], CLASSES: self._torchs.classes()}
        return {"optimizer": self.optimizer.state_dict()}

    def _torchs_states_in(self, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """States of the optimizers of torch in the result of `state_dict`."""
        if not self._is_list:
            return [field_of(state, "optimizer", Mapping)]
        self._check_classes(state)
        found: list[Mapping[str, Any]] = field_of(state, "optimizers", list)
        return found

    def _check_classes(self, state: Mapping[str, Any]) -> None:
        """Checks that a state with the classes of several optimizers has those of this one.

        Raises:
            ArgumentError: it has not.
        """
        if CLASSES not in state:
            return
        theirs, own = ([list(one) for one in classes] for classes in (state[CLASSES], self._torchs.classes()))
        if theirs != own:
            here, there = (
                ", ".join(f"{name} with {number_of(count, 'group')}" for name, count in found)
                for found in (own, theirs)
            )
            msg = f"{WHERE}: must be of {here}, but is of {there}"
            raise ArgumentError(msg)

    def _checked_fields(self, state: Mapping[str, Any]) -> tuple[list[State], Mapping[str, State]]:
        """Parameter groups and states of a state by name, which are those of this optimizer."""
        self._check_classes(state)
        state = with_module_names(state)
        groups, states = field_of(state, "param_groups", list), field_of(state, "state", Mapping)
        theirs = [list(field_of(group, "params", list)) for group in groups]
        if theirs != self._group_names:
            msg = f"{WHERE}: the parameter groups must be {brief(self._group_names)}, but are {brief(theirs)}"
            raise ArgumentError(msg)
        unknown = sorted(map(repr, set(states) - {name for names in self._group_names for name in names}))
        if unknown:
            msg = f"{WHERE}: must be of parameters of the model, but has {unknown[0]} too"
            raise ArgumentError(msg)
        return groups, states

    def _set_options(self, groups: list[State]) -> None:
        """Sets the options of the parameter groups."""
        for own, other in zip(self._torchs.groups, groups, strict=True):
            own.update({key: copy.deepcopy(value) for key, value in other.items() if key not in _NAMES})

    def _set_origins(self, kind: str, states: Mapping[str, State]) -> None:
        """Remembers which state was loaded: all ranks must have loaded the same."""
        for of_experts, names in self._names_of.items():
            own = {name: states[name] for group in names for name in group if name in states}
            self._origins[of_experts] = f"{kind} ({digest_of_state(own):08x})"

    def _expected_states(self, groups: Sequence[State]) -> dict[str, Mapping[str, torch.Tensor]]:
        """Result of `expected_state` for each parameter, with the options of the parameter groups of a state."""
        found: dict[str, Mapping[str, torch.Tensor]] = {}
        owned = zip(self._torchs.groups, self._torchs.group_owners, strict=True)
        for (own, owner), other, names in zip(owned, groups, self._group_names, strict=False):
            of_dims: dict[int, Mapping[str, torch.Tensor]] = {}
            for name in names:
                num_dims = self._params[name].dim()
                if num_dims not in of_dims:
                    of_dims[num_dims] = expected_state(owner, {**own, **other}, num_dims)
                found[name] = of_dims[num_dims]
        return found

    def _cut(self, states: Mapping[str, State], expected: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, State]:
        """State of each piece, as copies, from those of whole parameters."""
        return {
            piece.name: fitted(piece, cut_state(piece, states.get(piece.name, {})), expected[piece.name])
            for piece in self._pieces
        }

    def _check_loaded(
        self,
        groups: list[State],
        members: list[list[tuple[str, Any, torch.Size]]],
        expected: Mapping[str, Mapping[str, torch.Tensor]],
        *,
        allow_cast: bool,
    ) -> None:
        """Checks states that are about to be loaded.

        Args:
            groups: parameter groups of the state.
            members: name, state and shape of each parameter of each group.
            expected: result of `_expected_states`.
            allow_cast: True if values may be rounded.
        """
        owners = self._torchs.group_owners
        check_options([(own, owner.defaults) for own, owner in zip(self._torchs.groups, owners, strict=True)], groups)
        of_members = [(owner, member) for owner, group in zip(owners, members, strict=True) for member in group]
        for owner, (name, state, shape) in of_members:
            check_state(name, state, expected[name], shape)
            if MAIN in state:
                check_state(name, {MAIN: state[MAIN]}, _EXPECTED_MAIN, shape)
            if not allow_cast:
                check_types(name, state, expected[name], self._params[name], type(owner).__name__)
        warn_of_missing({name: state for group in members for name, state, _ in group if self._is_updated(name)})

    def _is_updated(self, name: str) -> bool:
        param = self._params[name]
        return param.requires_grad and param.numel() > 0

    def _set_states(self, cuts: Mapping[str, State], whole: Mapping[str, State], others: Mapping[Any, Any]) -> None:
        """Sets the states of the pieces, and keeps those of frozen parameters.

        Args:
            cuts: state of each piece.
            whole: state of each parameter.
            others: states under keys that are no parameters.
        """
        self._torchs.clear_states()
        self._torchs.set_other_states(others)
        for piece in self._pieces:
            if cuts[piece.name]:
                self._torchs.set_state(piece.main, cuts[piece.name])
        trained = set(self._engine.params)
        self._frozen_states = {
            name: copy.deepcopy(arranged_state(state, self._params[name]))
            for name, state in whole.items()
            if self._params[name] not in trained
        }
        self._torchs.convert_states()

    @torch.no_grad()
    def _set_mains(self, mains: Mapping[str, torch.Tensor]) -> None:
        self._engine.wait_for_params()
        for piece in self._pieces:
            if piece.is_copied and piece.name in mains:
                piece.main.copy_(mains[piece.name].reshape(piece.main.shape))
                piece.data.copy_(piece.main)

    @torch.no_grad()
    def _set_whole_mains(self, states: Mapping[str, State]) -> None:
        """Sets the parameters of 16 bits, also the parts of other ranks, and the copies that this rank has."""
        self._engine.wait_for_params()
        for name, state in states.items():
            if MAIN in state and is_low_precision(self._params[name]):
                self._params[name].copy_(state[MAIN])
        for piece in self._pieces:
            main = states.get(piece.name, {}).get(MAIN)
            if piece.is_copied and main is not None:
                piece.main.copy_(main.reshape(-1)[piece.start : piece.stop].reshape(piece.main.shape))

    def _agree_on_update(self) -> tuple[float, set[str]]:
        """Collective over the ranks: returns the norm of the gradients, and names of parameters without a gradient.

        The norm is that of the reduced gradients of the whole model, the same bits for every layout and number of
        ranks. Beside the numbers of which it is made, the ranks exchange digests of what they are about to do, and how
        many gradients they lack. Only if each lacks some, they also exchange which.
        """
        own = SquareSum.of(shared_gradients(self._engine)).numbers()
        norm, unused = math.nan, set[str]()
        for of_experts in (False, True) if self._engine.experts.buffers else (False,):
            texts = self._describe_update(of_experts=of_experts)
            lacking = self._engine.lacking_gradients(of_experts=of_experts)
            sums = own[:0] if of_experts else own
            collectives = self._engine.expert_collectives if of_experts else self._engine.dense_collectives
            numbers = np.concatenate([sums, [len(lacking)], digests_of(texts)])
            rows = self._engine.exchange(numbers, NORM, collectives)
            check_same(texts, rows[:, len(sums) + 1 :], partial(self._engine.gather_lines, of_experts=of_experts))
            params = self._engine.unused_params(lacking, rows[:, len(sums)], of_experts=of_experts)
            unused.update(self._names[param] for param in params)
            if not of_experts:
                norm = SquareSum.total(rows[:, : len(sums)]).norm()
        return norm, unused

    def _describe_update(self, *, of_experts: bool) -> dict[str, list[str]]:
        groups = self._names_of[of_experts]
        frozen = [name for names in groups for name in names if not self._params[name].requires_grad]
        more = {"max_norm": [repr(self._max_norm)], "the loss scale": [repr(self._loss_scale.value)]}
        return (
            describe_update(self.optimizers, groups, frozen)
            | {"the state that was loaded": [self._origins[of_experts]]}
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
        try:
            for piece in self._pieces:
                # As without a wrapper, a parameter that is frozen later, or has no gradient, stays as it is.
                is_updated = piece.param.requires_grad and piece.name not in unused
                piece.main.grad = _gradient_of(piece, factors) if is_updated else None
            self._engine.is_updating = True
            self._torchs.step()
        finally:
            self._engine.is_updating = False
            for piece in self._pieces:
                piece.main.grad = None
        for piece in self._pieces:
            if piece.is_copied:
                piece.data.copy_(piece.main)
        if self._engine.config.use_distributed_optimizer:
            self._engine.start_param_sync()

    def _check_groups(self) -> None:
        found = [len(group["params"]) for group in self._torchs.groups]
        if found != self._group_sizes:
            msg = (
                "optimizer: its parameter groups must stay as they are, but have "
                f"{found} tensors in place of {self._group_sizes}: add groups before DataParallelOptimizer is built"
            )
            raise ArgumentError(msg)
        self._check_fused()

    def _check_fused(self) -> None:
        """Checks that no fused kernel, which would write into gaps, updates a parameter that has some."""
        for piece in self._scattered:
            for group in self._torchs.groups:
                if group.get("fused") and any(piece.main is main for main in group["params"]):
                    msg = (
                        f"optimizer: {piece.name} must fill its memory for fused=True, but has the shape "
                        f"{list(piece.main.shape)} with the strides {list(piece.main.stride())}: leave fused out, or "
                        "give the model a parameter without gaps and overlaps, as clone() makes them"
                    )
                    raise ArgumentError(msg)

    def _layout(self) -> str:
        """Digest of the layout: which elements of which parameters this rank's pieces are."""
        rows = [(piece.name, piece.start, piece.stop, list(piece.param.shape)) for piece in self._pieces]
        return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


def _gradient_of(piece: Piece, factors: list[float]) -> torch.Tensor:
    """Gradient of a piece, in the type of its main parameter."""
    gradient = piece.gradient
    if gradient.dtype != piece.main.dtype:
        gradient = gradient.to(piece.main.dtype)
        if is_low_precision(piece.gradient):
            for factor in factors:
                gradient *= factor
    return arranged_like(gradient, piece.main) if piece.is_turned else gradient
