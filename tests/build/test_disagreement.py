"""Ranks that ask for different things: an error that names two of them on every rank, and nobody waits."""

import time

import pytest

from blends import BlendedMegatronDatasetBuilder, GPTDataset, gpt_config, write_pairs
from trackbed.comm import run_ranks
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
        assert "rank 2 asks for others than rank 0" in str(error)


@pytest.mark.parametrize(
    "different",
    [
        {"blend_stages": [(20, [1, 1, 1])]},
        {"blend_max_epochs": [9, 9, 9], "blend_when_exhausted": "reweight"},
        {"shuffle_block": 2, "shuffle_window": 4},
    ],
)
def test_ranks_that_ask_for_another_instant_order_are_named_too(tmp_path, different):
    found = outcomes(tmp_path, different=different, sizes=SIZES, common={**ALIKE, "order": "instant"})
    assert [type(error) for error in found] == [CollectiveError] * 3, found
    assert all("rank 2 asks for others than rank 0" in str(error) for error in found)


@pytest.mark.parametrize("without_weights", ["all", "one"])
def test_a_rank_that_wants_nothing_hears_of_it_too(tmp_path, without_weights):
    common = {**ALIKE, "blend": ([0, 1, 2], None)} if without_weights == "all" else ALIKE
    different = {"random_seed": 8} if without_weights == "all" else {"blend": ([0, 1, 2], None)}
    found = outcomes(tmp_path, different=different, sizes=SIZES, common=common, wanting=(False, True, True))
    assert [type(error) for error in found] == [CollectiveError] * 3, found
    assert all("rank 2 asks for others than rank 1" in str(error) for error in found)


def test_what_a_rank_that_wants_nothing_would_ask_for_does_not_matter(tmp_path):
    found = outcomes(tmp_path, different={"random_seed": 8}, sizes=(70, 5, 5), wanting=(True, True, False))
    assert found == [None] * 3
