"""Wrapper that averages the gradients of a model over data-parallel ranks."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec

import numpy as np
import torch

from trackbed.comm import Group
from trackbed.errors import ArgumentError
from trackbed.grads.collectives.protocol import AGREED, TOKENS
from trackbed.grads.config import DistributedDataParallelConfig
from trackbed.grads.engine import GradientEngine
from trackbed.grads.model_agreement import ProcessGroups
from trackbed.grads.timeline import BucketObserver
from trackbed.losses import Batches, StepCounts, exchange_counts

P = ParamSpec("P")

_MOST_POSITIONAL: Final = 2
"""The model and the configuration."""


def _refuses_megatrons_form(
    init: Callable[Concatenate["DistributedDataParallel", P], None],
) -> Callable[Concatenate["DistributedDataParallel", P], None]:
    """Decorates the constructor so that Megatron Core's arguments are an error that names the class which takes them.

    Other wrong arguments are Python's own TypeErrors.
    """

    @wraps(init)
    def call(self: "DistributedDataParallel", /, *arguments: P.args, **options: P.kwargs) -> None:
        has_both_configs = options.get("ddp_config") is not None and (
            options.get("config") is not None or len(arguments) >= _MOST_POSITIONAL
        )
        has_module_later = bool(arguments) and "module" in options
        if len(arguments) > _MOST_POSITIONAL or has_both_configs or has_module_later or "pg_collection" in options:
            raise ArgumentError(
                "DistributedDataParallel: takes a module and its config, and arguments of its own by name, found "
                "Megatron Core's (config, ddp_config, module): use trackbed.megatron.DistributedDataParallel, which "
                "takes them"
            )
        init(self, *arguments, **options)

    return call


class DistributedDataParallel(torch.nn.Module):
    """Wraps a model so that its gradients are averaged over data-parallel ranks, in contiguous buffers.

    `model = DistributedDataParallel(module, DistributedDataParallelConfig(overlap_grad_reduce=True))`. A class with
    Megatron Core's arguments and methods is `trackbed.megatron.DistributedDataParallel`.

    Each parameter that requires a gradient gets an attribute `main_grad`, which is a view of a buffer. Backward passes
    add their gradients to it. The buffers are cut into buckets, which are reduced during the last backward pass
    (`overlap_grad_reduce`) or in `finish_grad_sync()`. With `use_distributed_optimizer` each rank receives one shard of
    the reduced gradients, and updates the same shard of the parameters. The updated parameters are gathered on all
    ranks in the optimizer's step or during the next forward pass.

    A training step is `optimizer.zero_grad()`, backward passes, all but the last in `no_sync()`, and `optimizer.step()`
    of a `DataParallelOptimizer`. With an optimizer of your own it is `zero_grad_buffer()`, backward passes,
    `finish_grad_sync()`, and an update from `main_grad`. Optimizers of torch step as with torch's own wrapper, where
    gradients are whole and of the type of their parameters.

    The constructor is collective over the ranks. It checks that all ranks have the same names, shapes and types of
    parameters and buffers, and the same options, and gives all ranks the values of rank 0.

    Args:
        module: model, with its parameters on one device.
        config: options, which are copied; None for `DistributedDataParallelConfig()`.
        ddp_config: another name of `config`.
        disable_bucketing: True for one bucket.
        process_group: process group of torch, or `trackbed.comm.Group`, of the data-parallel ranks; None for all ranks
            of `torch.distributed`, or for this process if it is the only one.
        expert_process_group: ranks with the same experts, that is, those parameters whose attribute `allreduce` is
            False; None for `process_group`.
        allow_unused: True to allow missing gradients, which count as zeros where another rank has one; otherwise they
            are an error with `overlap_grad_reduce`. A `DataParallelOptimizer` leaves a parameter alone for which no
            rank has one.
        observer: receives the events of buckets, such as `Timeline()`.
        broadcast: False to compare the values of all ranks, by digests, instead of copying those of rank 0. Of experts,
            the ranks of `expert_process_group` have the same.

    Attributes:
        module: the model.
        ddp_config: its options.
        dp_group: data-parallel ranks, with `rank()` and `size()`.
        engine: what the optimizer calls.

    Raises:
        ArgumentError: an option contradicts another, or a parameter cannot lie in a buffer.
        CollectiveError: a rank failed, or ranks differ; the message names the rank, and the first parameter or option.
    """

    @_refuses_megatrons_form
    def __init__(
        self,
        module: torch.nn.Module,
        config: DistributedDataParallelConfig | None = None,
        *,
        ddp_config: DistributedDataParallelConfig | None = None,
        disable_bucketing: bool = False,
        process_group: torch.distributed.ProcessGroup | Group | None = None,
        expert_process_group: torch.distributed.ProcessGroup | Group | None = None,
        allow_unused: bool = False,
        observer: BucketObserver | None = None,
        broadcast: bool = True,
    ) -> None:
        """Wraps a model; the class describes the arguments."""
        super().__init__()
        self._set_engine(
            GradientEngine(
                module,
                next((given for given in (config, ddp_config) if given is not None), DistributedDataParallelConfig()),
                ProcessGroups.of(process_group, expert_process_group),
                disable_bucketing=disable_bucketing,
                allow_unused=allow_unused,
                observer=observer,
                broadcast=broadcast,
            )
        )

    def _set_engine(self, engine: GradientEngine) -> None:
        """Sets the attributes of a wrapper whose base class is initialised."""
        self.engine = engine
        self.module = engine.module
        self.ddp_config = engine.config
        self.dp_group = engine.ranks

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the model.

        Raises:
            GradientError: the model was wrapped again.
        """
        automatic = self.engine.begin_forward()
        outputs = self.module(*inputs, **kwargs)
        if automatic is not None:
            automatic.watch(outputs)
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Adds up gradients in the block, and reduces no bucket. Blocks may be nested."""
        with self.engine.no_sync():
            yield

    @contextlib.contextmanager
    def guarded(self, *, abort_on_failure: bool = True) -> Iterator[None]:
        """Collective over the ranks: runs a training loop, in which a failure of one rank is raised on every rank.

        A rank that waits for a bucket notices that another rank has failed, and raises an error with the number and the
        message of that rank. An exception that is caught inside the block is not a failure; the next step is then
        either correct or refused. After a failure all further steps are refused. All ranks must take the same number of
        steps in the block.

        Operations of NCCL that wait for a rank that has failed never end, and a thread that waits for the GPU, as in
        `loss.item()`, waits for ever. So they are ended a second after the failure, if they have not ended by then.
        The process group is of no more use after that; what needs no other rank, such as `torch.save`, still works.

        Args:
            abort_on_failure: False to leave operations on GPUs and their process group as they are.

        Raises:
            CollectiveError: a rank failed, or gave no sign of life for the timeout of the process group.
        """
        with self.engine.guarded("training", "a failure has ended guarded()", is_aborted=abort_on_failure):
            yield
            self.engine.leave()

    def finish_grad_sync(self) -> None:
        """Collective over the ranks: waits until all gradients are reduced, which begins here if it has not yet.

        Raises:
            GradientError: a gradient is missing with `overlap_grad_reduce` and without `allow_unused`, was changed
                while it was being reduced, or is NaN or infinite and that is checked; or `zero_grad_buffer()` was not
                called since the last time.
            CollectiveError: another rank failed.
        """
        self.engine.finish_gradients()

    def zero_grad_buffer(self) -> None:
        """Sets all gradients to zero, after reductions that are still running have ended."""
        self.engine.zero_gradients()

    def agree(self, flag: bool) -> bool:  # noqa: FBT001  the one thing that is agreed on
        """Collective over the ranks: returns True on every rank if `flag` is true on any of them.

        For what ranks see at different steps, such as a signal to stop: one that saves while another one trains would
        wait for it. One exchange, in each step in which it is called.

        Args:
            flag: what this rank has seen.

        Raises:
            CollectiveError: another rank failed, or is at another operation.
        """
        return bool(self.engine.exchange(np.array([bool(flag)], dtype=np.int64), AGREED).any())

    def step_counts(self, batches: Batches, *, context_size: int = 1) -> StepCounts:
        """Collective over the ranks: counts the trained labels and the documents of a training step.

        For `trackbed.losses.token_mean` and `document_mean`. One exchange. Either every rank returns or every rank
        raises.

        Args:
            batches: micro-batches of this rank in the step, packs with their counts; may be empty.
            context_size: ranks that share each sample, whose batches have the counts of the whole sample.

        Raises:
            ArgumentError: this rank has something else than batches with counts, or `context_size` does not divide the
                number of ranks, or their sums; or the ranks have several optimizers.
            CollectiveError: another rank failed, or is at another operation.
        """
        engine = self.engine
        if engine.dense_collectives.size() != engine.ranks.size():
            raise ArgumentError(
                "step_counts: num_distributed_optimizer_instances must be 1, found several; use "
                "trackbed.losses.step_counts with the process group of all data-parallel ranks"
            )
        return exchange_counts(
            batches,
            lambda own: engine.exchange(own, TOKENS),
            num_ranks=engine.num_averaged_ranks(),
            context_size=context_size,
        )

    def wait_for_params(self) -> None:
        """Waits for parameters that are being gathered."""
        self.engine.wait_for_params()

    def broadcast_params(self) -> None:
        """Collective over the ranks: replaces all parameters by those of the first rank.

        Raises:
            CollectiveError: a rank failed.
        """
        self.engine.broadcast_params()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state of the model, with the names of the model. Waits for parameters that are being gathered."""
        self.wait_for_params()
        state = self.module.state_dict(*args, **kwargs)
        add_metadata_of_module(state, kwargs.get("prefix", ""))
        return state

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,  # noqa: FBT001, FBT002  torch's signature
        assign: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """Copies a state with the names of the model into the parameters.

        Raises:
            ArgumentError: `assign` would replace the parameters, which have to stay in the buffers.
        """
        _check_not_assigned(is_assigned=assign)
        self.wait_for_params()
        return self.module.load_state_dict(state_dict, strict=strict)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Mapping[str, Any], *others: Any
    ) -> None:
        """Loads a part of the state of a module around the wrapper, in which names are those of `state_dict`."""
        _check_not_assigned(is_assigned=bool(local_metadata.get("assign_to_params_buffers")))
        self.wait_for_params()
        restore_names(state_dict, prefix, self.module.state_dict().keys())
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be copied or pickled: process groups and memory of other ranks cannot be.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(
            "DistributedDataParallel must not be copied or pickled, because other ranks take part in it: copy or save "
            "its module, or the state_dict() of that"
        )


