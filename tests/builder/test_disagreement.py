"""Ranks that ask for different things: an error that says what differs, on every rank, and nobody waits.

Copies of a corpus in different folders are no different things.
"""

import time

import numpy as np
import pytest

from tests.support.files.blends import (
    BlendedMegatronDatasetBuilder,
    GPTDataset,
    build,
    gpt_config,
    tokens_of,
    write_pair,
    write_pairs,
)
from trackbed.comm import run_ranks
from trackbed.datasets.megatron_dataset import MegatronDataset
from trackbed.errors import CollectiveError

SECONDS = 5
ALIKE = {"blend": ([0, 1, 2], [3, 2, 1]), "split": "8,1,1"}
SIZES = (50, 5, 5)
DIFFERENT = {
    "another seed": ({"random_seed": 8}, SIZES),
    "another sequence length": ({"sequence_length": 17}, SIZES),
    "other sizes": ({}, (60, 5, 5)),
    "no size": ({"blend": ([0, 1, 2], None)}, (None, 5, 5)),
    "another split": ({"split": "7,2,1"}, SIZES),
    "other prefixes": ({"blend": ([0, 1, 3], [3, 2, 1])}, SIZES),
    "the same prefixes in another order": ({"blend": ([0, 2, 1], [3, 2, 1])}, SIZES),
    "fewer prefixes": ({"blend": ([0, 1], [3, 2])}, SIZES),
    "more prefixes": ({"blend": ([0, 1, 2, 3], [3, 2, 1, 1])}, SIZES),
    "other weights": ({"blend": ([0, 1, 2], [3, 2, 1.5])}, SIZES),
    "weights that ask the same of each pair": ({"blend": ([0, 1, 2], [25.6, 16.2, 8.2])}, SIZES),
    "no weights": ({"blend": ([0, 1, 2], None)}, SIZES),
    "a blend for each split": (
        {"blend": None, "split": None, "blend_per_split": [([0, 1], [1, 1]), None, None]},
        SIZES,
    ),
    "one pair alone": ({"blend": ([0], None)}, SIZES),
    "another order": ({"order": "balanced"}, SIZES),
}
FOUND = {
    "another seed": "pair0, split train: random_seed is 7 on rank 0 and 8 on rank 2",
    "another sequence length": "pair0, split train: sequence_length is 16 on rank 0 and 17 on rank 2",
    "other sizes": "the arguments of the builder: sizes.train is 50 on rank 0 and 60 on rank 2",
    "no size": "the arguments of the builder: sizes.train is 50 on rank 0 and null on rank 2",
    "another split": "pair0, split train: documents[1] is 24 on rank 0 and 21 on rank 2",
    "other prefixes": "pair3, split train): data.bin_bytes is ",
    "the same prefixes in another order": "pair2, split train): data.bin_bytes is ",
    "fewer prefixes": "number of datasets of split train is 3 on rank 0 and 2 on rank 2",
    "more prefixes": "number of datasets of split train is 3 on rank 0 and 4 on rank 2",
    "other weights": "split train: weights[0] is 0.5000000000000001 on rank 0 and 0.46153846153846156 on rank 2",
    "weights that ask the same of each pair": "weights[0] is 0.5000000000000001 on rank 0 and 0.512 on rank 2",
    "no weights": 'weights of split train is "given" on rank 0 and "not given" on rank 2',
    "a blend for each split": "number of datasets of split train is 3 on rank 0 and 2 on rank 2",
    "one pair alone": "number of datasets of split train is 3 on rank 0 and 1 on rank 2",
    "another order": "the arguments of the builder: order is ",
}


def outcomes(folder, *, different, sizes, common=ALIKE, size=3, wanting=(True, True, True)):
    """What building raised on each rank, where the last is given `different` options and `sizes`."""
    prefixes = write_pairs(folder, 4)

    def named(blend):
        return blend and ([prefixes[number] for number in blend[0]], blend[1])

    def work(group):
        is_other = group.rank == size - 1
        options = {**common, **(different if is_other else {})}
        options["blend"] = named(options["blend"])
        if options.get("blend_per_split"):
            options["blend_per_split"] = [named(blend) for blend in options["blend_per_split"]]
        config = gpt_config(folder / "cache", **options)
        builder = BlendedMegatronDatasetBuilder(
            GPTDataset, list(sizes if is_other else SIZES), lambda: wanting[group.rank], config, group=group
        )
        try:
            builder.build()
        except Exception as error:  # whatever it is, it is looked at
            return error
        return None

    began = time.monotonic()
    found = run_ranks(size, work, timeout_seconds=30)
    assert time.monotonic() - began < SECONDS
    return found


@pytest.mark.parametrize("order", ["megatron", "balanced", "instant"])
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_ask_for_different_datasets_are_named_on_every_rank(tmp_path, what, order):
    different, sizes = DIFFERENT[what]
    if what == "another order" and order == "balanced":
        different = {"order": "megatron"}
    found = outcomes(tmp_path, different=different, sizes=sizes, common={**ALIKE, "order": order})
    assert [type(error) for error in found] == [CollectiveError] * 3, found
    for error in found:
        assert FOUND[what] in str(error)
        assert "on rank 0 and " in str(error)
        assert str(error).endswith("on rank 2")


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({"blend_stages": [(20, [1, 1, 1])]}, "blend_stages is null on rank 0 and [[20, [1, 1, 1]]] on rank 2"),
        (
            {"blend_max_epochs": [9, 9, 9], "blend_when_exhausted": "reweight"},
            "blend_max_epochs is null on rank 0 and ",
        ),
        ({"shuffle_block": 2, "shuffle_window": 4}, "shuffle_block is 1 on rank 0 and 2 on rank 2"),
    ],
)
def test_ranks_that_ask_for_another_instant_order_are_named_too(tmp_path, different, words):
    found = outcomes(tmp_path, different=different, sizes=SIZES, common={**ALIKE, "order": "instant"})
    assert [type(error) for error in found] == [CollectiveError] * 3, found
    assert all(words in str(error) for error in found), found


