"""Datasets of BERT and T5: samples of the kernel and of Python, subclasses, and errors."""

import os
import pickle
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

import trackbed.megatron
from tests.support.files.tidy import remove_folder
from tests.support.megatron_core.cases import write_pair
from tests.support.megatron_core.masked_cases import masked_cases
from tests.support.megatron_core.oracle import build_with_trackbed
from tests.support.megatron_core.word_piece_tokenizer import WordPieceTokenizer
from tests.support.processes.forked import run_in_fork
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.comm import run_ranks
from trackbed.datasets import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
    MaskedWordPieceDataset,
    MaskedWordPieceDatasetConfig,
    T5MaskedWordPieceDataset,
    T5MaskedWordPieceDatasetConfig,
)
from trackbed.errors import ArgumentError, CacheError, CollectiveError, FormatError, PlanError, TrackbedError
from trackbed.loading import BatchStream, MegatronPretrainingSampler

SIZE = 300
TOKENIZER = WordPieceTokenizer(seed=1, size=SIZE, continues=0.4, pad=0, sentinels=40)
MASKING = {
    "random_seed": 1234,
    "sequence_length": 64,
    "masking_probability": 0.2,
    "short_sequence_probability": 0.1,
    "masking_max_ngram": 3,
    "masking_do_full_word": True,
    "masking_do_permutation": False,
    "masking_use_longer_ngrams": False,
    "masking_use_geometric_distribution": False,
    "tokenizer": TOKENIZER,
}
MODELS = {
    "bert": (BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig, {"classification_head": True}),
    "t5": (T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig, {"sequence_length_decoder": 64}),
}


def write(folder, *, documents=40, seed=0, longest=30, tokens=SIZE, name="a"):
    rng = np.random.default_rng(seed)
    borders = np.cumsum([0, *rng.integers(0, 12, documents)])
    lengths = rng.integers(0, longest, borders[-1])
    write_pair(folder / name, rng.integers(0, tokens, int(lengths.sum())).astype(np.uint16), lengths, borders)
    return str(folder / name)


def config_of(model, prefix, folder, **changes):
    _, config, extra = MODELS[model]
    blend = {"blend": ([prefix], None), "split": "1", "path_to_cache": str(folder / "cache")}
    return config(**{**MASKING, **extra, **blend, **changes})


def build(model, prefix, folder, *, cls=None, size=100, **changes):
    config = config_of(model, prefix, folder, **changes)
    return BlendedMegatronDatasetBuilder(cls or MODELS[model][0], [size, 0, 0], lambda: True, config).build()[0]


@pytest.fixture(params=MODELS)
def model(request):
    return request.param


def members_of(dataset):
    return getattr(dataset, "datasets", [dataset])


def assert_equal(one, other):
    assert list(one) == list(other)
    for name in one:
        assert type(one[name]) is type(other[name])
        assert np.array_equal(one[name], other[name]), name
        assert not isinstance(one[name], np.ndarray) or one[name].dtype == other[name].dtype == np.int64


@given(case=st.sampled_from(["bert", "t5"]).flatmap(masked_cases), seed=st.integers(0, 2**32 - 1))
def test_the_kernel_makes_the_samples_that_python_makes(case, seed, tmp_path):
    remove_folder(tmp_path / "case")
    case.write(tmp_path / "case")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            built = build_with_trackbed(case.request(tmp_path / "case", tmp_path / "case" / "cache"))
        except (ArgumentError, TrackbedError):
            return
    rng = np.random.default_rng(seed)
    for dataset in built:
        if dataset is None or len(dataset) == 0:
            continue
        positions = rng.integers(-len(dataset), len(dataset), 9).tolist()
        for member in members_of(dataset):
            for position in rng.integers(-len(member), len(member), 9).tolist() if len(member) else ():
                try:
                    wanted = member._make_sample(position)
                except ArgumentError:
                    assert member._from_kernel(position) is None
                    positions = []
                else:
                    assert_equal(member._from_kernel(position), wanted)
        try:
            samples = [dataset[position] for position in positions]
        except ArgumentError:
            continue
        if samples:
            batch = dataset.gather(positions)
            assert_equal(dict(batch), default_collate(samples))
            assert dataset.gather(positions, out=batch, num_threads=2) is batch
            assert_equal(default_collate(dataset.__getitems__(positions)), default_collate(samples))


