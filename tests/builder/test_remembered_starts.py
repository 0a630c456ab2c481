"""A start that is like the last one takes what that one found, as long as nothing has changed: the same datasets."""

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given

from blends import BlendedMegatronDatasetBuilder, GPTDataset, build, gpt_config, tokens_of, write_pair, write_pairs
from generated import builder_of, built, configurations
from small_entries import STEM, open_
from tidy import remove_folder
from trackbed.builder.warm_start import Start
from trackbed.cache import collecting, plan_removal, remove, take_inventory
from trackbed.comm import run_ranks
from trackbed.errors import CacheError, CollectiveError, FormatError

SIZES = [50, 5, 5]


def config_of(folder, **options):
    prefixes = [str(folder / f"pair{number}") for number in range(3)]
    return gpt_config(folder / "cache", **{"blend": (prefixes, [3, 2, 1]), "split": "8,1,1", **options})


def is_remembered(config, sizes=SIZES):
    memo = Start(GPTDataset, sizes, config).memo
    return memo is not None and memo.holds(range(memo.num_chunks))


def tokens_in(datasets):
    return [tokens_of(dataset, range(len(dataset))) for dataset in datasets]


def built_anew(folder, **options):
    """What a start without a cache makes of the same data."""
    remove_folder(folder / "fresh")
    return tokens_in(build(config_of(folder, **{**options, "path_to_cache": str(folder / "fresh")}), SIZES))


@given(case=configurations())
def test_a_start_that_is_remembered_gives_the_same_datasets(tmp_path, case):
    remove_folder(tmp_path / "case")
    case.write(tmp_path / "case")
    first = built(builder_of(case, tmp_path / "case", tmp_path / "case" / "cache"))
    second = built(builder_of(case, tmp_path / "case", tmp_path / "case" / "cache"))
    if isinstance(first, Exception):  # of several datasets that cannot be built, threads may come to another one first
        assert type(second) is type(first)
    else:
        assert second == first


@pytest.mark.parametrize("order", ["megatron", "balanced"])
def test_the_start_after_a_build_is_remembered(tmp_path, order):
    write_pairs(tmp_path)
    config = config_of(tmp_path, order=order)
    assert not is_remembered(config)
    first = build(config, SIZES)
    assert is_remembered(config)
    second = build(config, SIZES)
    assert tokens_in(second) == tokens_in(first)
    for one, other in zip(first, second, strict=True):
        assert one.unique_description == other.unique_description
        assert [len(member) for member in one.datasets] == [len(member) for member in other.datasets]


def test_another_configuration_is_another_start(tmp_path):
    write_pairs(tmp_path)
    build(config_of(tmp_path), SIZES)
    for options in ({"random_seed": 8}, {"split": "7,2,1"}, {"sequence_length": 17}, {"order": "balanced"}):
        assert not is_remembered(config_of(tmp_path, **options))
    assert not is_remembered(config_of(tmp_path), [50, 5, 6])
    assert is_remembered(config_of(tmp_path, num_dataset_builder_threads=2))


def test_a_cache_that_was_moved_is_looked_at_again(tmp_path):
    write_pairs(tmp_path)
    build(config_of(tmp_path), SIZES)
    shutil.copytree(tmp_path / "cache", tmp_path / "moved")
    moved = config_of(tmp_path, path_to_cache=str(tmp_path / "moved"))
    assert not is_remembered(moved)
    assert tokens_in(build(moved, SIZES)) == built_anew(tmp_path)
    assert is_remembered(moved)


def test_relative_prefixes_and_a_relative_cache_are_those_of_the_folder_one_is_in(tmp_path, monkeypatch):
    options = {"blend": ([f"pair{number}" for number in range(3)], [3, 2, 1]), "path_to_cache": "cache/"}
    for number, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        write_pairs(tmp_path / name)
        write_pair(tmp_path / name / "pair1", [20 + number] * 60, seed=number)
        if name == "b":
            (tmp_path / "b" / "cache").symlink_to(tmp_path / "a" / "cache")
        config = config_of(tmp_path, **options)
        assert not is_remembered(config)
        wanted = tokens_in(build(config, SIZES))
        assert is_remembered(config)
        assert tokens_in(build(config, SIZES)) == wanted == built_anew(tmp_path, **{**options, "path_to_cache": None})