@pytest.mark.parametrize("without_weights", ["all", "one"])
def test_a_rank_that_wants_nothing_hears_of_it_too(tmp_path, without_weights):
    common = {**ALIKE, "blend": ([0, 1, 2], None)} if without_weights == "all" else ALIKE
    different = {"random_seed": 8} if without_weights == "all" else {"blend": ([0, 1, 2], None)}
    found = outcomes(tmp_path, different=different, sizes=SIZES, common=common, wanting=(False, True, True))
    assert [type(error) for error in found] == [CollectiveError] * 3, found
    words = "random_seed is 7 on rank 1 and 8 on rank 2" if without_weights == "all" else "on rank 1 and "
    assert all(words in str(error) for error in found), found


def test_what_a_rank_that_wants_nothing_would_ask_for_does_not_matter(tmp_path):
    found = outcomes(tmp_path, different={"random_seed": 8}, sizes=(70, 5, 5), wanting=(True, True, False))
    assert found == [None] * 3


def copies(folder, num_ranks, *, changed=None):
    """A copy of three pairs for each rank, in a folder of its own; one rank's third pair has other lengths."""
    prefixes = []
    for rank in range(num_ranks):
        (folder / f"host{rank}").mkdir()
        prefixes.append(write_pairs(folder / f"host{rank}"))
        if rank == changed:
            prefixes[-1][2] = write_pair(folder / f"host{rank}" / "pair2", [3, 1, 2] * 30, seed=2)
    return prefixes


def build_copies(folder, prefixes, *, caches=None, cls=GPTDataset, **options):
    """What each rank gets, or raises, whose pairs have these prefixes."""

    def work(group):
        cache = folder / (caches[group.rank] if caches else "cache")
        config = gpt_config(cache, **{"blend": (prefixes[group.rank], [3, 2, 1]), "split": "8,1,1", **options})
        try:
            return BlendedMegatronDatasetBuilder(cls, list(SIZES), lambda: True, config, group=group).build()
        except Exception as error:
            return error

    return run_ranks(len(prefixes), work, timeout_seconds=30)


def samples_of(datasets):
    return [tokens_of(dataset, range(len(dataset))) for dataset in datasets]


@pytest.mark.parametrize("caches", [None, ["a", "a", "b"], ["a", "b", "c"]])
@pytest.mark.parametrize("order", ["megatron", "balanced", "instant"])
def test_equal_copies_in_other_folders_pass_and_give_the_same_samples(tmp_path, order, caches):
    prefixes = copies(tmp_path, 3)
    alone = samples_of(build(gpt_config(None, blend=(prefixes[0], [3, 2, 1]), split="8,1,1", order=order), SIZES))
    for _ in range(2):  # built, and from what each remembers
        found = build_copies(tmp_path, prefixes, caches=caches, order=order)
        assert not [one for one in found if isinstance(one, Exception)], found
        assert [samples_of(datasets) for datasets in found] == [alone] * 3


def test_ranks_of_equal_names_share_work_and_those_of_others_build_their_own(tmp_path):
    first, second = copies(tmp_path, 2)
    found = build_copies(tmp_path, [first, second, first, second])
    assert not [one for one in found if isinstance(one, Exception)], found
    made = [path.name for path in (tmp_path / "cache").glob("*-shuffle_index.npy")]
    assert len(made) == 2 * 3 * len(SIZES)


@pytest.mark.parametrize("order", ["megatron", "balanced", "instant"])
def test_a_copy_that_is_not_equal_is_named_also_where_both_remember_a_start(tmp_path, order):
    prefixes = copies(tmp_path, 2, changed=1)
    for own in prefixes:
        build(gpt_config(tmp_path / "cache", blend=(own, [3, 2, 1]), split="8,1,1", order=order), SIZES)
    found = build_copies(tmp_path, prefixes, order=order)
    assert [type(error) for error in found] == [CollectiveError] * 2, found
    where = f"{prefixes[0][2]}, split train (rank 1: {prefixes[1][2]}, split train): data."
    assert all(where in str(error) and "on rank 0" in str(error) for error in found), found


class Rows(MegatronDataset):
    """A class that is not Trackbed's, whose low-level dataset is an array, and which has no index."""

    @staticmethod
    def numel_low_level_dataset(low_level_dataset):
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path, config):
        return np.load(dataset_path)

    def __len__(self):
        return len(self.indices) if self.num_samples is None else self.num_samples

    def __getitem__(self, idx):
        return {"text": self.dataset[self.indices[idx % len(self.indices)]]}


@pytest.mark.parametrize("weights", [None, [3, 2, 1]])
def test_datasets_of_other_classes_without_an_index_may_differ_with_a_warning(tmp_path, caplog, weights):
    prefixes = []
    for rank in range(2):
        prefixes.append([str(tmp_path / f"{rank}-{number}.npy") for number in range(3)])
        for number, path in enumerate(prefixes[-1]):
            np.save(path, np.zeros((100 * (number + 1), 4)))

    def work(group):
        config = gpt_config(None, blend=(prefixes[group.rank], weights), split="8,1,1")
        builder = BlendedMegatronDatasetBuilder(Rows, list(SIZES), lambda: True, config, group=group)
        return [len(dataset) for dataset in builder.build()]

    assert run_ranks(2, work) == [run_ranks(1, work)[0]] * 2
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(set(warnings)) == 1
    assert f'dataset_path is "{prefixes[0][0][:20]}' in warnings[0]
