import dataclasses
import inspect

import numpy as np
import pytest

from tests.support.files.blends import build, gpt_config, tokens_of, write_pair, write_pairs
from trackbed.datasets import BlendedMegatronDatasetConfig, GPTDataset, GPTDatasetConfig, NullTokenizer
from trackbed.errors import ArgumentError
from trackbed.index import InstantOrder, Permutation
from trackbed.index.balanced import balanced_blend
from trackbed.index.legacy_random import LegacyShuffle

BLEND = (["a", "b"], [1.0, 2.0])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"random_seed": -1}, "random_seed must be a whole number in"),
        ({"sequence_length": 0}, "sequence_length must be a whole number at least 1, found 0"),
        ({"blend": BLEND}, "split must be given with blend"),
        ({"blend": ([], None), "split": "1"}, "blend must name at least one prefix"),
        ({"blend": (["a"], [1.0, 2.0]), "split": "1"}, "as many weights as prefixes, found 2 and 1"),
        ({"blend": BLEND, "split": "1", "blend_per_split": [BLEND, None, None]}, "blend must be None"),
        ({"split": "1", "blend_per_split": [BLEND, None, None]}, "split must be None"),
        ({"blend_per_split": [BLEND, None]}, "must have 3 entries, found 2"),
        ({"blend_per_split": [BLEND, (["a"], [1.0, 2.0]), None]}, r"blend_per_split\[valid\]"),
        ({"blend": BLEND, "split": "x"}, "split must be up to 3 numbers"),
        ({"fast_cache_load": True}, "fast_cache_load needs path_to_cache"),
        ({"defer_npy_index_mmap": True}, "defer_npy_index_mmap needs path_to_cache"),
        ({"fast_cache_load": True, "path_to_cache": "c", "blend": BLEND, "split": "1"}, "needs blend_per_split"),
        ({"multiple_validation_sets": True}, "multiple_validation_sets needs blend_per_split"),
        ({"num_dataset_builder_threads": 0}, "at least 1, found 0"),
        ({"mid_level_dataset_surplus": -0.1}, "mid_level_dataset_surplus must be at least 0"),
        ({"order": "random"}, "order must be one of .*found 'random'"),
        ({"tokenizer": None}, "tokenizer must be given"),
        ({"eod_mask_loss": None}, "eod_mask_loss must be given"),
        ({"hybrid_context_parallel": True}, "hybrid_context_parallel must be False"),
        ({"object_storage_cache_path": "x", "s3_cache_path": "y"}, "are two names of one option, found 'x' and 'y'"),
        ({"s3_cache_path": 3}, "path_to_idx_cache must be the path of a folder, found 3"),
        (
            {"path_to_cache": "s3://bucket/cache"},
            "path_to_cache must be a local or shared folder, found the address s3",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused_as_both_kinds_of_error(fields, words):
    with pytest.raises(ValueError, match=words):
        gpt_config(None, **fields)
    with pytest.raises(AssertionError):
        gpt_config(None, **fields)


def test_positional_arguments_are_megatron_cores():
    names = [name for name, p in inspect.signature(GPTDatasetConfig).parameters.items() if p.kind is not p.KEYWORD_ONLY]
    assert names == [
        *("random_seed", "sequence_length", "blend", "blend_per_split", "multiple_validation_sets"),
        *("full_validation", "split", "num_dataset_builder_threads", "path_to_cache", "mmap_bin_files", "tokenizer"),
        *("mid_level_dataset_surplus", "allow_ambiguous_pad_tokens", "fast_cache_load", "defer_npy_index_mmap"),
        *("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask"),
        *("drop_last_partial_validation_sequence", "add_extra_token_to_sequence", "object_storage_cache_path"),
        *("data_parallel_size", "sequence_parallel_size", "hybrid_context_parallel", "sequences_per_dataset"),
        *("context_parallel_size", "inter_document_masking"),
    ]


def test_without_a_blend_data_is_made_up():
    config = BlendedMegatronDatasetConfig(1, 8)
    assert config.mock
    assert config.split == "1,1,1"
    assert config.split_matrix[0][0] == 0


def test_three_absent_blends_are_none():
    assert gpt_config(None, blend_per_split=[None, None, None]).mock


@pytest.mark.parametrize(("vocab_size", "code"), [(65_535, 8), (65_536, 4)])
def test_the_token_type_follows_from_the_vocabulary(vocab_size, code):
    # A null tokenizer has one id more, which ends a document.
    assert gpt_config(None, tokenizer=NullTokenizer(vocab_size)).token_dtype_code == code


def test_false_where_none_is_the_default_means_the_default():
    config = gpt_config(None, multiple_validation_sets=False, full_validation=False)
    assert config.mock


@dataclasses.dataclass
class Mine(GPTDatasetConfig):
    """A third party's configuration."""

    flavour: str = "vanilla"


def test_a_third_party_can_extend_configuration_and_dataset(tmp_path):
    class Flavoured(GPTDataset):
        @staticmethod
        def _key_config_attributes():
            return [*GPTDataset._key_config_attributes(), "flavour"]

    options = {"tokenizer": NullTokenizer(100), **dict.fromkeys(("reset_position_ids", "reset_attention_mask"), False)}
    found = []
    for flavour in ("vanilla", "lemon"):
        config = Mine(
            random_seed=7,
            sequence_length=16,
            blend=(write_pairs(tmp_path), None),
            split="8,1,1",
            path_to_cache=str(tmp_path / "cache"),
            eod_mask_loss=False,
            flavour=flavour,
            **options,
        )
        config.random_seed = 8  # an ordinary dataclass can be changed
        found.append(build(config, (None, None, None), cls=Flavoured)[0])
    assert [dataset.datasets[0].unique_identifiers["flavour"] for dataset in found] == ["vanilla", "lemon"]
    assert found[0].unique_description_hash != found[1].unique_description_hash


@pytest.mark.parametrize("value", [1.5, 1.0, "1", None, True, float("nan")])
@pytest.mark.parametrize("name", ["random_seed", "sequence_length"])
def test_a_seed_and_a_length_are_whole_numbers(name, value):
    with pytest.raises(ArgumentError, match=rf"{name} must be a whole number .*, found "):
        gpt_config(None, **{name: value})


@pytest.mark.parametrize("value", [1.5, "1", None])
def test_every_order_refuses_a_seed_that_is_no_whole_number(value):
    for make in (
        lambda: LegacyShuffle(value),
        lambda: balanced_blend([3, 2], seed=value),
        lambda: Permutation(10, seed=value),
        lambda: InstantOrder(sizes=[5], weights=[1], seed=value),
    ):
        with pytest.raises(ArgumentError, match="whole number"):
            make()


def test_numbers_of_numpy_are_taken(tmp_path):
    prefix = write_pair(tmp_path / "pair", [9] * 30)
    wanted = None
    for number in (int, np.int64):
        options = {"sequence_length": number(8), "random_seed": number(3), "split": "1"}
        train = build(gpt_config(tmp_path / "cache", blend=([prefix], None), **options), (number(20), None, None))[0]
        wanted = tokens_of(train, range(20)) if wanted is None else wanted
        assert tokens_of(train, range(20)) == wanted


@pytest.mark.parametrize("weight", ["1", "x", 10**400, None, b"1", float("nan"), -1])
def test_a_weight_that_is_no_finite_number_is_refused(weight):
    with pytest.raises(ArgumentError, match="must have finite weights of at least 0"):
        gpt_config(None, blend=(["a", "b"], [weight, 1]), split="1")


@pytest.mark.parametrize("cache", ["a\0b", 5, b"x"])
def test_a_cache_that_is_no_path_is_refused(cache):
    with pytest.raises(ArgumentError, match="path_to_cache must be the path of a folder or None, found"):
        gpt_config(None, path_to_cache=cache, blend=(["a"], None), split="1")
