"""Losses on several ranks have the gradients of one process, whatever is trained."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.losses_rank import GLOBAL, SHARES, dataset_of, difference, plain_steps, steps_of_rank, write_pair
from tests.support.processes.launching import run_script
from trackbed import BatchLoader, DistributedDataParallel
from trackbed.comm import run_ranks
from trackbed.errors import ArgumentError, CollectiveError
from trackbed.loading import slice_for_context
from trackbed.losses import StepCounts, document_mean, document_weights, step_counts, token_mean

RANK = Path(__file__).parent / "losses_rank.py"
CLOSE = 1e-12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("masked")
    for name in SHARES:
        write_pair(made, name)
    return made


def test_cases_have_ranks_and_steps_without_a_trained_label(folder):
    trained = {name: dataset_of(folder, name).gather(range(2 * GLOBAL))["num_trained_tokens"] for name in SHARES}
    assert not trained["0 %"].any()
    assert (trained["one document"] > 0).sum() == 1
    assert set((trained["1 %"] > 0).tolist()) == {False, True}
    assert (trained["99 %"] > 0).all()


@pytest.mark.parametrize("kind", ["token", "document"])
@pytest.mark.parametrize("name", list(SHARES))
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"micro": 1}),
        (4, {"micro": 1, "is_sharded": True}),
        (4, {"micro": 2, "layout": "torch"}),
        (2, {"micro": 2, "is_sharded": True, "layout": None}),
        (4, {"micro": 1, "context": 2, "is_sharded": True}),
        (2, {"micro": 1, "context": 2, "layout": "bridge"}),
    ],
)
def test_steps_are_those_of_one_process(folder, kind, name, size, options):
    data = dataset_of(folder, name)
    wanted = plain_steps(data, kind)
    found = run_ranks(size, lambda group: steps_of_rank(data, kind, group, **options))
    for params, totals in found:
        assert difference(params, wanted) <= CLOSE
        assert np.isfinite(totals).all()
        if name == "0 %":
            assert totals == [0.0, 0.0]


@pytest.mark.dist
def test_steps_of_processes_are_those_of_one(folder):
    found = run_script(RANK, 2, str(folder), *SHARES, limit_seconds=120)
    errors = [lines.pop() for lines in found]
    assert errors[0] == ["CollectiveError", "step_counts: rank 1 failed; its own error says why"]
    assert errors[1][0] == "ArgumentError"
    assert [len(lines) for lines in found] == [4 * len(SHARES)] * 2
    for name, kind, apart, totals in found[0] + found[1]:
        assert apart <= CLOSE, (name, kind)
        assert np.isfinite(totals).all()


@pytest.mark.parametrize("layout", ["thd", "torch", None])
def test_the_weights_of_a_document_add_up_to_one(folder, layout):
    data = dataset_of(folder, "50 %")
    loader = BatchLoader(data, batch_size=4, layout=layout, rank=0, num_ranks=1)
    for batch in loader:
        weights = document_weights(batch, dtype=torch.float64)
        assert weights.shape == batch["loss_mask"].shape
        assert (weights > 0).eq(batch["loss_mask"] > 0).all()
        assert weights.sum().item() == pytest.approx(batch["num_documents"].sum().item())
        if layout is not None:
            parts = [slice_for_context(batch, rank, 2) for rank in range(2)]
            cut = slice_for_context({**batch, "weights": weights}, 1, 2)["weights"]
            assert torch.equal(document_weights(parts[1], dtype=torch.float64), cut)


def test_losses_that_are_not_trained_are_not_read():
    batch = {"loss_mask": torch.tensor([[1.0, 0.0, 0.0, 1.0]]), "cu_seqlens": torch.tensor([0, 2, 4])}
    batch["cu_trained_tokens"] = torch.tensor([0, 1, 2])
    losses = torch.tensor([[1.0, float("nan"), float("inf"), 5.0]], dtype=torch.bfloat16, requires_grad=True)
    counts = StepCounts(num_trained_tokens=4, num_documents=2, num_ranks=2)
    found = [mean(losses, batch, counts) for mean in (token_mean, document_mean)]
    assert [one.item() for one in found] == [3.0, 6.0]
    assert {one.dtype for one in found} == {torch.float32}
    found[0].backward()
    assert losses.grad.tolist() == [[0.5, 0.0, 0.0, 0.5]]


def test_a_batch_without_packs_has_no_loss_and_no_nan(folder):
    data = dataset_of(folder, "50 %")
    batch = data.gather([])
    losses = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    for mean in (token_mean, document_mean):
        assert mean(losses, batch, step_counts([])).item() == 0.0


@pytest.mark.parametrize(
    ("losses", "batch", "problem"),
    [
        (torch.zeros(2, 4), {}, r"losses must have the shape of loss_mask, \[1, 4\], or be flat, found \[2, 4\]"),
        (torch.zeros(1, 4), {"cu_trained_tokens": torch.zeros(3)}, "must have one shape, found .2. and .3."),
        (torch.zeros(1, 4), {"cu_seqlens": None}, "must be of packs, with borders"),
    ],
)
def test_what_does_not_fit_is_refused(losses, batch, problem):
    whole = {"loss_mask": torch.ones(1, 4), "cu_seqlens": torch.tensor([0, 4])}
    whole |= {"cu_trained_tokens": torch.tensor([0, 4]), **batch}
    whole = {name: one for name, one in whole.items() if one is not None}
    with pytest.raises(ArgumentError, match=problem):
        document_mean(losses, whole, step_counts([]))


def counted(tokens, documents):
    return {"num_trained_tokens": torch.tensor([tokens]), "num_documents": torch.tensor([documents])}


def outcome(function):
    try:
        return function()
    except (ArgumentError, CollectiveError) as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize(
    ("batches", "context", "wanted"),
    [
        ([[counted(3, 1)], [], [counted(2, 2)] * 2], [1, 1, 1], (7, 5)),
        ([[counted(3, 1)]] * 3, [3, 3, 3], (3, 1)),
        ([[counted(3, 1)], [{"tokens": torch.zeros(1)}], []], [1, 1, 1], ("rank 1 failed", "must have num_trained")),
        ([[counted(3, 1)], counted(3, 1), []], [1, 1, 1], ("rank 1 failed", "must be a list of micro-batches")),
        ([[], [], []], [1, 1, 3], ("found 1 on rank 0 and 3 on rank 2",) * 2),
        ([[], [], []], [1, 0, 1], ("rank 1 failed", "context_size must be a whole number of at least 1")),
        ([[], [], []], [2, 2, 2], ("context_size must divide 3 ranks",) * 2),
        ([[counted(3, 1)], [], []], [3, 3, 3], (r"and the sums of their counts \[3, 1\], found 3",) * 2),
    ],
)
def test_every_rank_has_the_counts_or_none(batches, context, wanted, is_wrapped):
    def count(group):
        own, size = batches[group.rank], context[group.rank]
        if not is_wrapped:
            return outcome(lambda: step_counts(own, group, context_size=size))
        model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
        return outcome(lambda: model.step_counts(own, context_size=size))

    found = run_ranks(3, count)
    if isinstance(wanted[0], int):
        assert found == [StepCounts(num_trained_tokens=wanted[0], num_documents=wanted[1], num_ranks=3)] * 3
        return
    for rank, (kind, text) in enumerate(found):
        assert kind in ("ArgumentError", "CollectiveError")
        pattern = wanted[rank == 1]
        assert pattern.replace("\\", "") in text