def test_groups_of_pairs_are_read_as_if_they_were_merged(model, tmp_path):
    pairs = [write(tmp_path, seed=seed, name=f"part{seed}") for seed in range(3)]
    merged = np.concatenate([np.fromfile(f"{pair}.bin", dtype=np.uint16) for pair in pairs])
    trackbed_pairs = [trackbed.tokens.IndexedDataset(pair) for pair in pairs]
    lengths = np.concatenate([pair.sequence_lengths for pair in trackbed_pairs])
    borders, before = [0], 0
    for pair in trackbed_pairs:
        borders += [before + border for border in pair.document_indices[1:].tolist()]
        before += len(pair)
    write_pair(tmp_path / "merged", merged, lengths, np.array(borders))
    group = build(model, "group", tmp_path, groups={"group": pairs})
    whole = build(model, str(tmp_path / "merged"), tmp_path)
    assert len(group) == len(whole) > 50
    for position in range(-1, 50):
        assert_equal(group[position], whole[position])
    assert_equal(dict(group.gather(range(50))), dict(whole.gather(range(50))))


def test_a_loader_gives_the_samples_in_batches(model, tmp_path):
    dataset = build(model, write(tmp_path), tmp_path)
    sampler = MegatronPretrainingSampler(len(dataset), 0, 8, 0, 1)
    for number, batch in enumerate(BatchStream(dataset, sampler)):
        assert_equal(dict(batch), default_collate([dataset[8 * number + row] for row in range(8)]))


def test_a_copy_in_another_process_reads_the_same(model, tmp_path):
    dataset = build(model, write(tmp_path), tmp_path)
    wanted = [dataset[position] for position in range(5)]
    copied = pickle.loads(pickle.dumps(dataset))
    assert copied.fingerprint == dataset.fingerprint
    for position in range(5):
        assert_equal(copied[position], wanted[position])
    found = run_in_fork(lambda: [dataset[position] for position in range(5)])
    for one, other in zip(found, wanted, strict=True):
        assert_equal(one, other)


def test_an_index_is_opened_late_if_that_is_wanted(model, tmp_path):
    prefix = write(tmp_path)
    first = build(model, prefix, tmp_path)
    late = build(model, prefix, tmp_path, defer_npy_index_mmap=True)
    assert late.sample_index is None
    assert_equal(late[3], first[3])
    assert np.array_equal(late.sample_index, first.sample_index)


def test_files_that_are_not_mapped_are_read_in_python(model, tmp_path):
    prefix = write(tmp_path)
    mapped, read = build(model, prefix, tmp_path), build(model, prefix, tmp_path, mmap_bin_files=False)
    assert read._from_kernel(3) is None
    assert_equal(read[3], mapped[3])
    assert_equal(dict(read.gather([1, 2])), dict(mapped.gather([1, 2])))


class Shouting(BERTMaskedWordPieceDataset):
    """Masks with a token of its own, which it draws."""

    def _get_token_mask(self, numpy_random_state):
        return SIZE - 1 - int(numpy_random_state.randint(0, 3))


class Shorter(T5MaskedWordPieceDataset):
    """Masks the first half of a sample."""

    def _create_masked_lm_predictions(self, token_ids, target_sequence_length, numpy_random_state):
        half = len(token_ids) // 2
        found = super()._create_masked_lm_predictions(token_ids[:half], target_sequence_length, numpy_random_state)
        return found[0] + list(token_ids[half:]), *found[1:]


class Reversed(BERTMaskedWordPieceDataset):
    """Reads the samples of Megatron Core's index from the end."""

    def _build_sample_index(self, sequence_length, min_sentences_per_sample):
        return super()._build_sample_index(sequence_length, min_sentences_per_sample)[::-1]


class Numbered(T5MaskedWordPieceDataset):
    """Adds a key to each sample."""

    def __getitem__(self, idx):
        return {**super().__getitem__(idx), "number": idx}


