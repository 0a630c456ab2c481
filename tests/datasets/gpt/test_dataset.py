import pickle

import numpy as np
import pytest
import torch

from tests.support.files.blends import EOD, build, gpt_config, tokens_of, write_pair, write_pairs
from trackbed.datasets import GPTDataset, NullTokenizer
from trackbed.datasets.start import Start
from trackbed.errors import ArgumentError, CacheError, FormatError, PlanError
from trackbed.index import Split
from trackbed.tokens import IndexedDataset


def one(tmp_path, *, lengths=(20, 0, 33, 7, 40), sizes=(10, None, None), **options):
    """The training split of one pair, all of whose documents belong to it."""
    prefix = write_pair(tmp_path / "pair", lengths)
    config = gpt_config(tmp_path / "cache", blend=([prefix], None), split="1", **options)
    return build(config, sizes)[0]


def stream(dataset):
    """All tokens in the order in which documents are visited."""
    return np.concatenate([dataset.dataset[int(document)] for document in dataset.document_index])


def test_a_sample_is_a_run_of_the_stream_of_visited_documents(tmp_path):
    dataset = one(tmp_path)
    tokens = stream(dataset)
    for position, sample in enumerate(dataset.shuffle_index.tolist()):
        found = dataset[position]
        assert found["tokens"].tolist() == tokens[sample * 16 : sample * 16 + 16].tolist()
        assert found["labels"].tolist() == tokens[sample * 16 + 1 : sample * 16 + 17].tolist()


def test_keys_come_in_megatron_cores_order(tmp_path):
    assert list(one(tmp_path)[0]) == ["tokens", "labels", "attention_mask", "loss_mask", "position_ids"]


def test_without_a_mask_there_is_none(tmp_path):
    assert "attention_mask" not in one(tmp_path, create_attention_mask=False)[0]


def test_types_and_shapes_are_megatron_cores(tmp_path):
    found = one(tmp_path)[0]
    assert {name: (value.dtype, tuple(value.shape)) for name, value in found.items()} == {
        "tokens": (torch.int64, (16,)),
        "labels": (torch.int64, (16,)),
        "attention_mask": (torch.bool, (1, 16, 16)),
        "loss_mask": (torch.float32, (16,)),
        "position_ids": (torch.int64, (16,)),
    }


