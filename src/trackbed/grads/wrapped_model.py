"""A model whose parameters lie in buffers, the same on all ranks."""

import secrets
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trackbed.errors import ArgumentError
from trackbed.grads.bucket_group import _ParamAndGradBucketGroup
from trackbed.grads.buffer import _ParamAndGradBuffer, turned_like
from trackbed.grads.collectives import Collectives
from trackbed.grads.config import DistributedDataParallelConfig, ReductionOptions, check_options, with_bucket_size
from trackbed.grads.failure_aware_wait import Waiter
from trackbed.grads.model_agreement import (
    ProcessGroups,
    agree,
    broadcast_values,
    compare_values,
    connect,
    describe_buffers,
    describe_frozen,
    describe_options,
    describe_orders,
    is_dense,
    messages_of,
    values_of,
)
from trackbed.grads.parameter_set import (
    Owner,
    ParameterSet,
    ScalingFactors,
    averaging_factors,
    check_supported,
    check_unclaimed,
    claim,
    drop_gradients,
    is_expert,
)


class WrappedModel(Owner):
    """A model whose trained parameters have their gradients in buffers, laid out and begun alike on all ranks.

    The constructor is collective over the ranks: see `DistributedDataParallel`, which has the same arguments. A class
    for programs with other rules overrides some of its steps.

    Args:
        module: model.
        config: options.
        groups: ranks of the dense parameters, and of the experts' parameters.
        disable_bucketing: True for one bucket.
        allow_unused: True to allow missing gradients.
        broadcast: True to copy the values of rank 0, False to compare those of all ranks.
    """

    def __init__(
        self,
        module: object,
        config: ReductionOptions,
        groups: ProcessGroups,
        *,
        disable_bucketing: bool,
        allow_unused: bool,
        broadcast: bool,
    ) -> None:
        self.ranks, self.expert_ranks = groups.dense, groups.experts
        self.rank: int = self.ranks.rank()
        self.allow_unused = allow_unused
        self._broadcasts = broadcast
        self.messages = self.expert_messages = messages_of(self.ranks)
        self.waiter = Waiter(self.messages)
        self.expert_groups = [0] * self.ranks.size()
        """Label of the ranks with the same experts as each rank."""
        with self.messages.guarded("DistributedDataParallel"):
            self._check_config(config)
            self.module = _checked_module(module)
            self.config = self._with_bucket_size(config)
            self.is_one_bucket = self._has_one_bucket(disable_bucketing=disable_bucketing)
            self._build_parts(is_one_group=disable_bucketing)
            self._agree_and_connect()
            self._make_same()

    @property
    def dense_collectives(self) -> Collectives:
        """Collectives of the dense parameters: all but the experts'."""
        return self.dense.collectives

    @property
    def expert_collectives(self) -> Collectives:
        """Collectives of the parameters of experts."""
        return self.experts.collectives

    def groups(self) -> list[_ParamAndGradBucketGroup]:
        """All bucket groups: of dense parameters, then of experts."""
        return self.dense.groups + self.experts.groups

    def buffers(self) -> list[_ParamAndGradBuffer]:
        """All buffers: of dense parameters, then of experts."""
        return self.dense.buffers + self.experts.buffers

    def _check_config(self, config: ReductionOptions) -> None:
        if not isinstance(config, DistributedDataParallelConfig):
            kind = type(config)
            raise ArgumentError(
                "config must be a trackbed.DistributedDataParallelConfig, but is of "
                f"{kind.__module__}.{kind.__qualname__}; Megatron Core's is that of trackbed.megatron"
            )
        check_options(config)

    def _with_bucket_size(self, config: ReductionOptions) -> ReductionOptions:
        """Copy of the options with the bucket size that applies."""
        return with_bucket_size(config, self.ranks.size())

    def _has_one_bucket(self, *, disable_bucketing: bool) -> bool:
        return disable_bucketing

    def _scaling_factors(self) -> ScalingFactors:
        """Factors by which gradients are multiplied before they are reduced."""
        return averaging_factors(
            num_ranks=self.ranks.size(),
            num_expert_ranks=self.expert_ranks.size(),
            average_in_collective=self.config.average_in_collective,
        )

    def num_averaged_ranks(self) -> int:
        """Number of ranks over which gradients are averaged; 1 if they are summed."""
        is_summed = self._scaling_factors().dense == 1.0 and not self.config.average_in_collective
        return 1 if is_summed else self.ranks.size()

    def _shards(self) -> tuple[Any, Any]:
        """Process groups over which buffers are divided: for dense parameters, and for the experts'."""
        return self.ranks, self.expert_ranks

    def _build_parts(self, *, is_one_group: bool) -> None:
        """Moves the parameters to buffers."""
        named = [(name, param) for name, param in self.module.named_parameters() if param.requires_grad]
        check_supported(named)
        is_sharded = self.config.use_distributed_optimizer
        apart = [(name, param) for name, param in named if is_sharded or param.itemsize < torch.float32.itemsize]
        separate = {param for _, param in apart}
        others = [(name, param) for name, param in self.module.named_parameters() if param not in separate]
        check_separate(apart, [*others, *self.module.named_buffers()])
        names = {param: name for name, param in named}
        self.params = [param for _, param in named]
        check_unclaimed(named, self.module.parameters())
        claim(self.params, self)
        for param in self.params:
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        drop_gradients(self.params)
        factors, (dense_shards, expert_shards) = self._scaling_factors(), self._shards()
        self.dense, self.experts = (
            ParameterSet.allocate(
                [param for param in self.params if is_expert(param) == wants_experts],
                names,
                self.config,
                ranks,
                factor=factor,
                bucket_size=None if self.is_one_bucket else self.config.bucket_size,
                is_one_group=is_one_group,
            )
            for wants_experts, ranks, factor in (
                (False, dense_shards, factors.dense),
                (True, expert_shards, factors.expert),
            )
        )
        self.group_of = {param: group for group in self.groups() for param in group.params}

    def _described_options(self) -> dict[str, bool]:
        """Arguments that must be the same on all ranks, beside the options and `allow_unused`."""
        return {"broadcast": self._broadcasts, "one bucket": self.is_one_bucket}

    def _described_values(self, *, of_experts: bool) -> list[str]:
        """One line for each value that is no parameter and must be there on all ranks."""
        return values_of(self.module, of_experts=of_experts).describe_buffers()

    def _takes_orders(self) -> bool:
        """True if gradients take the memory order of their parameters, where all ranks have the same order."""
        return not self.config.use_distributed_optimizer

    def _agree_and_connect(self) -> None:
        """Checks that the ranks have the same model and options, and chooses their collectives."""
        if self.expert_ranks is not self.ranks:
            self.expert_messages = messages_of(self.expert_ranks)
        named = list(self.module.named_parameters())
        dense = describe_buffers(self.dense.buffers) + describe_frozen((n, p) for n, p in named if not is_expert(p))
        of_experts = describe_buffers(self.experts.buffers)
        of_experts += describe_frozen((n, p) for n, p in named if is_expert(p))
        dense += self._described_values(of_experts=False)
        of_experts += self._described_values(of_experts=True)
        options = describe_options(self.config, allow_unused=self.allow_unused, **self._described_options())
        takes_orders = self._takes_orders()
        must_have_same_orders = takes_orders and self._has_gradients_of_torch()  # autograd decides them there
        for lines, wants_experts, messages in (
            (options + dense, False, self.messages),
            (of_experts, True, self.expert_messages),
        ):
            params = [(n, p) for n, p in named if takes_orders and p.requires_grad and is_expert(p) == wants_experts]
            orders = describe_orders(params)
            checked, compared = (lines + orders, []) if must_have_same_orders else (lines, orders)
            if agree(messages, checked, may_differ=compared):
                for _, param in params:
                    param.main_grad = turned_like(param, param.main_grad.view(-1))  # type: ignore[attr-defined]
        for part, ranks, messages in (
            (self.dense, self.ranks, self.messages),
            (self.experts, self.expert_ranks, self.expert_messages),
        ):
            of_part = messages if part.ranks is ranks else messages_of(part.ranks)
            part.use(connect(part.ranks, of_part, part.buffers, self.config))
        label = 0
        if self.expert_ranks is not self.ranks:
            label = self.expert_messages.all_gather(1 + secrets.randbits(50))[0]
        # On all ranks, as some may have no experts.
        self.expert_groups = self.messages.all_gather(label)

    @torch.no_grad()
    def _make_same(self) -> None:
        """Collective over the ranks: gives all ranks the values of rank 0, or checks that they have them."""
        for of_experts, collectives, messages in (
            (False, self.dense_collectives, self.messages),
            (True, self.expert_collectives, self.expert_messages),
        ):
            values = values_of(self.module, of_experts=of_experts)
            if self._broadcasts:
                broadcast_values(values, collectives, self.waiter)
                others = [(name, value) for name, value in values if not is_dense(value)]
                if others:
                    compare_values(others, messages)
            else:
                compare_values(list(values), messages)

    def _has_gradients_of_torch(self) -> bool:
        """True if gradients lie in the buffers as torch's optimizers take them: whole, in the type of the parameter.

        They must be averages, too: a gradient to which further passes add is reduced again with them.
        """
        has_averages = not self.experts.buffers or self.expert_ranks.size() == self.ranks.size()
        return (
            not self.config.use_distributed_optimizer
            and not self.config.delay_wgrad_compute
            and has_averages
            and all(buffer.grad_dtype == buffer.param_dtype for buffer in self.buffers())
        )