class Own(MaskedWordPieceDataset):
    """A dataset of its own, on Megatron Core's base class."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.sample_index = self._build_sample_index(self.config.sequence_length, 1)

    def __getitem__(self, idx):
        first, stop, target = self.sample_index[idx].tolist()
        text = np.concatenate([self.dataset[number] for number in range(first, stop)]).tolist()[:target]
        random = np.random.RandomState(self.config.random_seed + idx)
        masked, positions, labels, _, _ = self._create_masked_lm_predictions(text, target, random)
        labelled = np.full(self.config.sequence_length, -1)
        labelled[positions] = labels
        return {"text": np.array(masked + [0] * (self.config.sequence_length - len(masked))), "labels": labelled}

    def _get_token_mask(self, numpy_random_state):
        return self.config.tokenizer.mask


def test_hooks_of_subclasses_are_called(tmp_path):
    prefix = write(tmp_path)
    for cls, name in ((Shouting, "bert"), (Shorter, "t5"), (Reversed, "bert"), (Numbered, "t5")):
        theirs, ours = build(name, prefix, tmp_path, cls=cls), build(name, prefix, tmp_path)
        batch = theirs.gather([4, 7])
        assert_equal(dict(batch), default_collate([theirs[4], theirs[7]]))
        if cls is Shouting:
            drawn = set(theirs[4]["text"].tolist()) - set(ours[4]["text"].tolist())
            assert TOKENIZER.mask not in theirs[4]["text"]
            assert drawn <= {SIZE - 1, SIZE - 2, SIZE - 3, *range(SIZE)}
        if cls is Shorter:
            assert any(not np.array_equal(theirs[at]["text_enc"], ours[at]["text_enc"]) for at in range(9))
        if cls is Reversed:
            assert np.array_equal(theirs.sample_index, ours.sample_index[::-1])
            assert pickle.loads(pickle.dumps(theirs)).sample_index[0].tolist() == theirs.sample_index[0].tolist()
        if cls is Numbered:
            assert batch["number"].tolist() == [4, 7]


def test_a_dataset_on_the_base_class_masks_its_own_samples(tmp_path):
    prefix, folder = write(tmp_path), tmp_path / "cache"
    arguments = {**MASKING, "blend": ([prefix], None), "split": "1", "path_to_cache": str(folder)}
    config = MaskedWordPieceDatasetConfig(**arguments)
    dataset = BlendedMegatronDatasetBuilder(Own, [50, 0, 0], lambda: True, config).build()[0]
    sample = dataset[3]
    assert (sample["labels"] >= 0).sum() == (sample["text"] == TOKENIZER.mask).sum() > 0
    assert_equal(dict(dataset.gather([3, 4])), default_collate([dataset[3], dataset[4]]))
    names = {path.name for path in folder.iterdir() if path.is_file()}
    stem = f"{dataset.unique_description_hash}-Own"
    assert names == {f"{stem}-description.txt", f"{stem}-sample_index.npy"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *[({name: None}, f"{name} must be given, found None") for name in MASKING if name.startswith("masking")],
        ({"tokenizer": None}, "tokenizer must be given"),
        ({"short_sequence_probability": None}, "short_sequence_probability must be given"),
        ({"classification_head": None}, "classification_head must be given"),
        ({"masking_probability": 0.0}, "masking_probability must be above 0 and below 1, found 0.0"),
        ({"masking_probability": 1.0}, "masking_probability must be above 0 and below 1, found 1.0"),
        ({"masking_probability": float("nan")}, "masking_probability"),
        ({"short_sequence_probability": 1.5}, r"short_sequence_probability must be in \[0, 1\], found 1.5"),
        ({"masking_max_ngram": 0}, r"masking_max_ngram must be a whole number in \[1, 1048576\], found 0"),
        ({"masking_max_ngram": 2.5}, r"masking_max_ngram must be a whole number in \[1, 1048576\], found 2.5"),
        (
            {"masking_do_permutation": True, "masking_use_geometric_distribution": True},
            "masking_do_permutation must be False with masking_use_geometric_distribution",
        ),
        ({"random_seed": 2**31 - 1}, "random_seed must be at most 2147483646 for masked samples, found 2147483647"),
        ({"sequence_length": 4}, "sequence_length must be at least 5 with short_sequence_probability 0.1, found 4"),
        (
            {"sequence_length": 3, "short_sequence_probability": 0.0},
            "sequence_length must be at least 4 with short_sequence_probability 0.0, found 3",
        ),
        ({"bert_vocabulary_order": "random"}, "bert_vocabulary_order must be 'listed' or 'sorted', found 'random'"),
    ],
)
def test_fields_of_bert_are_checked(changes, words):
    arguments = {**MASKING, "blend": (["a"], None), "split": "1", "classification_head": True, **changes}
    with pytest.raises(ArgumentError, match=words):
        BERTMaskedWordPieceDatasetConfig(**arguments)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sequence_length_decoder": None}, "sequence_length_decoder must be a whole number of at least 1, found None"),
        ({"sequence_length_decoder": 0}, "sequence_length_decoder must be a whole number of at least 1, found 0"),
        ({"sequence_length": 3}, "sequence_length must be at least 4 with short_sequence_probability 0.1, found 3"),
        (
            {"tokenizer": WordPieceTokenizer(seed=1, size=9, continues=0, pad=0, sentinels=0)},
            "additional_special_tokens_ids",
        ),
    ],
)
def test_fields_of_t5_are_checked(changes, words):
    arguments = {**MASKING, "blend": (["a"], None), "split": "1", "sequence_length_decoder": 64, **changes}
    with pytest.raises(ArgumentError, match=words):
        T5MaskedWordPieceDatasetConfig(**arguments)


def test_what_a_sample_of_t5_may_need_is_said_at_construction_and_when_it_does(tmp_path):
    few = WordPieceTokenizer(seed=1, size=SIZE, continues=0.4, pad=0, sentinels=2)
    with pytest.warns(UserWarning, match="additional_special_tokens_ids of the tokenizer should have 12 ids.*found 2:"):
        dataset = build("t5", write(tmp_path), tmp_path, tokenizer=few)
    with pytest.raises(
        ArgumentError, match=r"additional_special_tokens_ids of the tokenizer must have \d+ ids.*found 2"
    ):
        _ = [dataset[position] for position in range(len(dataset))]
    with pytest.warns(UserWarning, match="sequence_length_decoder should be 25.*found 10:"):
        dataset = build("t5", write(tmp_path), tmp_path, sequence_length_decoder=10)
    with pytest.raises(ArgumentError, match=r"sequence_length_decoder must be at least \d+ for sample \d+, found 10"):
        _ = [dataset[position] for position in range(len(dataset))]


@pytest.mark.parametrize(("model", "bound"), [("bert", "at least 2 sentences"), ("t5", "more than 512 tokens")])
def test_documents_that_give_no_sample_are_an_error_that_names_pair_split_and_bound(model, bound, tmp_path):
    lengths = np.array([5] if model == "bert" else [600, 600])
    write_pair(tmp_path / "a", np.ones(int(lengths.sum()), dtype=np.uint16), lengths, np.array([0, len(lengths)]))
    with pytest.raises(PlanError, match=f"{tmp_path}/a, split train: .*{bound}"):
        build(model, str(tmp_path / "a"), tmp_path)


def test_one_epoch_is_given_where_no_size_is_asked_for(model, tmp_path):
    dataset = build(model, write(tmp_path), tmp_path, size=None)
    assert len(dataset) > 10
    assert len(np.unique(np.asarray(dataset.sample_index)[:, 0])) == len(dataset)


def test_the_order_instant_is_refused(model, tmp_path):
    with pytest.raises(ArgumentError, match="must be built with order megatron or balanced, found 'instant'"):
        build(model, write(tmp_path), tmp_path, order="instant")


def test_a_token_that_the_vocabulary_lacks_is_named(model, tmp_path):
    dataset = build(model, write(tmp_path, tokens=5000), tmp_path)
    with pytest.raises(
        FormatError, match=r"split train: tokens must be in the tokenizer's vocabulary, found the id \d+"
    ):
        dataset[0]


def test_a_damaged_index_is_named(model, tmp_path):
    dataset = build(model, write(tmp_path), tmp_path)
    wrong = np.array(dataset.sample_index)
    wrong[:, 1] = 2**31
    dataset.sample_index = wrong
    with pytest.raises(CacheError, match=r"sample_index.*2147483648"):
        dataset[0]
    with pytest.raises(IndexError, match="a sample must be in"):
        dataset[len(dataset)]


def test_the_order_of_the_vocabulary_decides_random_tokens_and_the_fingerprint(tmp_path):
    prefix = write(tmp_path)
    listed, ordered = (
        build("bert", prefix, tmp_path, masking_probability=0.9, bert_vocabulary_order=order)
        for order in ("listed", "sorted")
    )
    assert listed.unique_description_hash == ordered.unique_description_hash
    assert listed.fingerprint != ordered.fingerprint
    assert ordered.token_lookup == sorted(listed.token_lookup) != listed.token_lookup
    assert any(not np.array_equal(listed[at]["text"], ordered[at]["text"]) for at in range(20))


def test_without_transformer_engine_its_version_is_asked_for():
    ones = torch.ones((1, 2))
    with pytest.raises(ArgumentError, match="test_te_version must be given where Transformer Engine is not installed"):
        T5MaskedWordPieceDataset.config_attention_mask(ones, ones, ones, ones)


def test_the_commands_of_the_cache_know_a_masked_index(model, tmp_path):
    dataset = build(model, write(tmp_path), tmp_path)
    for command in ("ls", "verify"):
        arguments = [sys.executable, "-m", "trackbed", "cache", command, str(tmp_path / "cache")]
        found = subprocess.run(arguments, capture_output=True, text=True, check=True)
        assert command == "verify" or dataset.unique_description_hash[:8] in found.stdout


HOOKS = (
    "numel_low_level_dataset",
    "build_low_level_dataset",
    "_key_config_attributes",
    "__len__",
    "__getitem__",
    "_build_sample_index",
    "_create_masked_lm_predictions",
    "_get_token_mask",
)


@pytest.mark.parametrize("name", HOOKS)
def test_every_method_that_is_overridden_is_called(name, model, tmp_path):
    """The methods of megatron-core 0.16.1's classes, but for the constructors."""
    base, calls = MODELS[model][0], []
    original = getattr(base, name)

    def method(*arguments):
        calls.append(arguments)
        return original(*arguments)

    derived = type("Derived", (base,), {name: staticmethod(method) if name in HOOKS[:3] else method})
    prefix = write(tmp_path)
    theirs, ours = build(model, prefix, tmp_path, cls=derived), build(model, prefix, tmp_path)
    assert len(theirs) == len(ours)
    assert_equal(theirs[7], ours[7])
    assert calls


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_file_that_was_truncated_is_an_error_each_time(suffix, model, tmp_path):
    prefix = write(tmp_path, documents=4000)

    def read():
        dataset = build(model, prefix, tmp_path)
        dataset.gather(range(10))
        os.truncate(f"{prefix}.{suffix}", 100)
        time.sleep(0.1)  # sizes are checked every 50 ms
        for _ in range(3):
            with pytest.raises(FormatError, match="truncated to 100"):
                _ = [dataset.gather(range(first, first + 10)) for first in range(0, 100, 10)]
        return True

    assert run_in_fork(read)