def test_resets_stop_at_the_end_of_a_document(tmp_path):
    dataset = one(tmp_path, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    for position in range(len(dataset)):
        found = dataset[position]
        tokens = found["tokens"].tolist()
        place, document = [], []
        for at, token in enumerate(tokens):
            place.append(0 if at == 0 or tokens[at - 1] == EOD else place[-1] + 1)
            document.append(tokens[:at].count(EOD))
            assert found["loss_mask"][at] == (token != EOD)
        assert found["position_ids"].tolist() == place
        for row in range(16):
            seen = [column for column in range(16) if not found["attention_mask"][0, row, column]]
            assert seen == [column for column in range(row + 1) if document[column] == document[row]]


def test_position_none_is_the_first_sample_without_a_loss(tmp_path):
    dataset = one(tmp_path)
    assert dataset[None]["tokens"].tolist() == dataset[0]["tokens"].tolist()
    assert not dataset[None]["loss_mask"].any()
    assert dataset[0]["loss_mask"].all()


def test_negative_positions_count_from_the_end(tmp_path):
    dataset = one(tmp_path)
    assert tokens_of(dataset, [-1]) == tokens_of(dataset, [len(dataset) - 1])


def test_a_position_that_is_not_there_is_an_index_error(tmp_path):
    dataset = one(tmp_path)
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_without_the_extra_token_labels_end_with_padding_that_does_not_count(tmp_path):
    dataset = one(tmp_path, add_extra_token_to_sequence=False)
    found = dataset[0]
    assert found["labels"].tolist() == [*found["tokens"].tolist()[1:], 0]
    assert found["loss_mask"].tolist() == [1.0] * 15 + [0.0]


def test_a_partial_last_sample_of_validation_is_filled_up_with_padding_that_does_not_count(tmp_path):
    prefix = write_pair(tmp_path / "pair", [20, 17])
    config = gpt_config(
        tmp_path / "cache", blend=([prefix], None), split="0,1,0", drop_last_partial_validation_sequence=False
    )
    dataset = build(config, (None, None, None))[1]
    assert len(dataset) == 3
    last = dataset[dataset.shuffle_index.tolist().index(2)]
    assert last["loss_mask"].tolist() == [1.0] * 4 + [0.0] * 12
    assert last["tokens"].tolist()[5:] == [0] * 11


def test_a_partial_sample_after_an_empty_last_document_works_where_megatron_core_fails(tmp_path):
    prefix = write_pair(tmp_path / "pair", [20, 0])
    for seed in range(4):  # some seed visits the empty document last
        config = gpt_config(
            tmp_path / f"cache{seed}",
            random_seed=seed,
            blend=([prefix], None),
            split="0,1,0",
            drop_last_partial_validation_sequence=False,
        )
        dataset = build(config, (None, None, None))[1]
        real = IndexedDataset(prefix)[0].tolist()
        assert sum(dataset[position]["loss_mask"].sum() for position in range(2)) == 19
        assert dataset[dataset.shuffle_index.tolist().index(1)]["tokens"].tolist()[:4] == real[16:]


def test_document_borders_come_from_the_file_not_from_tokens(tmp_path):
    dataset = one(tmp_path, create_cu_seqlens=True, create_attention_mask=False)
    lengths = dataset.dataset.sequence_lengths[dataset.document_index]
    ends = np.cumsum(lengths)
    for position, sample in enumerate(dataset.shuffle_index.tolist()):
        found = dataset[position]
        inside = [end - sample * 16 for end in ends if sample * 16 < end < sample * 16 + 16]
        wanted = [0, *dict.fromkeys(inside)]
        assert found["cu_seqlens"].tolist() == wanted + [16] * (17 - len(wanted))
        assert found["cu_seqlens"].dtype == torch.int32
        assert found["max_seqlen"] == max(np.diff([*wanted, 16]))


def test_a_split_without_tokens_is_an_error_where_megatron_core_hangs(tmp_path):
    prefix = write_pair(tmp_path / "pair", [20, 30])
    config = gpt_config(tmp_path / "cache", blend=([prefix], None), split="99,1,0")
    with pytest.raises(PlanError, match=r"pair, split valid: a dataset must have tokens to give 5 samples"):
        build(config, (10, 5, 0))


def test_documents_that_are_not_consecutive_can_be_chosen(tmp_path):
    prefix = write_pair(tmp_path / "pair", [20, 30, 25])
    config = gpt_config(tmp_path / "cache", blend=([prefix], None), split="1")
    dataset = GPTDataset(IndexedDataset(prefix), prefix, np.array([0, 2]), None, Split.train, config)
    assert set(dataset.document_index.tolist()) == {0, 2}


def test_a_dataset_goes_to_a_worker_without_its_indices(tmp_path):
    dataset = one(tmp_path, lengths=[30] * 3000, sizes=(20_000, None, None))
    dataset[0]
    sent = pickle.dumps(dataset)
    assert len(sent) < 20_000 < dataset.document_index.nbytes
    assert tokens_of(pickle.loads(sent), range(5)) == tokens_of(dataset, range(5))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_torchs_loader_reads_it_with_workers(tmp_path, method):
    dataset = build(gpt_config(tmp_path / "cache", blend=(write_pairs(tmp_path), [3, 2, 1]), split="8,1,1"))[0]
    loader = torch.utils.data.DataLoader(dataset, batch_size=5, num_workers=2, multiprocessing_context=method)
    found = torch.cat([batch["tokens"] for batch in loader])
    assert found.tolist() == tokens_of(dataset, range(len(dataset)))


def test_deferred_indices_are_none_until_a_sample_is_asked_for(tmp_path):
    before = one(tmp_path)
    prefix = before.dataset_path
    config = gpt_config(tmp_path / "cache", blend=([prefix], None), split="1", defer_npy_index_mmap=True)
    dataset = build(config, (10, None, None))[0]
    assert dataset.document_index is None
    assert dataset.sample_index is None
    assert dataset.shuffle_index is None
    assert len(dataset) == len(before)
    assert tokens_of(dataset, range(3)) == tokens_of(before, range(3))
    assert len(dataset) == len(before)
    assert dataset.shuffle_index.tolist() == before.shuffle_index.tolist()


def test_deferred_indices_that_were_never_built_are_an_error_that_says_what_to_do(tmp_path):
    prefix = write_pair(tmp_path / "pair", [20, 30])
    config = gpt_config(tmp_path / "cache", blend=([prefix], None), split="1", defer_npy_index_mmap=True)
    dataset = build(config, (2, None, None))[0]
    with pytest.raises(CacheError, match="build it once without defer_npy_index_mmap"):
        dataset[0]


@pytest.mark.parametrize("weights", [None, [1, 1]])
def test_a_copy_in_another_process_whose_indices_are_gone_blames_no_option_that_was_not_set(tmp_path, weights):
    prefixes = [write_pair(tmp_path / f"pair{number}", [20, 30]) for number in range(2 if weights else 1)]
    dataset = build(gpt_config(tmp_path / "cache", blend=(prefixes, weights), split="1"), (2, None, None))[0]
    copy = pickle.loads(pickle.dumps(dataset))
    (tmp_path / "cache").rename(tmp_path / "gone")
    with pytest.raises(CacheError, match="a copy of a dataset in another process builds nothing") as caught:
        copy[0]
    assert "defer_npy_index_mmap" not in str(caught.value)


def test_counts_that_are_given_must_be_the_files(tmp_path):
    prefix = write_pair(tmp_path / "pair", [20, 30])
    options = {"blend": ([prefix], None), "split": "1"}
    right = gpt_config(tmp_path / "cache", sequences_per_dataset={prefix: (2, 3)}, **options)
    assert len(build(right, (2, None, None))[0]) >= 2
    wrong = gpt_config(tmp_path / "cache", sequences_per_dataset={prefix: (3, 4)}, **options)
    with pytest.raises(Exception, match=r"\(3, 4\) as in sequences_per_dataset, found \(2, 3\)"):
        build(wrong, (2, None, None))


def test_reading_pieces_of_a_file_gives_the_same_samples(tmp_path):
    mapped = one(tmp_path)
    config = gpt_config(tmp_path / "cache", blend=([mapped.dataset_path], None), split="1", mmap_bin_files=False)
    assert tokens_of(build(config, (10, None, None))[0], range(5)) == tokens_of(mapped, range(5))


def test_a_subclass_can_change_the_text_of_a_sample(tmp_path):
    class Reversed(GPTDataset):
        def _query_document_sample_shuffle_indices(self, idx):
            text, documents = super()._query_document_sample_shuffle_indices(idx)
            return text[::-1].copy(), documents

    plain = one(tmp_path)
    config = gpt_config(tmp_path / "cache", blend=([plain.dataset_path], None), split="1")
    reversed_ = build(config, (10, None, None), cls=Reversed)[0]
    assert reversed_[0]["labels"].tolist() == plain[0]["tokens"].tolist()[::-1]
    assert "Reversed" in reversed_.unique_description


class _Padded(NullTokenizer):
    """Its padding token may be another special token's too."""

    def __init__(self, pad):
        super().__init__(100)
        self._padding = pad

    @property
    def pad(self):
        return self._padding


def test_a_padding_token_in_the_data_becomes_zero_and_does_not_count(tmp_path):
    plain = list(one(tmp_path))
    dataset = one(tmp_path, tokenizer=_Padded(5))
    for position, wanted in enumerate(plain):
        found = dataset[position]
        assert found["tokens"].tolist() == [0 if token == 5 else token for token in wanted["tokens"].tolist()]
        assert found["loss_mask"].tolist() == [float(label != 5) for label in wanted["labels"].tolist()]


def test_a_padding_token_that_ends_documents_too_is_left_in_the_loss_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="the padding id 100 must not be another special token's"):
        dataset = one(tmp_path, tokenizer=_Padded(EOD))
    assert all(dataset[position]["loss_mask"].all() for position in range(len(dataset)))


