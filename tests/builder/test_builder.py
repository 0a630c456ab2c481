import gc
import shutil
import weakref

import numpy as np
import pytest
import torch

from tests.support.files.blends import build, gpt_config, tokens_of, write_pair, write_pairs
from trackbed.builder import BlendedMegatronDatasetBuilder, build_generic_dataset
from trackbed.datasets import BlendedDataset, GPTDataset, MegatronDataset
from trackbed.errors import ArgumentError, CacheError, PlanError


def test_each_split_is_a_blend_of_its_part_of_every_file(tmp_path):
    config = gpt_config(tmp_path / "cache", blend=(write_pairs(tmp_path), [3, 2, 1]), split="8,1,1")
    datasets = build(config, (60, 6, 6))
    assert [type(dataset) for dataset in datasets] == [BlendedDataset] * 3
    assert [len(dataset) for dataset in datasets] == [60, 6, 6]
    for members in zip(*(dataset.datasets for dataset in datasets), strict=True):
        ranges = [(int(member.indices[0]), int(member.indices[-1]) + 1) for member in members]
        assert ranges[0][0] == 0
        assert ranges[0][1] == ranges[1][0]
        assert ranges[1][1] == ranges[2][0]
        assert ranges[2][1] == len(members[0].dataset)


def test_one_prefix_without_a_weight_is_not_blended(tmp_path):
    config = gpt_config(tmp_path / "cache", blend=(write_pairs(tmp_path, 1), None), split="9,1,0")
    train, valid, test = build(config, (20, None, 3))
    assert type(train) is type(valid) is GPTDataset
    assert test is None


def test_one_prefix_with_a_weight_is_blended(tmp_path, caplog):
    config = gpt_config(tmp_path / "cache", blend=(write_pairs(tmp_path, 1), [2.0]), split="9,1,0")
    with caplog.at_level("INFO"):
        train, _, _ = build(config, (20, 2, 0))
    assert type(train) is BlendedDataset
    assert "a blend of one dataset" in caplog.text


def test_splits_can_have_blends_of_their_own(tmp_path):
    first, second, third = write_pairs(tmp_path)
    config = gpt_config(tmp_path / "cache", blend_per_split=[([first, second], [1, 3]), ([third], None), None])
    train, valid, test = build(config, (20, None, None))
    assert type(train) is BlendedDataset
    assert type(valid) is GPTDataset
    assert len(valid.indices) == len(valid.dataset)
    assert test is None


def test_validation_sets_can_stay_apart(tmp_path):
    first, second, third = write_pairs(tmp_path)
    config = gpt_config(
        tmp_path / "cache",
        multiple_validation_sets=True,
        full_validation=True,
        blend_per_split=[([first], None), ([second, third], None), None],
    )
    _, valid, _ = build(config, (20, None, None))
    assert [dataset.dataset_path for dataset in valid] == [second, third]


def test_full_validation_takes_no_size(tmp_path):
    config = gpt_config(
        tmp_path / "cache", full_validation=True, blend_per_split=[None, (write_pairs(tmp_path), None), None]
    )
    with pytest.raises(ArgumentError, match="full_validation needs a size of None for split valid, found 5"):
        build(config, (None, 5, None))


def test_weights_need_a_size_but_only_for_splits_that_are_used(tmp_path):
    blend = (write_pairs(tmp_path), [1, 1, 1])
    assert build(gpt_config(tmp_path / "cache", blend=blend, split="1"), (20, None, None))[1:] == [None, None]
    with pytest.raises(AssertionError, match="size of split valid must be a number for a blend with weights"):
        build(gpt_config(tmp_path / "cache", blend=blend, split="9,1"), (20, None, None))


@pytest.mark.parametrize("sizes", [(1, 2), (1, -1, 2)])
def test_sizes_that_mean_nothing_are_refused(tmp_path, sizes):
    config = gpt_config(tmp_path / "cache", blend=(write_pairs(tmp_path, 1), None), split="1,1,1")
    with pytest.raises(ArgumentError, match="size"):
        build(config, sizes)


