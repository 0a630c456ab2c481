"""Dense parameters of a model, or those of its experts: their buffers, bucket groups and collectives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trackbed.grads.bucket_group import _ParamAndGradBucketGroup
from trackbed.grads.buffer import _ParamAndGradBuffer
from trackbed.grads.collectives import Collectives, SoloCollectives
from trackbed.grads.config import Options
from trackbed.grads.parameters import group_parameters
from trackbed.grads.partition import partition_buckets

__all__ = ["Part"]


@dataclass(slots=True, eq=False)
class Part:
    """Parameters that are reduced over the same ranks."""

    params: list[torch.nn.Parameter]
    """Parameters in order of definition."""
    buffers: list[_ParamAndGradBuffer]
    groups: list[_ParamAndGradBucketGroup]
    ranks: Any
    """Process group over which they are reduced."""
    collectives: Collectives

    @classmethod
    def allocate(
        cls,
        params: Sequence[torch.nn.Parameter],
        names: Mapping[torch.nn.Parameter, str],
        config: Options,
        ranks: Any,
        *,
        factor: float,
        bucket_size: int | None,
        is_one_group: bool,
    ) -> "Part":
        """Moves parameters to buffers. Does not communicate.

        Args:
            params: parameters in order of definition.
            names: name of each parameter.
            config: options.
            ranks: process group over which the parameters are reduced.
            factor: factor for the gradients before they are reduced.
            bucket_size: number of elements from which a bucket is closed; None for one bucket per buffer.
            is_one_group: True to communicate all buckets together.
        """
        buffers = [
            _ParamAndGradBuffer(
                config,
                members.param_dtype,
                members.grad_dtype,
                members.params,
                ranks,
                bucket_size,
                names,
                factor,
                members.indices,
                False,  # noqa: FBT003  Megatron Core's signature
            )
            for members in group_parameters(params, reduce_in_fp32=config.grad_reduce_in_fp32)
        ]
        groups = partition_buckets(buffers, force_single_bucket_group=is_one_group)
        if config.use_distributed_optimizer and config.overlap_param_gather:
            for group, following in zip(groups[:0:-1], groups[-2::-1], strict=True):
                group.next_param_gather_bucket_group = following
        return cls(list(params), buffers, groups, ranks, SoloCollectives())

    def lacking(self) -> list[int]:
        """Numbers of the parameters that require a gradient, and have none on this rank."""
        found = [param for group in self.groups for param in group.without_gradient()]
        if not found:
            return []
        numbers = {param: number for number, param in enumerate(self.params)}
        return sorted(numbers[param] for param in found)

    def use(self, collectives: Collectives) -> None:
        """Sets the collectives of all groups."""
        self.collectives = collectives
        for group in self.groups:
            group.collectives = collectives