def test_an_ambiguous_padding_token_is_masked_out_if_asked_for(tmp_path):
    with pytest.warns(UserWarning, match="masked out all the same"):
        dataset = one(tmp_path, tokenizer=_Padded(EOD), allow_ambiguous_pad_tokens=True)
    assert any(not dataset[position]["loss_mask"].all() for position in range(len(dataset)))


def test_the_file_of_counts_must_name_the_prefix(tmp_path):
    prefix = write_pair(tmp_path / "pair", [20, 30])
    config = gpt_config(tmp_path / "cache", blend=([prefix], None), split="1", sequences_per_dataset={"other": (2, 3)})
    with pytest.raises(ArgumentError, match=r"sequences_per_dataset must name .*pair"):
        build(config, (2, None, None))


@pytest.mark.parametrize(
    "options",
    [{"eod_mask_loss": True}, {"reset_position_ids": True}, {"create_cu_seqlens": True}, {"random_seed": 8}],
)
def test_whatever_shapes_samples_changes_the_fingerprint(tmp_path, options):
    assert one(tmp_path).fingerprint == one(tmp_path).fingerprint
    assert one(tmp_path).fingerprint != one(tmp_path, **options).fingerprint


def test_lengths_that_the_file_has_no_room_for_are_refused_before_anything_is_built(tmp_path):
    prefix = write_pair(tmp_path / "pair", [8, 0])
    raw = bytearray((tmp_path / "pair.idx").read_bytes())
    raw[34:38] = np.int32(50_000_000).tobytes()
    (tmp_path / "pair.idx").write_bytes(raw)
    config = gpt_config(tmp_path / "cache", blend=([prefix], None), split="1")
    with pytest.raises(FormatError, match=r"pair, split train: .* 8 together at most, found 50000000"):
        build(config, (None, None, None))


