"""Reduction at the end of each backward pass, as in torch's `DistributedDataParallel`: `param.grad` is the gradient."""

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from trackbed.errors import GradientError
from trackbed.grads.collectives.protocol import MAX_NUMBERS, USED, Label

Parameter = torch.nn.Parameter
Exchanger = Callable[[npt.NDArray[np.int64], Label], npt.NDArray[np.int64]]

_BITS: Final = 63
"""Parameters that one number of an exchange stands for."""


@dataclasses.dataclass(slots=True)
class PassState:
    """State of the step and of the backward pass that is running, which the hooks of all parameters share.

    torch keeps hooks where Python's garbage collector does not look, so nothing here refers to a parameter.
    """

    is_on: bool
    """True while gradients are reduced automatically. Otherwise they are added to `main_grad`, and reduced when the
    program or its optimizer asks for it."""
    reduces: bool = True
    """False inside `no_sync`."""
    is_queued: bool = False
    """True if autograd is to call `end` at the end of the pass."""
    has_arrived: bool = False
    """True if a gradient has arrived in this pass."""
    has_unreduced: bool = False
    """True if gradients have arrived inside `no_sync` since the last reduction."""
    has_graph: bool = False
    """True if a gradient of this pass has a graph, because of `create_graph=True`."""
    is_touched: bool = False
    """True if the model has run since gradients were set to zero, or gradients that bucket groups do not count may have
    arrived."""
    is_used: bool = False
    """True from an optimizer's step until gradients are set to zero. Gradients that arrive in between, as a loss of
    another model brings them, are dropped."""
    forces_all_reduce: bool = False
    """True to reduce by all-reduces even where the optimizer is sharded."""
    has_failed: bool = False
    """True if a backward pass has failed, and its state is to be forgotten before the next one."""
    end: Callable[[], None] = lambda: None
    forget: Callable[[], None] = lambda: None

    def queue(self) -> None:
        """Has autograd call `end` at the end of the backward pass that is running."""
        if not self.is_queued:
            if self.has_failed:
                self.forget()
            torch.autograd.Variable._execution_engine.queue_callback(_End(self))
            self.is_queued = True


class _End:
    """Callback of autograd for the end of a backward pass; autograd drops it without a call if the pass fails."""

    def __init__(self, state: PassState) -> None:
        self._state = state
        self._is_called = False

    def __call__(self) -> None:
        self._is_called = True
        self._state.end()

    def __del__(self) -> None:
        if not self._is_called:
            self._state.is_queued, self._state.has_failed = False, True


def adopt(param: Parameter, main_grad: torch.Tensor, state: PassState) -> None:
    """Moves the gradient of a parameter into its view of the buffer, which becomes its `grad`.

    Args:
        param: parameter with a gradient that autograd or the program has made.
        main_grad: view of the buffer.
        state: state of the pass.
    """
    gradient = param.grad
    if gradient is None or gradient is main_grad:
        return
    with torch.no_grad():
        if gradient.is_sparse:
            main_grad.zero_().add_(gradient.detach())
        else:
            main_grad.copy_(gradient.detach())
    if gradient.requires_grad:
        state.has_graph = True  # the view cannot have it
    else:
        param.grad = main_grad


def check_not_fused(param: Parameter) -> None:
    """Checks that no kernel has added a gradient to `main_grad`, which is the gradient of the pass alone."""
    if param.grad_added_to_main_grad:  # type: ignore[attr-defined]
        raise GradientError(
            "gradients must arrive in grad, but a kernel has added one to main_grad (grad_added_to_main_grad): call "
            "zero_grad_buffer() before each step's first backward pass, or use trackbed.DataParallelOptimizer"
        )


