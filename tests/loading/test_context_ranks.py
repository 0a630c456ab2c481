"""Ranks of a context gather their places of each pack alone: the slices of the whole batch."""

import itertools

import numpy as np
import pytest
import torch

from tests.datasets.test_packed import packed, write
from tests.support.files.blends import gpt_config
from tests.support.tiers import slow_but
from trackbed import BatchLoader
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.datasets import GPTDataset
from trackbed.datasets.batches.context import Context
from trackbed.errors import ArgumentError
from trackbed.loading import BatchStream, slice_for_context
from trackbed.tokens import IndexedDatasetBuilder
from trackbed.tokens.trained_tokens import TrainedColumns, runs_of


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    """Two pairs, the first of which has trained tokens."""
    folder = tmp_path_factory.mktemp("context")
    generator = np.random.default_rng(3)
    builder = IndexedDatasetBuilder(folder / "a.bin", np.uint16)
    builder.trained = TrainedColumns()
    for length in generator.integers(0, 300, 150).tolist():
        builder.add_document(generator.integers(0, 999, length), [length])
        runs = runs_of(generator.random(length) < 0.4)
        builder.trained.add(np.array([len(runs)]), runs, lengths=np.array([length]), where="a")
    builder.finalize(folder / "a.idx")
    return [str(folder / "a"), write(folder / "b", generator.integers(0, 300, 150))]


def same(found, wanted):
    assert list(found) == list(wanted)
    for name, one in wanted.items():
        assert found[name].dtype == one.dtype, name
        assert torch.equal(found[name], one), name


CASES = slow_but([(1, 1), (2, 4), (4, 8), (8, 16)], [(1, 1), (2, 4), (4, 8), (8, 16), (2, 128), (8, 128)])


@pytest.mark.parametrize("layout", [None, "thd", "torch", "bridge"])
@pytest.mark.parametrize(("size", "multiple"), CASES)
def test_a_rank_gathers_its_slice_of_each_batch(prefixes, layout, size, multiple):
    data = packed(None, prefixes, sequence_length=512, pack_multiple=multiple)
    place = {"batch_size": 1 if layout == "bridge" else 3, "layout": layout, "rank": 1, "num_ranks": 2}
    place["pad_borders"] = layout == "thd"
    whole = BatchLoader(data, **place)
    loaders = [BatchLoader(data, **place, context_rank=rank, context_size=size) for rank in range(size)]
    for batch, *own in itertools.islice(zip(whole, *loaders, strict=True), 6):
        for rank, found in enumerate(own):
            same(found, slice_for_context(batch, rank, size))
        assert sum(found["tokens"].numel() for found in own) == batch["tokens"].numel()
    assert loaders[0].counters.tokens.sum() * size == whole.counters.tokens.sum()


def test_what_every_rank_has_is_the_whole(prefixes):
    """All ranks' labels together, by position in the sample, are those of the whole."""
    data = packed(None, prefixes, sequence_length=512, pack_multiple=8)
    whole = data.gather([0, 5, 9])
    parts = [data.gather([0, 5, 9], context=Context(rank, 4)) for rank in range(4)]
    for row in range(3):
        rows = {name: torch.cat([part[name][row] for part in parts]) for name in ("tokens", "labels", "position_ids")}
        found, wanted = (
            sorted(zip(*(one[name].tolist() for name in rows), strict=True))
            for one in (rows, {name: whole[name][row] for name in rows})
        )
        assert found == wanted


def test_memory_is_that_of_the_part(prefixes):
    data = packed(None, prefixes[:1], sequence_length=512, pack_multiple=16)
    memory = data.empty_batch(2, context=Context(3, 8))
    assert memory["tokens"].shape == (2, 64)
    found = data.gather([1, 2], memory, context=Context(3, 8))
    assert found is memory
    same(found, slice_for_context(data.gather([1, 2]), 3, 8))
    with pytest.raises(ArgumentError, match="out"):
        data.gather([1, 2], memory)


class Other(GPTDataset):
    """A dataset whose samples are made by Python, because it overrides how."""

    def __getitem__(self, idx):
        return super().__getitem__(idx)


def test_samples_that_python_makes_are_cut_afterwards(prefixes):
    config = gpt_config(None, blend=(prefixes[:1], None), split="1", order="packed", pack_multiple=4)
    data = BlendedMegatronDatasetBuilder(Other, (20, 0, 0), lambda: True, config).build()[0]
    for rank in range(2):
        same(data.gather([7], context=Context(rank, 2)), slice_for_context(data.gather([7]), rank, 2))


@pytest.mark.parametrize(
    ("options", "of_loader", "words"),
    [
        ({}, {"context_size": 2}, "pack_multiple must be a multiple of 4 for context_size 2, found 1"),
        (
            {"pack_multiple": 8},
            {"context_size": 8},
            "pack_multiple must be a multiple of 16 for context_size 8, found 8",
        ),
        ({"pack_multiple": 8}, {"context_size": 3}, "pack_multiple must be a multiple of 6 for context_size 3"),
        ({"pack_multiple": 8}, {"context_size": 0}, "context_size must be a whole number of at least 1, found 0"),
        ({"pack_multiple": 8}, {"context_size": 2, "context_rank": 2}, "context_rank must be below context_size 2"),
        ({}, {"context_rank": 1}, "context_rank must be below context_size 1, found 1"),
        ({"order": "instant"}, {"context_size": 2}, "needs a dataset in the order 'packed', found 'instant'"),
        ({"pack_multiple": 8}, {"context_size": 2, "rank": None, "num_ranks": None}, "must be given with context_size"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_any_work(prefixes, options, of_loader, words):
    data = packed(None, prefixes[:1], sequence_length=64, **options)
    with pytest.raises(ArgumentError, match=words):
        BatchLoader(data, **{"batch_size": 1, "rank": 0, "num_ranks": 1, **of_loader})
    if "num_ranks" not in of_loader:
        with pytest.raises(ArgumentError, match=words):
            BatchStream(data, [[0]], **of_loader)


def test_hashes_are_of_whole_samples(prefixes):
    data = packed(None, prefixes[:1], sequence_length=64, pack_multiple=4)
    loader = BatchLoader(data, batch_size=1, rank=0, num_ranks=1, context_rank=1, context_size=2)
    with pytest.raises(ArgumentError, match="hashes are of whole samples"):
        loader.hash_samples()
    with pytest.raises(ArgumentError, match="but for samples in the order 'packed'"):
        packed(None, prefixes[:1], sequence_length=64, order="instant").gather([0], context=Context(0, 2))


def test_rows_are_cut_by_their_own_borders(prefixes):
    data = packed(None, prefixes[:1], sequence_length=64, pack_multiple=4)
    batch = data.gather([0, 1, 2])
    for rank in range(2):
        found = slice_for_context(batch, rank, 2)
        for row in range(3):
            own = {name: one[row : row + 1] for name, one in batch.items()}
            same({name: one[row : row + 1] for name, one in found.items()}, slice_for_context(own, rank, 2))
    assert slice_for_context(data.gather([]), 0, 2)["tokens"].shape == (0, 32)
    with pytest.raises(ArgumentError, match=r"rows with borders must be \[3, 64\] by cu_seqlens_padded, found labels"):
        slice_for_context({**batch, "labels": batch["labels"][:, :60]}, 0, 2)
