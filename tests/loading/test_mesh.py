"""Parts of a batch for ranks that share it."""

import inspect
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.processes.launching import run_script
from trackbed.errors import ArgumentError
from trackbed.loading import keys_for_stage, slice_for_context


def batch_of(batch_size, length, *, mask):
    numbers = torch.arange(batch_size * length).view(batch_size, length)
    batch = {"tokens": numbers, "labels": numbers + 1, "loss_mask": numbers.float(), "position_ids": numbers % length}
    if mask:
        batch["attention_mask"] = torch.rand((batch_size, 1, length, length)) < 0.5
    return {**batch, "dataset_id": torch.arange(batch_size)}


@given(batch_size=st.integers(1, 3), parts=st.integers(1, 5), size=st.sampled_from([1, 2, 4, 8]), mask=st.booleans())
def test_parts_are_those_of_megatron_core_and_together_the_batch(batch_size, parts, size, mask):
    utils = pytest.importorskip("megatron.core.utils")
    # Releases from 0.17 on want to be told.
    is_told = "is_hybrid_cp" in inspect.signature(utils.get_batch_on_this_cp_rank).parameters
    options = {"is_hybrid_cp": False} if is_told else {}
    batch = batch_of(batch_size, 2 * size * parts, mask=mask)
    found = [slice_for_context(batch, rank, size) for rank in range(size)]
    for rank, own in enumerate(found):
        theirs = {name: tensor for name, tensor in batch.items() if name != "dataset_id"}
        place = {"get_context_parallel_world_size": lambda: size, "get_context_parallel_rank": lambda rank=rank: rank}
        of_group = {"get_world_size": lambda _: size, "get_rank": lambda _, rank=rank: rank}  # as later ones ask
        with patch.multiple(utils.parallel_state, **place), patch.multiple(torch.distributed, **of_group):
            expected = utils.get_batch_on_this_cp_rank(theirs, **options)
        assert own.keys() == batch.keys()
        assert all(torch.equal(own[name], expected[name]) for name in expected), rank
        assert own["dataset_id"] is batch["dataset_id"]
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        halves = [own[name].chunk(2, dim=1) for own in found] if size > 1 else []
        whole = [half[0] for half in halves] + [half[1] for half in reversed(halves)]
        assert size == 1 or torch.equal(torch.cat(whole, dim=1), batch[name])


@pytest.mark.parametrize(
    ("more", "rank", "size", "words"),
    [
        ({}, 2, 2, "rank must be below size 2, found 2"),
        ({}, -1, 2, "rank must be a whole number of at least 0, found -1"),
        ({}, 0, 0, "size must be a whole number of at least 1, found 0"),
        ({}, 0, 3, "tokens must have a multiple of 6 tokens, found 16"),
        ({"cu_seqlens": torch.zeros(3)}, 0, 2, "must be packs end to end"),
    ],
)
def test_what_cannot_be_cut_is_refused(more, rank, size, words):
    with pytest.raises(ArgumentError, match=words):
        slice_for_context({**batch_of(2, 16, mask=False), **more}, rank, size)


def test_each_stage_has_what_it_uses():
    assert keys_for_stage(0, 1) >= {"tokens", "position_ids", "labels", "loss_mask", "attention_mask"}
    assert {"tokens", "labels"}.isdisjoint(keys_for_stage(1, 3))
    with pytest.raises(ArgumentError, match="stage must be below stages 2, found 2"):
        keys_for_stage(2, 2)


@pytest.mark.dist
def test_ranks_without_data_get_the_batch_or_all_of_them_an_error():
    found = run_script(Path(__file__).parent / "broadcast_rank.py", 3, limit_seconds=60)
    assert found == [[{"same": True, "error": "ArgumentError"}]] + [[{"same": True, "error": "CollectiveError"}]] * 2