def test_threads_build_the_same_files(tmp_path):
    prefixes = write_pairs(tmp_path, 6)
    for threads in (1, 4):
        cache = tmp_path / f"cache{threads}"
        build(gpt_config(cache, blend=(prefixes, [1] * 6), split="8,1,1", num_dataset_builder_threads=threads))
    names = sorted(path.name for path in (tmp_path / "cache1").glob("*-*"))
    assert len(names) == 3 * (6 * 4 + 3)
    for name in names:
        assert (tmp_path / "cache1" / name).read_bytes() == (tmp_path / "cache4" / name).read_bytes()


def test_an_error_in_one_thread_is_raised_with_the_dataset_it_is_about(tmp_path):
    prefixes = [*write_pairs(tmp_path, 4), write_pair(tmp_path / "empty", [0])]
    config = gpt_config(tmp_path / "cache", blend=(prefixes, [1] * 5), split="1", num_dataset_builder_threads=3)
    with pytest.raises(PlanError, match="empty, split train"):
        build(config, (20, 0, 0))


def test_a_missing_file_is_named(tmp_path):
    config = gpt_config(tmp_path / "cache", blend=([str(tmp_path / "nowhere")], None), split="1")
    with pytest.raises(AssertionError, match=r"missing .*nowhere\.idx and .*nowhere\.bin"):
        build(config)


def test_without_a_cache_folder_indices_lie_beside_the_data_as_megatron_cores_do(tmp_path):
    (prefix,) = write_pairs(tmp_path, 1)
    build(gpt_config(None, blend=([prefix], None), split="9,1,0"))
    assert len(list((tmp_path / "pair0" / "cache" / "GPTDataset_indices").glob("*.npy"))) == 6


def test_other_flags_under_the_same_name_do_not_mix(tmp_path):
    """Megatron Core's names leave add_extra_token_to_sequence out."""
    blend = (write_pairs(tmp_path, 1), None)
    plain = build(gpt_config(tmp_path / "cache", blend=blend, split="1"), (20, 0, 0))[0]
    other = build(
        gpt_config(tmp_path / "cache", blend=blend, split="1", add_extra_token_to_sequence=False), (20, 0, 0)
    )[0]
    alone = build(
        gpt_config(tmp_path / "alone", blend=blend, split="1", add_extra_token_to_sequence=False), (20, 0, 0)
    )[0]
    assert plain.unique_description_hash == other.unique_description_hash
    assert tokens_of(other, range(5)) == tokens_of(alone, range(5))
    assert other.sample_index.tolist() == alone.sample_index.tolist()
    assert plain.sample_index.tolist() != other.sample_index.tolist()


def test_data_replaced_under_the_same_path_gets_indices_of_its_own(tmp_path):
    prefix = write_pair(tmp_path / "pair", [50] * 40)
    config = gpt_config(tmp_path / "cache", blend=([prefix], None), split="1")
    assert len(build(config, (None, None, None))[0]) == 124
    write_pair(tmp_path / "pair", [50] * 10)
    dataset = build(config, (None, None, None))[0]
    assert len(dataset) == 31
    assert len(tokens_of(dataset, range(31))) == 31


def test_a_copied_corpus_keeps_its_cache(tmp_path, caplog):
    prefix = write_pair(tmp_path / "pair", [50] * 40)
    config = gpt_config(tmp_path / "cache", blend=([prefix], None), split="1")
    build(config, (None, None, None))
    for suffix in ("bin", "idx"):
        shutil.copyfile(f"{prefix}.{suffix}", f"{prefix}.copy")
        shutil.move(f"{prefix}.copy", f"{prefix}.{suffix}")
    build(config, (None, None, None))
    assert not caplog.text


def test_a_fast_start_needs_every_index(tmp_path):
    options = {"blend_per_split": [(write_pairs(tmp_path), [1, 1, 1]), None, None]}
    with pytest.raises(CacheError, match="fast_cache_load needs every index"):
        build(gpt_config(tmp_path / "cache", fast_cache_load=True, **options))
    slow = build(gpt_config(tmp_path / "cache", **options))[0]
    fast = build(gpt_config(tmp_path / "cache", fast_cache_load=True, **options))[0]
    assert tokens_of(slow, range(10)) == tokens_of(fast, range(10))


class Rows(MegatronDataset):
    """A third party's dataset over a table of numbers."""

    def __init__(self, dataset, dataset_path, indices, num_samples, index_split, config):
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self.rows = np.resize(indices, len(indices) if num_samples is None else num_samples)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset):
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path, config):
        return np.load(dataset_path)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, idx):
        return {"text": self.dataset[self.rows[idx]]}


