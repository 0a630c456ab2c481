"""The order in which bucket groups are reduced, the same on every rank, and the check that all are in one step."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from trackbed.errors import GradientError
from trackbed.grads.bucket_group import _ParamAndGradBucketGroup
from trackbed.grads.collectives import Collectives, Exchange, Label
from trackbed.grads.failure_aware_wait import QueuedCopy, Waiter, begin_copy


class StepCheck:
    """Exchange of the step, beside gradients whose collectives cannot carry it, and at the end.

    Args:
        collectives: collectives of the gradients.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._exchange: Exchange | None = None
        self._early: EarlyCopy | None = None

    def begin(self, label: Label) -> None:
        """Sends the label of this rank's step, before its gradients are reduced; `LEFT` after the last one."""
        self._early = None
        self._exchange = self._collectives.exchange(np.zeros(1, dtype=np.int64), label=label)

    def finish(self, waiter: Waiter, what: str = "exchange of step numbers") -> None:
        """Waits for the labels of the other ranks, and compares them.

        Args:
            waiter: waits.
            what: description, with which an error begins.
        """
        exchange = self._exchange
        if exchange is not None:
            waiter.wait(exchange.work, what)
            exchange.read(waiter.read)
            self._exchange = None

    def finish_on_gpu(self, waiter: Waiter) -> None:
        """Has the GPU wait for the labels, which are compared with what `take` returns."""
        if self._exchange is not None:
            waiter.wait(self._exchange.work, "exchange of step numbers")
            self._early = EarlyCopy(self._exchange)

    def look(self) -> None:
        """Compares the labels if they are here, for a rank that has waited long: the ranks may be at different steps.

        Raises:
            CollectiveError: they are.
        """
        if self._early is not None:
            self._early.look()

    def take(self) -> list[Exchange]:
        """Returns the exchange if its labels are still to be compared, and forgets it."""
        exchange, self._exchange, self._early = self._exchange, None, None
        return [] if exchange is None else [exchange]