def _check_not_assigned(*, is_assigned: bool) -> None:
    if is_assigned:
        raise ArgumentError("assign must be False, because parameters have to stay in the buffers, but is True")


def restore_names(state: dict[str, Any], prefix: str, names: Collection[str]) -> None:
    """Puts `module.` before the names of a wrapped model, under which torch looks for them.

    Names that have it already, as in a state of torch's wrapper, stay.

    Args:
        state: state of a module around the wrapper, which is changed.
        prefix: name of the wrapper in that module, with a dot.
        names: names in the state of the model.

    >>> state = {"net.weight": 1, "net.module.bias": 2, "head.weight": 3}
    >>> restore_names(state, "net.", {"weight", "bias"})
    >>> state
    {'head.weight': 3, 'net.module.weight': 1, 'net.module.bias': 2}
    """
    own = [key for key in state if key.startswith(prefix)]
    values = {key.removeprefix(prefix): state.pop(key) for key in own}
    # A model may have a part of its own that is called `module`.
    has_prefix = not set(names).issuperset(values) and all(
        name.startswith("module.") and name.removeprefix("module.") in names for name in values
    )
    for name, value in values.items():
        is_inner = not has_prefix and (name in names or not name.startswith("module."))
        state[f"{prefix}module.{name}" if is_inner else prefix + name] = value


def add_metadata_of_module(state: Any, prefix: str) -> None:
    """Adds the versions of a wrapped model's modules under the names that they have in a module around the wrapper.

    Args:
        state: state of that module, whose `_metadata` is changed.
        prefix: name of the wrapper in it, with a dot; nothing is added if it is empty.
    """
    metadata = getattr(state, "_metadata", None)
    if not prefix or metadata is None:
        return
    name = prefix.removesuffix(".")
    for key in [key for key in metadata if key == name or key.startswith(prefix)]:
        metadata.setdefault(f"{prefix}module{key.removeprefix(name)}", metadata[key])
