"""Reduce-scatter that sends numbers in their own type and adds them in float32."""

from typing import Any

import torch
import torch.distributed as dist

from trackbed.errors import ArgumentError
from trackbed.grads.collectives.protocol import SUMMABLE, array_of
from trackbed.kernels import sum_ranks


def reduce_scatter_with_fp32_accumulation(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    op: Any,
    group: Any,
    async_op: bool,  # noqa: FBT001  Megatron Core's signature
) -> "ReceivedShards | None":
    """Sums the ranks' tensors, and stores this rank's part of the sum, rounded once, in `output_tensor`.

    Each rank receives its part of all tensors and adds them itself: of n ranks with h = ceil(n / 2), rank r adds rank
    r + h, then n = h, until one is left. Megatron Core adds in rank order, so from 3 ranks on the bits differ.

    Args:
        output_tensor: `[N / ranks]` may be this rank's part of `input_tensor`.
        input_tensor: `[N]` numbers to send, N a multiple of the number of ranks.
        op: must be `torch.distributed.ReduceOp.SUM`.
        group: process group; None for all ranks.
        async_op: True to return an object whose `wait()` finishes the operation.

    Raises:
        ArgumentError: another operation, or a size that cannot be divided by the number of ranks.
    """
    if op != dist.ReduceOp.SUM:
        raise ArgumentError(f"op must be ReduceOp.SUM, but is {op}")
    shards = receive_shards(output_tensor, input_tensor, group)
    if async_op:
        return shards
    shards.wait()
    return None


def receive_shards(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, *, divisor: int = 1
) -> "ReceivedShards":
    """Begins the same reduce-scatter, and divides the sum."""
    num_ranks = dist.get_world_size(group)
    if input_tensor.numel() % num_ranks != 0:
        raise ArgumentError(
            f"input_tensor must have a multiple of {num_ranks} elements, but has {input_tensor.numel()}"
        )
    received = torch.empty_like(input_tensor)
    work = dist.all_to_all_single(received, input_tensor, group=group, async_op=True)
    return ReceivedShards(work, received.view(num_ranks, -1), output_tensor, divisor)


class ReceivedShards:
    """Parts of all ranks' tensors that are on their way, and the tensor that gets their sum.

    Args:
        work: transfer of the parts.
        received: `[ranks, N / ranks]` parts, once the transfer is over.
        output: `[N / ranks]` gets the sum.
        divisor: number by which the sum is divided.
    """

    def __init__(self, work: Any, received: torch.Tensor, output: torch.Tensor, divisor: int) -> None:
        self._work = work
        self._received = received
        self._output = output
        self._divisor = divisor
        self._is_added = False

    def wait(self, *timeout: Any) -> bool:
        """Waits for the transfer, and adds the parts.

        Args:
            timeout: passed on to the `wait` of the transfer.
        """
        self._work.wait(*timeout)
        if not self._is_added:
            self._is_added = True
            _sum_rows(self._received, self._divisor)
            self._output.copy_(self._received[0].view_as(self._output))
        return True

    def is_completed(self) -> bool:
        """True if the parts are here."""
        return bool(self._work.is_completed())

    def get_future(self) -> Any:
        """Future of the transfer."""
        return self._work.get_future()


def _sum_rows(rows: torch.Tensor, divisor: int) -> None:
    """Sums the rows in tree order, and puts the sum, divided and rounded, into the first one."""
    if rows.device.type == "cpu" and rows.dtype in SUMMABLE:
        sum_ranks([array_of(row) for row in rows], start=0, stop=rows.shape[1], divisor=divisor, owner=0)
        return
    # As many kernels on a GPU as there are levels of the tree.
    terms = rows.to(torch.promote_types(rows.dtype, torch.float32))
    while len(terms) > 1:
        half = (len(terms) + 1) // 2
        terms[: len(terms) - half] += terms[half:]
        terms = terms[:half]
    rows[0].copy_(terms[0] / divisor if divisor != 1 else terms[0])