def test_a_third_partys_dataset_can_be_blended(tmp_path):
    paths = []
    for number in range(2):
        paths.append(str(tmp_path / f"{number}.npy"))
        np.save(paths[-1], np.arange(20).reshape(10, 2) + 100 * number)
    config = gpt_config(tmp_path / "cache", blend=(paths, [1, 1]), split="5,5,0")
    train, valid, _ = build(config, (8, 4, 0), cls=Rows)
    assert [len(train), len(valid)] == [8, 4]
    assert {int(train[position]["text"][0]) // 100 for position in range(8)} == {0, 1}


def test_a_generic_dataset_is_what_its_class_makes_of_the_arguments():
    assert build_generic_dataset(dict, lambda: False, True, [("a", 1)]) == {"a": 1}
    assert BlendedMegatronDatasetBuilder.build_generic_dataset(list, lambda: True, False, "ab") == ["a", "b"]


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("kind", [OSError, PermissionError, FileNotFoundError])
@pytest.mark.parametrize("synchronize", [True, False])
def test_a_generic_dataset_that_cannot_write_names_the_cache_and_the_reason(kind, synchronize):
    def make(reason):
        raise kind(reason)

    words = rf"^Failed to write dataset materials: .* raised {kind.__name__}: disk; set path_to_cache of the config"
    with pytest.raises(CacheError, match=words) as caught:
        build_generic_dataset(make, lambda: True, synchronize, "disk")
    assert type(caught.value.__cause__) is kind
    assert build_generic_dataset(make, lambda: False, synchronize, "disk") is None


def test_data_of_the_same_sizes_replaced_under_the_same_path_gets_indices_of_its_own(tmp_path, caplog):
    prefix = write_pair(tmp_path / "pair", [10, 70] * 20)
    config = gpt_config(tmp_path / "cache", blend=([prefix], None), split="1")
    before = build(config, (None, None, None))[0].sample_index.tolist()
    sizes = [(tmp_path / f"pair.{suffix}").stat().st_size for suffix in ("bin", "idx")]
    write_pair(tmp_path / "pair", [70, 10] * 20)
    assert [(tmp_path / f"pair.{suffix}").stat().st_size for suffix in ("bin", "idx")] == sizes
    after = build(config, (None, None, None))[0].sample_index.tolist()
    assert after != before
    assert "another index has this name (data:" in caplog.text
    assert build(config, (None, None, None))[0].sample_index.tolist() == after


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_of_cycles_is_left_as_it_was(tmp_path, is_enabled):
    write_pairs(tmp_path)
    cycle = _Cycle()
    gone = weakref.ref(cycle)
    (gc.enable if is_enabled else gc.disable)()
    try:
        build(gpt_config(tmp_path / "cache", blend=([str(tmp_path / "pair0")], None), split="1"))
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()
    del cycle
    gc.collect()
    assert gone() is None


def test_objects_that_are_kept_from_the_collector_stay_so(tmp_path):
    write_pairs(tmp_path)
    gc.freeze()
    try:
        kept = gc.get_freeze_count()
        build(gpt_config(tmp_path / "cache", blend=([str(tmp_path / "pair0")], None), split="1"))
        assert gc.get_freeze_count() > kept // 2
    finally:
        gc.unfreeze()


class _Cycle:
    def __init__(self):
        self.itself = self


@pytest.mark.parametrize("start", ["cold", "warm"])
def test_a_start_leaves_the_interpreters_switches_alone(tmp_path, start):
    prefixes = write_pairs(tmp_path)
    config = gpt_config(tmp_path / "cache", blend=(prefixes, [3, 2, 1]), split="8,1,1")
    if start == "warm":
        build(config)
    seen = []

    class Watching(list):
        """Sizes that are looked at in the middle of a start."""

        def __getitem__(self, number):
            seen.append((gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()))
            return super().__getitem__(number)

        def __iter__(self):
            seen.append((gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()))
            return super().__iter__()

    before = (True, gc.get_threshold(), gc.get_freeze_count())
    BlendedMegatronDatasetBuilder(GPTDataset, Watching([50, 5, 5]), lambda: True, config).build()
    assert seen
    assert set(seen) == {before}