def one(folder, pattern):
    return min(folder.glob(pattern))


CHANGES = {
    "an array cut": lambda cache: os.truncate(one(cache, "*-sample_index.npy"), 100),
    "an array emptied": lambda cache: os.truncate(one(cache, "*-shuffle_index.npy"), 0),
    "an array removed": lambda cache: one(cache, "*-document_index.npy").unlink(),
    "a description cut": lambda cache: os.truncate(one(cache, "*-description.txt"), 3),
    "a blend's index cut": lambda cache: os.truncate(one(cache, "*-dataset_index.npy"), 1),
    "a manifest removed": lambda cache: one(cache, ".trackbed/*-train.json").unlink(),
    "a manifest cut": lambda cache: os.truncate(one(cache, ".trackbed/*-train.json"), 10),
    "all removed": remove_folder,
    "the memo cut": lambda cache: os.truncate(one(cache, ".trackbed/starts/*"), 100),
    "the memo removed": lambda cache: one(cache, ".trackbed/starts/*").unlink(),
    "the note of its use removed": lambda cache: one(cache, ".trackbed/uses/*").unlink(),
    "entries that nobody uses removed": lambda cache: remove(plan_removal(take_inventory(str(cache)), now=9e9)),
    "another token file": lambda cache: write_pair(cache.parent / "pair1", [13] * 60, seed=5),
    "a token file of the same size": lambda cache: write_pair(cache.parent / "pair1", [20] * 60, seed=6),
    "a longer .bin": lambda cache: os.truncate(cache.parent / "pair1.bin", 100_000),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_has_changed_the_next_start_is_right(tmp_path, change):
    write_pairs(tmp_path)
    write_pair(tmp_path / "pair1", [20] * 60, seed=7)
    config = config_of(tmp_path)
    build(config, SIZES)
    CHANGES[change](tmp_path / "cache")
    assert not is_remembered(config)
    assert tokens_in(build(config, SIZES)) == built_anew(tmp_path)
    assert is_remembered(config)
    assert tokens_in(build(config, SIZES)) == built_anew(tmp_path)


@pytest.mark.parametrize("end", [".idx", ".bin"])
def test_a_pair_that_is_replaced_between_start_and_first_read_is_an_error(tmp_path, end):
    write_pairs(tmp_path)
    build(config_of(tmp_path), SIZES)
    (train, _, _) = build(config_of(tmp_path), SIZES)
    other = tmp_path / "other"
    write_pair(other, [20] * 30)
    Path(f"{other}{end}").replace(tmp_path / f"pair0{end}")
    with pytest.raises(FormatError, match=rf"pair0\{end}: the file must be the one that was opened"):
        tokens_of(train, range(50))


def test_a_cached_array_that_is_cut_between_start_and_first_read_is_an_error_that_names_it(tmp_path):
    write_pairs(tmp_path)
    build(config_of(tmp_path), SIZES)
    (train, _, _) = build(config_of(tmp_path), SIZES)
    for path in (tmp_path / "cache").glob("*-shuffle_index.npy"):
        os.truncate(path, 130)
    with pytest.raises((CacheError, FormatError), match=r"shuffle_index\.npy.*start again"):
        tokens_of(train, range(50))


class Reversed(GPTDataset):
    """Another class, which may ask for other entries."""


def test_only_starts_of_the_gpt_dataset_itself_with_a_cache_are_remembered(tmp_path):
    config = config_of(tmp_path)
    assert Start(GPTDataset, SIZES, config).key is not None
    assert Start(Reversed, SIZES, config).key is None
    for options in ({"order": "instant"}, {"path_to_cache": None}, {"defer_npy_index_mmap": True}):
        assert Start(GPTDataset, SIZES, config_of(tmp_path, **options)).key is None


def test_a_memo_that_does_not_fit_its_start_is_an_error_that_names_it(tmp_path):
    write_pairs(tmp_path)
    config = config_of(tmp_path)
    build(config, SIZES)
    start = Start(GPTDataset, SIZES, config)
    start.memo.content["entries"].pop()
    builder = BlendedMegatronDatasetBuilder(GPTDataset, SIZES, lambda: True, config)
    with pytest.raises(CacheError, match=r"starts/.*\.json: must name the entries of this start.*remove it"):
        start.recalled(builder._build)


@pytest.mark.parametrize("absent", [(), (0,), (1, 2)])
def test_ranks_share_the_look_at_what_is_remembered(tmp_path, absent):
    write_pairs(tmp_path)
    config = config_of(tmp_path)

    def start(group):
        wants = group.rank not in absent
        return BlendedMegatronDatasetBuilder(GPTDataset, SIZES, lambda: wants, config, group=group).build()

    run_ranks(4, start)
    assert is_remembered(config)
    wanted = built_anew(tmp_path)
    found = run_ranks(4, start)
    for rank, datasets in enumerate(found):
        assert (datasets == [None] * 3) if rank in absent else (tokens_in(datasets) == wanted)
    os.truncate(one(tmp_path / "cache", "*-sample_index.npy"), 100)
    run_ranks(4, start)
    assert is_remembered(config)
    assert tokens_in(build(config, SIZES)) == wanted


def test_a_rank_that_remembers_nothing_looks_with_all_others(tmp_path):
    write_pairs(tmp_path)
    build(config_of(tmp_path), SIZES)
    wanted = built_anew(tmp_path)
    elsewhere = config_of(tmp_path, path_to_cache=str(tmp_path / "elsewhere"))
    build(elsewhere, SIZES)
    remove_folder(tmp_path / "elsewhere" / ".trackbed" / "starts")

    def start(group):
        config = elsewhere if group.rank == 1 else config_of(tmp_path)
        return BlendedMegatronDatasetBuilder(GPTDataset, SIZES, lambda: True, config, group=group).build()

    for datasets in run_ranks(3, start):
        assert tokens_in(datasets) == wanted


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"random_seed": 8}, "random_seed is 7 on rank 0 and 8 on rank 1"),
        ({"order": "instant"}, 'order is "megatron" on rank 0 and "instant" on rank 1'),
    ],
)
def test_ranks_that_remember_different_starts_all_say_so(tmp_path, other, words):
    write_pairs(tmp_path)
    build(config_of(tmp_path), SIZES)
    build(config_of(tmp_path, **other), SIZES)

    def start(group):
        config = config_of(tmp_path, **(other if group.rank == 1 else {}))
        try:
            BlendedMegatronDatasetBuilder(GPTDataset, SIZES, lambda: True, config, group=group).build()
        except CollectiveError as error:
            return str(error)

    for said in run_ranks(2, start):
        assert words in said


def test_what_is_wrong_with_a_file_is_not_raised_by_the_rank_that_remembers(tmp_path):
    loop = tmp_path / "cache" / f"{STEM}-description.txt"
    loop.parent.mkdir()
    loop.symlink_to(loop)
    with collecting() as pending:
        open_(tmp_path / "cache")
        with pytest.raises(CacheError, match="symbolic links"):
            pending[0].see()
        Start(GPTDataset, SIZES, config_of(tmp_path)).remember(pending, {})
    assert not (tmp_path / "cache" / ".trackbed").exists()


def test_memos_of_long_ago_go_with_what_nobody_uses(tmp_path):
    write_pairs(tmp_path)
    build(config_of(tmp_path), SIZES)
    memo = one(tmp_path / "cache", ".trackbed/starts/*")
    assert json.loads(memo.read_text().splitlines()[0])["format"] == "trackbed-memo"
    now = memo.stat().st_mtime
    remove(plan_removal(take_inventory(str(tmp_path / "cache")), now=now + 1000))
    assert memo.exists()
    remove(plan_removal(take_inventory(str(tmp_path / "cache")), now=now + 100_000))
    assert not memo.exists()