def test_a_subclass_may_give_any_type_of_integers(tmp_path):
    class Narrow(GPTDataset):
        def _query_document_sample_shuffle_indices(self, idx):
            text, documents = super()._query_document_sample_shuffle_indices(idx)
            return text.astype(np.uint16), documents

    plain = one(tmp_path)
    config = gpt_config(tmp_path / "cache", blend=([plain.dataset_path], None), split="1")
    found = build(config, (10, None, None), cls=Narrow)[0][0]["tokens"]
    assert found.dtype == torch.int64
    assert found.tolist() == plain[0]["tokens"].tolist()


def test_forgetting_the_blend_is_said_in_words():
    with pytest.raises(PlanError, match="a GPTDataset needs a blend, found none: give blend"):
        build(gpt_config(None), (5, 5, 5))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"blend": ["a", "b"], "split": "1"}, "blend must be a list of prefixes, and a list of weights or None"),
        ({"blend": ["a"], "split": "1"}, "blend must be a list of prefixes, and a list of weights or None"),
        ({"blend": (["a", "b"], [-1, 2]), "split": "1"}, r"blend must have finite weights .* found \[-1, 2\]"),
        ({"tokenizer": "tokenizer.json"}, "tokenizer must be an object with .* found a str"),
    ],
)
def test_first_mistakes_are_named_at_construction(options, words):
    with pytest.raises(ArgumentError, match=words):
        gpt_config(None, **options)


class _Sequences:
    """Megatron Core asks a low-level dataset for lengths and tokens alone."""

    def __init__(self, path_prefix):
        self.path_prefix = path_prefix
        self.sequence_lengths = np.full(40, 20, dtype=np.int32)

    def get(self, idx, offset=0, length=None):
        return np.arange(20)[offset : None if length is None else offset + length] + idx


class _OverSequences(GPTDataset):
    @staticmethod
    def build_low_level_dataset(dataset_path, config):
        return _Sequences(dataset_path)

    @property
    def author(self):
        return self.dataset.author


def test_a_low_level_dataset_need_not_know_its_own_length(tmp_path):
    (train, _, _) = build(gpt_config(tmp_path / "cache", blend=(["a"], None), split="1,1,0"), cls=_OverSequences)
    assert len(train.indices) == 20
    assert len(train[0]["tokens"]) == 16


def test_a_property_that_fails_says_why_in_its_own_words(tmp_path):
    (train, _, _) = build(gpt_config(tmp_path / "cache", blend=(["a"], None), split="1,1,0"), cls=_OverSequences)
    with pytest.raises(AttributeError, match="'_Sequences' object has no attribute 'author'"):
        _ = train.author


class _Shorter(GPTDataset):
    def __len__(self):
        return 3


def test_what_indices_that_are_still_to_be_built_will_give_is_known_to_the_sample(tmp_path):
    config = gpt_config(tmp_path / "cache", blend=(["a"], None), split="0,1,0", sequence_length=1)
    config.drop_last_partial_validation_sequence = False
    low_level = _Sequences("a")
    low_level.sequence_lengths = np.array([2**24 + 2], dtype=np.int32)  # single precision counts one less
    asked = 2**24 + 1
    start = Start()
    with start.active():
        found = [cls(low_level, "a", None, asked, Split.valid, config) for cls in (GPTDataset, _Shorter)]
        assert [dataset.can_give(count) for dataset in found for count in (3, asked - 1, asked)] == [
            *(True, True, False),
            *(True, False, False),
        ]
    assert not any(one.is_resolved for one in start.requested)
