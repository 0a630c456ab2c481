"""Checks whose results the host reads with the other numbers of a step, so that it waits once. The GPU is pretended."""

import contextlib
import re
import time

import numpy as np
import pytest
import torch

from tests.support.models.wrapped import layers
from trackbed.comm import run_ranks
from trackbed.errors import CollectiveError
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig, gradient_check, issue_order
from trackbed.grads.collectives import DONE, Exchange, Label
from trackbed.grads.collectives.protocol import exchange_of_one
from trackbed.grads.engine import GradientEngine
from trackbed.grads.failure_aware_wait import QueuedCopy, Waiter
from trackbed.grads.gradient_check import FiniteCheck, NonFiniteGradientError
from trackbed.grads.issue_order import StepCheck
from trackbed.optim import DataParallelOptimizer


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(gradient_check, "_judge", [None])
    monkeypatch.setattr(GradientEngine, "_is_on_gpu", lambda engine: True)


def wrap(group, **options):
    module = layers(4, 4, 4)
    config = DistributedDataParallelConfig(check_for_nan_in_grad=True, bucket_size=10, **options)
    wrapper = DistributedDataParallel(module, config, process_group=group)
    return wrapper, DataParallelOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), wrapper)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_all_ranks_name_the_rank_with_a_gradient_that_is_not_finite_and_can_go_on(bad, overlap, sharded, on_gpu):
    def train(group):
        wrapper, optimizer = wrap(group, overlap_grad_reduce=overlap, use_distributed_optimizer=sharded)
        before = [param.detach().clone() for param in wrapper.module.parameters()]
        errors = []
        for step in range(3):
            optimizer.zero_grad()
            x = torch.ones(2, 4)
            if step == 1 and group.rank == 1:
                x[0, 0] = bad
            wrapper(x).sum().backward()
            try:
                optimizer.step()
            except NonFiniteGradientError as error:
                errors.append((step, str(error)))
                assert all(map(torch.equal, before, wrapper.module.parameters()))
            before = [param.detach().clone() for param in wrapper.module.parameters()]
        return errors, [param.tolist() for param in wrapper.module.parameters()]

    (first, params), (second, other_params) = run_ranks(2, train)
    assert first == second
    [(step, text)] = first
    assert step == 1
    pattern = r"rank 1: gradients must be finite, but that of [01].weight in bucket \d is NaN or infinite"
    assert re.fullmatch(pattern, text)
    assert params == other_params


def test_a_gradient_of_a_step_that_was_dropped_is_forgotten(on_gpu):
    wrapper, optimizer = wrap(None)
    wrapper(torch.full((2, 4), float("nan"))).sum().backward()
    wrapper.finish_grad_sync()
    optimizer.zero_grad()
    wrapper(torch.ones(2, 4)).sum().backward()
    assert not optimizer.step().is_skipped


def test_a_judge_is_asked_at_once(on_gpu):
    asked = []

    class Judge:
        def is_there(self):
            return True

        def check_finite(self, norm, bucket):
            asked.append(norm)
            return True

    gradient_check.choose_judge(Judge())
    wrapper, optimizer = wrap(None)
    wrapper(torch.full((2, 4), float("nan"))).sum().backward()
    wrapper.finish_grad_sync()
    assert asked
    assert optimizer.step().is_skipped


def test_the_number_of_a_parameter_that_this_rank_lacks_is_described():
    check = FiniteCheck([])
    assert check.take(torch.device("cpu")).tolist() == [2**63 - 1]
    check.check([2**63 - 1])
    with pytest.raises(NonFiniteGradientError, match=r"rank 1: .* that of a parameter of an expert is NaN"):
        check.check([2**63 - 1, 5])


class Queue:
    """Collectives and copies whose ends a test decides."""

    def __init__(self, monkeypatch, labels):
        self.is_copied = False
        self.labels = labels
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        monkeypatch.setattr(issue_order, "begin_copy", lambda tensor: (tensor, QueuedCopy(self)))
        self.num_copies = 0

    def record_event(self):
        return self

    def wait_event(self, event):
        self.num_copies += 1

    def query(self):
        return self.is_copied

    def exchange(self, numbers, *, label, more=None):
        def decode(read):
            if len(set(read.tolist())) > 1:
                raise CollectiveError("the ranks are at different steps")
            return read[:, np.newaxis]

        return Exchange(DONE, decode, torch.tensor(self.labels))


def test_labels_are_read_with_the_next_numbers(monkeypatch):
    queue = Queue(monkeypatch, [4, 4])
    check = StepCheck(queue)
    assert check.take() == []
    check.begin(Label(4))
    check.finish_on_gpu(Waiter())
    (exchange,) = check.take()
    assert exchange.read().tolist() == [[4], [4]]
    assert check.take() == []
    check.look()
    assert queue.num_copies == 0


@pytest.mark.parametrize("labels", [[4, 4], [4, 5]])
def test_a_rank_that_waits_long_compares_the_labels(labels, monkeypatch):
    """Ranks at different steps may wait for ever for gradients: the labels say why."""
    queue = Queue(monkeypatch, labels)
    check = StepCheck(queue)
    check.look()
    check.begin(Label(4))
    check.finish_on_gpu(Waiter())
    check.look()
    check.look()
    assert queue.num_copies == 1
    queue.is_copied = True
    with pytest.raises(CollectiveError, match="different steps") if labels != [4, 4] else contextlib.nullcontext():
        check.look()


def test_a_wait_looks_after_a_second():
    class Never:
        def wait(self, seconds):
            time.sleep(seconds)
            return False

        def is_done(self):
            return False

        def late_ranks(self):
            return []

    def wait(group):
        waiter = Waiter(group)

        def look():
            raise CollectiveError("the ranks are at different steps")

        waiter.look = look
        began = time.monotonic()
        with pytest.raises(CollectiveError, match="different steps"):
            waiter.wait(Never(), "numbers of a step")
        return time.monotonic() - began

    assert all(0.9 < seconds < 2.5 for seconds in run_ranks(2, wait))


def test_exchanges_of_one_rank_have_its_numbers():
    assert exchange_of_one(np.arange(2), None).read().tolist() == [[0, 1]]
    assert exchange_of_one(np.arange(2), torch.tensor([7])).read().tolist() == [[0, 1, 7]]
