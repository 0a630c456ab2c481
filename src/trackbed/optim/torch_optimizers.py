"""The optimizers of torch of one model: one, or several that have some of the parameters each.

A sharded optimizer needs an elementwise update: that of an element depends on that element alone.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from trackbed.errors import ArgumentError
from trackbed.optim.state_parts import WHERE, State

Optimizer = torch.optim.Optimizer


class TorchOptimizers:
    """Optimizers of torch, each with parameter groups of its own, in one order.

    Args:
        optimizers: optimizers, at least one. No parameter is in two.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.members = tuple(optimizers)
        self._owners: dict[torch.Tensor, Optimizer] = {}
        self.note_tensors()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers, in their order. They are the same objects."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def group_owners(self) -> list[Optimizer]:
        """Optimizer of each of these groups."""
        return [member for member in self.members for _ in member.param_groups]

    def classes(self) -> list[list[Any]]:
        """Class and number of parameter groups of each optimizer."""
        return [[type(member).__qualname__, len(member.param_groups)] for member in self.members]

    def note_tensors(self) -> None:
        """Records the tensors in the parameter groups, after they were replaced."""
        self._owners = {
            tensor: member for member in self.members for group in member.param_groups for tensor in group["params"]
        }

    def states(self) -> dict[Any, Any]:
        """States of all optimizers, by tensor and by other keys."""
        return {key: state for member in self.members for key, state in member.state.items()}

    def state_of(self, tensor: torch.Tensor) -> State:
        """State of a tensor in the parameter groups; empty if there is none."""
        found: State = self._owners[tensor].state.get(tensor, {})
        return found

    def set_state(self, tensor: torch.Tensor, state: State) -> None:
        """Replaces the state of a tensor in the parameter groups."""
        self._owners[tensor].state[tensor] = state

    def clear_states(self) -> None:
        """Removes all states."""
        for member in self.members:
            member.state.clear()

    def check_tensors(self, names: Mapping[torch.Tensor, str]) -> None:
        """Checks that states are of the tensors in the parameter groups. Forgets empty ones, at which a program looked.

        Args:
            names: names of parameters, for the error.
        """
        for member in self.members:
            strays = [key for key in member.state if isinstance(key, torch.Tensor) and key not in self._owners]
            for key in strays:
                if member.state[key]:
                    name = names.get(key, f"a tensor of shape {list(key.shape)}")
                    raise ArgumentError(
                        f"{WHERE}: must be of the tensors in its parameter groups, but there is one of {name} itself: "
                        "the groups have parts or copies of parameters where the optimizer is sharded or updates copies"
                    )
                del member.state[key]

    def other_states(self) -> dict[Any, Any]:
        """States under keys that are no tensors; of several optimizers, by the number of the optimizer."""
        found = [
            {key: value for key, value in member.state.items() if not isinstance(key, torch.Tensor)}
            for member in self.members
        ]
        if len(found) == 1:
            return found[0]
        return {str(number): others for number, others in enumerate(found) if others}

    def set_other_states(self, others: Mapping[Any, Any]) -> None:
        """Sets the result of `other_states`, as copies."""
        for number, member in enumerate(self.members):
            own = others if len(self.members) == 1 else others.get(str(number), {})
            member.state.update(copy.deepcopy(dict(own)))

    def convert_states(self) -> None:
        """Does as the end of torch's own `load_state_dict`: converts states of earlier versions, and places steps."""
        for member in self.members:
            member.__setstate__({"state": member.state, "param_groups": member.param_groups})
            place_steps(member)

    @property
    def is_of_torch(self) -> bool:
        """True if all are optimizers that torch has."""
        return all(type(member).__module__.startswith("torch.optim.") for member in self.members)

    def own_gradients(self, buffers: Sequence[torch.Tensor]) -> None:
        """Gives states their own copies of gradients that an optimizer has kept: the next step writes others there."""
        shared = {buffer.untyped_storage().data_ptr() for buffer in buffers}
        for member in self.members:
            for state in member.state.values():
                if not isinstance(state, dict):
                    continue
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in shared:
                        state[key] = value.clone()

    def step(self) -> None:
        """Steps each optimizer."""
        for member in self.members:
            first = _first_of_fused_sgd(member)
            if not first:
                member.step()
                continue
            gradients = {tensor: tensor.grad for group in member.param_groups for tensor in group["params"]}
            for is_first in (False, True):
                for tensor, gradient in gradients.items():
                    tensor.grad = gradient if (tensor in first) == is_first else None
                member.step()


def _first_of_fused_sgd(optimizer: Optimizer) -> set[torch.Tensor]:
    """Tensors without a momentum, in parameter groups of a fused SGD of which others have one.

    torch's kernel takes all or none of a group. It fails where a parameter gets its first gradient later than others.
    """
    without_momentum: set[torch.Tensor] = set()
    if not isinstance(optimizer, torch.optim.SGD):
        return without_momentum
    for group in optimizer.param_groups:
        if group.get("fused") and group["momentum"]:
            tensors = [tensor for tensor in group["params"] if tensor.grad is not None]
            first = [one for one in tensors if optimizer.state.get(one, {}).get("momentum_buffer") is None]
            if 0 < len(first) < len(tensors):
                without_momentum.update(first)
    return without_momentum


def place_steps(optimizer: torch.optim.Optimizer) -> None:
    """Moves each `step` of a state that was loaded to where torch's optimizers make it.

    It lies on the device of the parameter, in float32, if the parameter group is fused or capturable: their kernels
    read it there. Otherwise it lies on the CPU, as reading it elsewhere would wait for the device in every step.
    """
    for group in optimizer.param_groups:
        is_read_by_kernels = bool(group.get("fused") or group.get("capturable"))
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            step = state.get("step")
            if not isinstance(step, torch.Tensor):
                continue
            if is_read_by_kernels:
                state["step"] = step.to(param.device, torch.float32)
            elif step.device.type != "cpu":
                state["step"] = step.cpu()


_ELEMENTWISE: Final = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Checks that an optimizer may update parts of parameters.

    Known are those of torch; another class, also one derived from them, says so with an attribute
    `is_elementwise = True`.
    """
    known = tuple(getattr(torch.optim, name) for name in _ELEMENTWISE if hasattr(torch.optim, name))
    if not getattr(optimizer, "is_elementwise", type(optimizer) in known):
        raise ArgumentError(
            "optimizer: its update must be elementwise to be sharded, which is not known of "
            f"{type(optimizer).__name__}: set is_elementwise = True on the class if it is, or "
            "use_distributed_optimizer=False"
        )
