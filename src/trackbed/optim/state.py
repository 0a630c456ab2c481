"""State of the optimizer of a wrapped model: taken whole or divided among the ranks, and loaded."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from trackbed.errors import ArgumentError
from trackbed.grads.engine import GradientEngine
from trackbed.grads.parameter_set import is_expert, name_in_module
from trackbed.optim.loss_scale import LossScale
from trackbed.optim.pieces import Copies, ParamPiece, is_low_precision
from trackbed.optim.state_check import (
    by_name,
    check_options,
    check_state,
    check_types,
    expected_state,
    field_of,
    fitted,
    from_numbered_pieces,
    is_of_one_rank,
    warn_of_missing,
    with_module_names,
)
from trackbed.optim.state_parts import (
    CLASSES,
    MAIN,
    OTHERS,
    WHERE,
    State,
    StatePart,
    arranged_state,
    assemble,
    check_covered,
    cut_state,
    gather_parts,
    parts_of,
)
from trackbed.optim.torch_optimizers import TorchOptimizers
from trackbed.optim.update_agreement import brief, digest_of_state
from trackbed.plural import number_of

_EXPECTED_MAIN: Final = {MAIN: torch.zeros(2, dtype=torch.float32, device="cpu")}
_NAMES: Final = ("params", "param_names")


class OptimizerState:
    """State of the optimizers of torch that update the pieces of a rank.

    Args:
        engine: engine of the model.
        torchs: optimizers of torch, whose parameter groups have the pieces already.
        pieces: pieces of this rank, in the order of the parameter groups.
        copies: copies in float32 of some pieces.
        loss_scale: factor of the loss.
        group_names: names of the parameters of each group of the whole model.
    """

    def __init__(
        self,
        engine: GradientEngine,
        torchs: TorchOptimizers,
        pieces: Sequence[ParamPiece],
        copies: Copies,
        loss_scale: LossScale,
        group_names: list[list[str]],
    ) -> None:
        self._engine = engine
        self._torchs = torchs
        self._pieces = list(pieces)
        self._copies = copies
        self._loss_scale = loss_scale
        self._group_names = group_names
        self._params = {name_in_module(name): param for name, param in engine.module.named_parameters()}
        self._names: dict[torch.Tensor, str] = {param: name for name, param in self._params.items()}
        self._frozen_states: dict[str, State] = {}
        """States of parameters that were frozen when the model was wrapped, for a program that trains them later."""
        self.origins = dict.fromkeys((False, True), "none")
        """Origin of the state that was loaded last: of the dense parameters (False), and of the experts' (True)."""

    def whole(self) -> dict[str, Any]:
        """Collective over the ranks where the optimizer is sharded: returns the complete state, by parameter name."""
        return self._described(assemble(self._gathered(self._parts()), self._params))

    def split(self) -> tuple[dict[str, Any], list[StatePart]]:
        """Collective over the ranks: see `DataParallelOptimizer.split_state_dict`."""
        own_parts = self._parts()
        gathered = self._gathered([part if part.span is None else part.without_elements() for part in own_parts])
        check_covered(gathered, self._params)
        divided: dict[str, dict[str, str]] = {}
        for part in gathered:
            if part.span is not None:
                divided.setdefault(part.name, {})[part.key] = str(part.value.dtype).removeprefix("torch.")
        whole = assemble([part for part in gathered if part.span is None], self._params)
        return self._described(whole) | {"divided": divided}, [part for part in own_parts if part.span is not None]

    def spans(self) -> dict[str, tuple[int, int]]:
        """First element of each parameter that this rank updates, and the element after its last one."""
        return {piece.name: (piece.start, piece.stop) for piece in self._pieces}

    def adopt(self, states: Mapping[str, State], others: Mapping[Any, Any]) -> None:
        """Divides the states that an optimizer of torch had before it was given pieces.

        Args:
            states: state of each parameter that has one.
            others: states under keys that are no parameters.
        """
        self._set_states(self._cut(states, self._expected_states(self._torchs.groups)), states, others)

    def load_whole(self, state: Mapping[str, Any], *, allow_cast: bool) -> None:
        """Loads a complete state: see `DataParallelOptimizer.load_state_dict`."""
        if is_of_one_rank(state):
            state = self._completed(state)
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

    def check_split(
        self, state: Mapping[str, Any], parts: Mapping[str, State], *, allow_cast: bool
    ) -> Callable[[], None]:
        """Checks the result of `split`: see `DataParallelOptimizer.check_split_state_dict`."""
        groups, whole = self._checked_fields(state)
        scale = field_of(state, "loss_scale", Mapping) if "loss_scale" in state else None
        params, pieces = self._params, {piece.name: piece for piece in self._pieces}
        frozen = {
            name: {**whole.get(name, {}), **{key: value.view(params[name].shape) for key, value in tensors.items()}}
            for name, tensors in parts.items()
            if name not in pieces
        }
        cuts = {}
        for piece in self._pieces:
            own = {key: value.view(piece.main.shape) for key, value in parts.get(piece.name, {}).items()}
            cuts[piece.name] = cut_state(piece, whole.get(piece.name, {})) | own
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
        others = field_of(state, OTHERS, Mapping) if OTHERS in state else {}
        if scale is not None:
            self._loss_scale.check_state_dict(scale)

        def load() -> None:
            if scale is not None:
                self._loss_scale.load_state_dict(scale)
            mains = {name: cut.pop(MAIN) for name, cut in cuts.items() if MAIN in cut}
            self._set_options(groups)
            self._set_states(
                {name: fitted(pieces[name], cut, expected[name]) for name, cut in cuts.items()},
                {**dict(whole), **frozen},
                others,
            )
            self._set_origins("a sharded one", whole)
            self._set_mains(mains)

        return load

    def _completed(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the state that one rank of an older Trackbed has saved in the format of `whole`."""
        if self._engine.config.use_distributed_optimizer or "of_rank" in state:
            raise ArgumentError(
                f"{WHERE}: must be that of all ranks, but is that of rank {state.get('of_rank', 0)} of "
                f"{state.get('num_ranks')} alone, as state_dict() of an older Trackbed returned it where the optimizer "
                "was sharded: load it with that version on as many ranks, and save sharded_state(model, optimizer) or "
                "full_state_dict() there"
            )
        updated = self.spans()
        return from_numbered_pieces(
            state, self._group_names, [[name for name in names if name in updated] for names in self._group_names]
        )

    def _parts(self) -> list[StatePart]:
        """Values of the states of this rank's pieces."""
        self._torchs.check_tensors(self._names)
        return [
            part
            for piece in self._pieces
            for part in parts_of(piece, self._torchs.state_of(piece.main), self._copies.value_of(piece))
        ]

    def _gathered(self, parts: list[StatePart]) -> list[StatePart]:
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

    def _described(self, states: Mapping[str, State]) -> dict[str, Any]:
        """State with the options and the loss scale, in the order of the parameter groups."""
        groups = [
            {**{key: copy.deepcopy(value) for key, value in group.items() if key != "params"}, "params": list(names)}
            for group, names in zip(self._torchs.groups, self._group_names, strict=True)
        ]
        states = {**states, **copy.deepcopy(self._frozen_states)}
        ordered = {name: states[name] for names in self._group_names for name in names if name in states}
        scale = {"loss_scale": self._loss_scale.state_dict()} if self._loss_scale.is_dynamic else {}
        others = copy.deepcopy(self._torchs.other_states())
        is_list = len(self._torchs.members) > 1
        more = {**({OTHERS: others} if others else {}), **({CLASSES: self._torchs.classes()} if is_list else {})}
        return {"state": ordered, "param_groups": groups, **scale, **more}

    def _checked_fields(self, state: Mapping[str, Any]) -> tuple[list[State], Mapping[str, State]]:
        """Parameter groups and states of a complete state, checked to be of this optimizer."""
        self._check_classes(state)
        state = with_module_names(state)
        groups, states = field_of(state, "param_groups", list), field_of(state, "state", Mapping)
        theirs = [list(field_of(group, "params", list)) for group in groups]
        if theirs != self._group_names:
            raise ArgumentError(
                f"{WHERE}: the parameter groups must be {brief(self._group_names)}, but are {brief(theirs)}"
            )
        unknown = sorted(map(repr, set(states) - {name for names in self._group_names for name in names}))
        if unknown:
            raise ArgumentError(f"{WHERE}: must be of parameters of the model, but has {unknown[0]} too")
        return groups, states

    def _check_classes(self, state: Mapping[str, Any]) -> None:
        """Checks that a state with the classes of several optimizers has the same classes as this optimizer."""
        if CLASSES not in state:
            return
        theirs, own = ([list(one) for one in classes] for classes in (state[CLASSES], self._torchs.classes()))
        if theirs != own:
            here, there = (
                ", ".join(f"{name} with {number_of(count, 'group')}" for name, count in classes)
                for classes in (own, theirs)
            )
            raise ArgumentError(f"{WHERE}: must be of {here}, but is of {there}")

    def _expected_states(self, groups: Sequence[State]) -> dict[str, Mapping[str, torch.Tensor]]:
        """Result of `expected_state` for each parameter, with the options of the parameter groups of a state."""
        expected: dict[str, Mapping[str, torch.Tensor]] = {}
        owned = zip(self._torchs.groups, self._torchs.group_owners, strict=True)
        for (own, owner), other, names in zip(owned, groups, self._group_names, strict=False):
            of_dims: dict[int, Mapping[str, torch.Tensor]] = {}
            for name in names:
                num_dims = self._params[name].dim()
                if num_dims not in of_dims:
                    of_dims[num_dims] = expected_state(owner, {**own, **other}, num_dims)
                expected[name] = of_dims[num_dims]
        return expected

    def _cut(self, states: Mapping[str, State], expected: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, State]:
        """State of each piece, as copies, from the states of whole parameters."""
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

    def _set_options(self, groups: list[State]) -> None:
        """Sets the options of the parameter groups."""
        for own, other in zip(self._torchs.groups, groups, strict=True):
            own.update({key: copy.deepcopy(value) for key, value in other.items() if key not in _NAMES})

    def _set_origins(self, kind: str, states: Mapping[str, State]) -> None:
        """Remembers which state was loaded: all ranks must have loaded the same."""
        for of_experts in self.origins:
            own = {
                name: states[name]
                for names in self._group_names
                for name in names
                if name in states and is_expert(self._params[name]) == of_experts
            }
            self.origins[of_experts] = f"{kind} ({digest_of_state(own):08x})"

    def _set_states(self, cuts: Mapping[str, State], whole: Mapping[str, State], others: Mapping[Any, Any]) -> None:
        """Sets the states of the pieces, and keeps the states of frozen parameters.

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