class AutomaticReduction:
    """Reduces the gradients of a wrapper at the end of each backward pass.

    Args:
        params: parameters that require a gradient, each with `main_grad` in its own type.
        state: state that the hooks share.
        pending: returns the parameters of the buckets that have not been issued in this pass.
        reduce: issues these buckets, given the parameters of theirs that have no gradient.
        finish: waits until all are reduced.
        restart: prepares the next pass, also after one that has failed.
        check: raises if a parameter of the model is not the one that was wrapped.
        exchange: sends numbers of this rank to all ranks; None if a missing gradient is an error.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        state: PassState,
        *,
        pending: Callable[[], Collection[Parameter]],
        reduce: Callable[[list[Parameter]], None],
        finish: Callable[[], None],
        restart: Callable[[], None],
        check: Callable[[], None],
        exchange: Exchanger | None,
    ) -> None:
        self._params = list(params)
        self.state = state
        self._pending = pending
        self._reduce = reduce
        self._finish = finish
        self._restart = restart
        self._check = check
        self._exchange = exchange
        itself = weakref.ref(self)

        def end() -> None:
            reduction = itself()
            if reduction is not None:
                reduction.end_pass()

        def forget() -> None:
            reduction = itself()
            if reduction is not None:
                reduction.forget_pass()

        state.end, state.forget = end, forget

    def watch(self, outputs: Any) -> None:
        """Has the backward pass of some outputs of the model reduce the gradients at its end.

        The hooks of parameters cannot do so where parts of the model are run again inside the backward pass: what they
        queue is called at the end of a part.
        """
        for output in _tensors_of(outputs):
            # Hooks of a leaf, such as a parameter of the model, would stay and add up. It has a hook of its own.
            if output.requires_grad and not output.is_leaf:
                output.register_hook(_queue_hook(self.state))  # type: ignore[no-untyped-call]

    def forget_failed_pass(self) -> None:
        """Forgets a backward pass that has failed, so that the next one is reduced. Called before a forward pass."""
        state = self.state
        is_left = state.is_queued or state.has_failed
        if is_left and torch._C._current_graph_task_id() == -1:
            self.forget_pass()

    def forget_pass(self) -> None:
        """Forgets a backward pass that has failed."""
        state = self.state
        state.is_queued = state.has_arrived = state.has_failed = False
        self._restart()

    def reduce_rest(self) -> None:
        """Collective over the ranks: reduces gradients that have arrived inside `no_sync` only, if there are any."""
        if self.state.has_unreduced:
            self._reduce_pass()

    def leave(self) -> tuple[bool, list[Parameter]]:
        """Ends automatic reduction: gradients stay in the buffers alone.

        Returns:
            True if there are gradients, and all are reduced; and the parameters that have one.
        """
        self.state.is_on = False
        with_gradient = [param for param in self._params if param.grad is not None]
        for param in self._params:
            main_grad: torch.Tensor = param.main_grad  # type: ignore[attr-defined]
            if param.grad is None:
                main_grad.zero_()
            adopt(param, main_grad, self.state)
            param.grad = None
        return bool(with_gradient) and not self.state.has_unreduced, with_gradient

    def end_pass(self) -> None:
        """Reduces the gradients of the pass that has ended. Called by autograd, on every rank."""
        state = self.state
        state.is_queued = False
        # A parameter in the place of a wrapped one, or one that was frozen then, would be trained on each rank alone.
        self._check()
        if state.has_arrived:  # not where the program has asked for gradients of other tensors only
            self._reduce_pass()

    @torch.no_grad()
    def _reduce_pass(self) -> None:
        state = self.state
        state.has_arrived = state.has_unreduced = False
        try:
            missing = self._fill()
            self._reduce([self._params[number] for number in missing])
            used = self._used_elsewhere(missing)
            self._finish()
        finally:
            self._restart()
        for number in used:
            param = self._params[number]
            param.grad = param.main_grad  # type: ignore[attr-defined]
        if state.has_graph:
            state.has_graph = False
            for param in self._params:
                gradient = param.grad
                if gradient is not None and gradient.requires_grad:
                    param.grad = _with_graph(param.main_grad, gradient)  # type: ignore[attr-defined]

    def _fill(self) -> list[int]:
        """Completes the buckets that have not been issued.

        Returns:
            Numbers of the parameters without a gradient, which is zero in the buffer.
        """
        missing = []
        pending = self._pending()
        for number, param in enumerate(self._params if pending else ()):
            main_grad: torch.Tensor = param.main_grad  # type: ignore[attr-defined]
            gradient = param.grad
            if gradient is main_grad or param not in pending:
                continue
            check_not_fused(param)
            if gradient is None:
                missing.append(number)
                main_grad.zero_()
            else:
                adopt(param, main_grad, self.state)
        return missing

    def _used_elsewhere(self, missing: list[int]) -> list[int]:
        """Collective over the ranks: parameters that lack a gradient on this rank and have one on another."""
        if self._exchange is None:
            return []
        counts = self._exchange(np.array([len(missing)]), USED)[:, 0]
        unused = set(lacked_by_all(missing, counts, len(self._params), self._exchange))
        return [number for number in missing if number not in unused]


def _queue_hook(state: PassState) -> Callable[[torch.Tensor], None]:
    def queue(gradient: torch.Tensor) -> None:
        if state.is_on and state.reduces:
            state.queue()

    return queue


@torch.enable_grad()
def _with_graph(reduced: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The values of one tensor with the graph of another."""
    return reduced.detach().clone() + (gradient - gradient.detach())


def _tensors_of(outputs: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in what a model returns."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for below in outputs.values():
            yield from _tensors_of(below)
    elif isinstance(outputs, list | tuple):
        for below in outputs:
            yield from _tensors_of(below)
    elif dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        for field in dataclasses.fields(outputs):
            yield from _tensors_of(getattr(outputs, field.name, None))


def lacked_by_all(
    lacking: Sequence[int], counts: npt.NDArray[np.int64], num_params: int, exchange: Exchanger
) -> list[int]:
    """Collective over the ranks if each of them lacks a gradient: returns the parameters that all of them lack.

    Args:
        lacking: numbers of the parameters without a gradient on this rank, each in `[0, num_params)`.
        counts: `[ranks]` how many each rank lacks, the same on every rank.
        num_params: number of parameters, the same on every rank.
        exchange: sends numbers of this rank to all ranks.
    """
    if not counts.all():
        return []
    flags = np.zeros((-(-num_params // _BITS), _BITS), dtype=np.int64)
    flags.reshape(-1)[lacking] = 1
    words = flags @ (np.int64(1) << np.arange(_BITS, dtype=np.int64))
    rows = [exchange(words[start : start + MAX_NUMBERS], USED) for start in range(0, len(words), MAX_NUMBERS)]
    everywhere = np.bitwise_and.reduce(np.concatenate(rows, axis=1), axis=0)
    return [number for number in lacking if everywhere[number // _BITS] >> (number % _BITS) & 1]