def test_a_hook_that_is_assigned_later_is_called(tmp_path, monkeypatch):
    prefix = write(tmp_path)
    dataset, plain = build("bert", prefix, tmp_path), build("bert", prefix, tmp_path)
    blended = build("bert", prefix, tmp_path, blend=([prefix, prefix], [1.0, 1.0]))
    dataset.gather([3])
    dataset._get_token_mask = lambda _random: TOKENIZER.mask
    assert set(dataset[3]["text"][dataset[3]["loss_mask"] == 1].tolist()) == {TOKENIZER.mask}
    assert np.array_equal(dataset.gather([3])["text"][0], dataset[3]["text"])

    blended.gather([3])
    monkeypatch.setattr(BERTMaskedWordPieceDataset, "_get_token_mask", lambda _self, _random: 7)
    for one in (plain, blended):
        text, labelled = one.gather([3])["text"][0].numpy(), one[3]["loss_mask"] == 1
        assert set(text[labelled].tolist()) == {7}


@pytest.mark.parametrize("kind", [np.int64, np.int32, ">u4", list, np.asfortranarray, float])
def test_an_index_of_another_type_gives_the_same_samples(kind, model, tmp_path):
    dataset, plain = build(model, write(tmp_path), tmp_path), build(model, str(tmp_path / "a"), tmp_path)
    rows = np.array(plain.sample_index)
    dataset.sample_index = (
        rows.tolist()
        if kind is list
        else kind(rows)
        if callable(kind) and not isinstance(kind, type)
        else rows.astype(kind)
    )
    if kind is float:
        with pytest.raises(CacheError, match="whole numbers"):
            dataset[4]
        return
    assert_equal(dataset[4], plain[4])
    assert_equal(dict(dataset.gather([4, 5])), dict(plain.gather([4, 5])))