def _checked_module(module: object) -> torch.nn.Module:
    if not isinstance(module, torch.nn.Module) or _owner_in(module) is not None:
        raise ArgumentError(f"module must be a torch.nn.Module that is not wrapped, but is of {type(module).__name__}")
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        raise ArgumentError(
            "module must not be wrapped already, but is in torch's DistributedDataParallel: give its attribute module"
        )
    _check_parts(module)
    return module


def _check_parts(module: torch.nn.Module) -> None:
    """Checks that no part of a model that is trained is wrapped already, by a wrapper that still has it."""
    for name, part in module.named_modules():
        of_torch = isinstance(part, torch.nn.parallel.DistributedDataParallel)
        owner = _owner_in(part)
        if not of_torch and (owner is None or owner.is_released):
            continue
        if any(param.requires_grad for param in part.parameters()):
            whose = "torch's" if of_torch else "Trackbed's"
            raise ArgumentError(
                f"module: no part of it may be wrapped already, but {name} is in {whose} DistributedDataParallel: put "
                f"{name}.module in its place, and wrap the whole alone"
            )


def _owner_in(module: torch.nn.Module) -> Owner | None:
    """Attribute `engine` of a wrapper; None for any other module."""
    engine = vars(module).get("engine")
    return engine if isinstance(engine, Owner) else None