class EarlyCopy:
    """Copy of an exchange to the host that does not wait for what the GPU has to do behind the exchange.

    Args:
        exchange: exchange that the current stream of the GPU waits for.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._is_received = torch.cuda.current_stream().record_event()
        self._begun: tuple[torch.Tensor, QueuedCopy] | None = None

    def look(self) -> None:
        """Reads the exchange if its copy is here. The first call begins to copy."""
        received = self._exchange.received
        if received is None:
            return
        if self._begun is None:
            stream = torch.cuda.Stream(received.device)  # type: ignore[no-untyped-call]
            stream.wait_event(self._is_received)
            with torch.cuda.stream(stream):
                self._begun = begin_copy(received)
            received.record_stream(stream)
        copy, work = self._begun
        if work.is_done():
            self._exchange.decode(copy.numpy())


class IssueOrder:
    """Reduces bucket groups in a fixed order: each when it is ready and all before it have been issued.

    Args:
        groups: bucket groups in their order.
        rank: number of this rank.
        num_ranks: number of ranks.
        check: exchanges the number of the step; None if the collectives carry it.
    """

    def __init__(
        self, groups: Sequence[_ParamAndGradBucketGroup], *, rank: int, num_ranks: int, check: StepCheck | None
    ) -> None:
        self._groups = list(groups)
        self._rank = rank
        self._num_ranks = num_ranks
        self._check = check
        self._step = 0
        self._ready = [False] * len(self._groups)
        self._num_issued = 0
        self._refusal: str | None = None
        """Reason why no further step is possible."""

    def unissued(self) -> list[_ParamAndGradBucketGroup]:
        """Groups that have not been issued in this step."""
        return self._groups[self._num_issued :]

    def issue_of(self, number: int) -> Callable[[bool], None]:
        """Makes the function that a group calls when it is ready, with `force_all_reduce`."""

        def issue(force_all_reduce: bool) -> None:  # noqa: FBT001  called for every bucket group
            self.ready(number, force_all_reduce=force_all_reduce)

        return issue

    def ready(self, number: int, *, force_all_reduce: bool) -> None:
        """Records that a group is ready, and issues all that can be."""
        self._ready[number] = True
        # A group that is ready waits for those before it. Backends pair collectives by the order in which each rank
        # issues them: if this rank issued the third group first and another rank the second, the gradients of two
        # buckets would be added up, without an error.
        while self._num_issued < len(self._groups) and self._ready[self._num_issued]:
            self._issue(force_all_reduce=force_all_reduce)

    def issue_rest(self, *, force_all_reduce: bool) -> None:
        """Issues all groups that have not been, ready or not."""
        while self._num_issued < len(self._groups):
            self._issue(force_all_reduce=force_all_reduce)

    def has_begun(self) -> bool:
        """True if a step has begun."""
        return self._step > 0 or self._num_issued > 0 or any(group.has_counted for group in self._groups)

    def give_up(
        self, reason: str, remedy: str = "so the ranks cannot go on together: start again from a checkpoint"
    ) -> None:
        """Refuses all further steps.

        Args:
            reason: why.
            remedy: what the program can do.
        """
        self._refusal = self._refusal or f"{reason}, {remedy}"

    def check_usable(self) -> None:
        """Checks that no earlier step was given up halfway."""
        if self._refusal is not None:
            raise GradientError(f"rank {self._rank}: {self._refusal}")

    def check_untouched(self) -> None:
        """Checks that no gradient was changed after its group was issued."""
        # A reduction that is running reads and writes the gradients on another thread or stream. What the program adds
        # meanwhile may or may not be in the sum, and differs among the ranks.
        for group in self._groups[: self._num_issued]:
            bucket = group.first_changed()
            if bucket is not None:
                msg = (
                    f"rank {self._rank}: gradients must stay as they are from the moment when their bucket is reduced "
                    f"to the end of finish_grad_sync(), but those of bucket {bucket} were changed: change main_grad "
                    "before the last backward pass, or turn overlap_grad_reduce off"
                )
                self.give_up("gradients were changed while they were being reduced")
                raise GradientError(msg)

    def finish(self, waiter: Waiter, *, is_step_next: bool = False) -> None:
        """Waits until all groups, which have been issued, are reduced.

        Args:
            waiter: waits.
            is_step_next: True if `take_check` follows before anyone uses the gradients.
        """
        # The labels first: if a rank is in another step, its collectives may be paired with others of this rank, so
        # that a sum is wrong or a wait never ends. The labels say why.
        if self._check is not None:
            if is_step_next:
                self._check.finish_on_gpu(waiter)
            else:
                self._check.finish(waiter)
        for group in self._groups:
            group.wait_for_grads()

    def take_check(self) -> list[Exchange]:
        """Returns the exchange of the step, for the next read from the GPU; none if it was read."""
        return [] if self._check is None else self._check.take()

    def reset(self, *, has_begun: bool) -> None:
        """Prepares for the next step. Waits for reductions that are running.

        Args:
            has_begun: True if the step counts even where no group has counted a gradient.
        """
        # Other ranks may have issued the rest of this step, and wait for it. If this rank went on, its first collective
        # of the next step would be paired with the rest of this one.
        if 0 < self._num_issued < len(self._groups) and self._num_ranks > 1:
            count = len(self._groups)
            self.give_up(
                f"step {self._step} was given up after {self._num_issued} of {count} bucket groups were issued"
            )
            # Not waited for: the other ranks may never come. `reset` of the group would wait.
            for group in self._groups:
                group.drop_reduction()
        # A step that is dropped before anything was issued counts, too. If other ranks reduce theirs, the numbers of
        # the steps differ, and the next collective raises instead of adding gradients of two steps.
        if has_begun or self._num_issued or any(group.has_counted for group in self._groups):
            self._step += 1
        self.take_check()  # dropped, if it was not read: the next step has one, too
        self._ready = [False] * len(self._groups)
        self._num_issued = 0
        for number, group in enumerate(self._groups):
            group.reset()
            group.label = Label(self._step, number)

    def _issue(self, *, force_all_reduce: bool) -> None:
        self.check_usable()
        # Before the gradients, so that labels are paired with labels even if a rank is in another step. They are read
        # in `finish`, before anyone uses the sums.
        if self._num_issued == 0 and self._check is not None:
            self._check.begin(Label(self._step))
        group = self._groups[self._num_issued]
        group.start_grad_sync(force_all_reduce)
        self._num_issued += 1