def test_random_tokens_come_from_a_list_that_was_replaced(tmp_path):
    dataset = build("bert", write(tmp_path), tmp_path, masking_probability=0.9)
    dataset.gather([0])
    dataset.token_lookup = [SIZE - 1]
    for one in (dataset, pickle.loads(pickle.dumps(dataset))):
        for position in range(5):
            assert_equal(one._from_kernel(position), one._make_sample(position))
    assert any((dataset[position]["text"] == SIZE - 1).sum() > 2 for position in range(20))


@pytest.mark.parametrize("rows", [0, 1, 50])
def test_an_index_with_too_few_rows_is_built_again(rows, model, tmp_path):
    prefix = write(tmp_path)
    wanted = np.array(build(model, prefix, tmp_path).sample_index)
    (path,) = (tmp_path / "cache").glob("*-sample_index.npy")
    remove_folder(tmp_path / "cache" / ".trackbed")
    np.save(path, wanted[:rows])
    assert np.array_equal(build(model, prefix, tmp_path).sample_index, wanted)


def test_a_length_that_leaves_no_space_for_special_tokens_is_damage(tmp_path):
    dataset = build("bert", write(tmp_path), tmp_path, short_sequence_probability=0.0)
    wrong = np.array(dataset.sample_index)
    wrong[:, 2] = dataset.config.sequence_length
    dataset.sample_index = wrong
    with pytest.raises(CacheError, match="a length of at most 61, found 64"):
        dataset[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"masking_do_full_word": "false"}, "masking_do_full_word must be True or False, found 'false'"),
        ({"classification_head": float("nan")}, "classification_head must be True or False, found nan"),
        ({"masking_probability": "0.15"}, "masking_probability must be a number, found '0.15'"),
        ({"masking_max_ngram": 10**9}, r"masking_max_ngram must be a whole number in \[1, 1048576\]"),
    ],
)
def test_values_of_other_types_are_refused(changes, words):
    arguments = {**MASKING, "blend": (["a"], None), "split": "1", "classification_head": True, **changes}
    with pytest.raises(ArgumentError, match=words):
        BERTMaskedWordPieceDatasetConfig(**arguments)