class _Placed(NamedTuple):
    """Tensor and its place in memory."""

    device: str
    start: int
    """Address of the first byte."""
    stop: int
    """Address after the last one."""
    name: str
    tensor: torch.Tensor
    is_moved: bool


def check_separate(moved: Iterable[tuple[str, torch.Tensor]], others: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Checks that no tensor that is moved to a buffer, or updated in a copy, shares an element with another tensor.

    Args:
        moved: tensors that are moved or copied, by name, each once.
        others: tensors of the same model that stay where they are.
    """
    placed = [
        _place(name, tensor, is_moved=is_moved)
        for tensors, is_moved in ((moved, True), (others, False))
        for name, tensor in tensors
        if _has_memory(tensor)
    ]
    for cluster in _clusters(placed):
        for one, other in combinations(cluster, 2):
            if (one.is_moved or other.is_moved) and _share_an_element(one, other):
                raise ArgumentError(
                    f"{other.name} must have memory of its own where the optimizer is sharded or updates copies, but "
                    f"shares some with {one.name}: give the model one parameter under both names to tie them"
                )


def _has_memory(tensor: torch.Tensor) -> bool:
    if torch.nn.parameter.is_lazy(tensor) or is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.layout is torch.strided and tensor.numel() > 0 and tensor.device.type != "meta"


def _place(name: str, tensor: torch.Tensor, *, is_moved: bool) -> _Placed:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start = tensor.data_ptr()
    return _Placed(str(tensor.device), start, start + reach * tensor.element_size(), name, tensor, is_moved)


def _clusters(placed: list[_Placed]) -> Iterator[list[_Placed]]:
    """Yields tensors whose ranges of bytes hang together."""
    cluster: list[_Placed] = []
    for one in sorted(placed, key=lambda one: one[:3]):
        if cluster and (one.device != cluster[0].device or one.start >= max(each.stop for each in cluster)):
            yield cluster
            cluster = []
        cluster.append(one)
    if cluster:
        yield cluster


def _share_an_element(first: _Placed, second: _Placed) -> bool:
    """True if two tensors do; where their elements do not lie alike, if their ranges of bytes intersect."""
    if first.stop <= second.start or second.stop <= first.start:
        return False
    start, stop = min(first.start, second.start), max(first.stop, second.stop)
    size = first.tensor.element_size()
    if second.tensor.element_size() != size or (first.start - second.start) % size:
        return True
    is_used = torch.zeros((stop - start) // size, dtype=torch.bool, device="cpu")
    views = [
        is_used.as_strided(each.tensor.shape, each.tensor.stride(), (each.start - start) // size)
        for each in (first, second)
    ]
    views[0].fill_(1)
    return bool(views[1].any())