def test_values_of_numpy_are_taken(tmp_path):
    prefix = write(tmp_path)
    changes = {
        "masking_max_ngram": np.int64(3),
        "masking_do_full_word": np.bool_(True),
        "masking_probability": np.float64(0.2),
    }
    found, wanted = build("bert", prefix, tmp_path, **changes), build("bert", prefix, tmp_path)
    assert found.unique_description_hash == wanted.unique_description_hash
    assert_equal(found[3], wanted[3])


@pytest.mark.parametrize("position", [2**63, 2**70, -(2**70), np.uint64(2**64 - 1)])
def test_a_position_beyond_all_samples_is_an_index_error(position, model, tmp_path):
    dataset = build(model, write(tmp_path), tmp_path)
    for read in (lambda: dataset[position], lambda: dataset.gather([position])):
        with pytest.raises(IndexError, match="a sample must be"):
            read()


def test_ranks_must_draw_random_tokens_from_one_order_of_the_vocabulary(tmp_path):
    prefix = write(tmp_path)

    def work(group):
        order = ("listed", "sorted")[group.rank]
        config = config_of("bert", prefix, tmp_path, bert_vocabulary_order=order)
        return BlendedMegatronDatasetBuilder(
            BERTMaskedWordPieceDataset, [50, 0, 0], lambda: True, config, group=group
        ).build()

    with pytest.raises(CollectiveError, match="bert_vocabulary_order is"):
        run_ranks(2, work)


def test_a_balanced_blend_has_the_samples_of_its_members_and_says_whose(model, tmp_path):
    prefixes = [write(tmp_path, seed=seed, name=f"part{seed}") for seed in range(2)]
    blended = build(model, "", tmp_path, blend=(prefixes, [1.0, 3.0]), order="balanced")
    batch = blended.gather(range(100))
    assert next(iter(batch)) == "dataset_id"
    assert np.bincount(batch["dataset_id"].numpy()).tolist() == [25, 75]
    for position in range(40):
        number, sample = blended.locate(position)
        assert batch["dataset_id"][position] == number
        for name, value in blended.datasets[number][sample].items():
            assert np.array_equal(batch[name][position], value)
