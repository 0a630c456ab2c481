"""Whole batches against samples one by one, which conformance tests compare with Megatron Core's."""

import itertools
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset, default_collate

from tests.support.files.blends import EOD, build, gpt_config, write_pair, write_pairs
from tests.support.files.generated import builder_of, configurations
from tests.support.files.tidy import remove_folder
from tests.support.processes.forked import run_in_fork
from tests.support.tiers import with_files
from trackbed.datasets import Batch, BlendedDataset, GPTDataset, MockGPTDataset, NullTokenizer
from trackbed.datasets.batches.sources import Sources
from trackbed.datasets.gpt.indexed import IndexedSamples
from trackbed.errors import ArgumentError, FormatError, TrackbedError
from trackbed.index import Split
from trackbed.tokens import IndexedDatasetBuilder, merge

ORDERS = ("megatron", "balanced", "instant")
SHAPING = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


def assert_equal(batch, wanted):
    """Keys in their order, types, shapes and values."""
    assert list(batch) == list(wanted)
    for name, tensor in wanted.items():
        assert (name, batch[name].dtype, batch[name].shape) == (name, tensor.dtype, tensor.shape)
        assert torch.equal(batch[name], tensor), name


def stacked(dataset, positions):
    return default_collate([dataset[position] for position in positions])


def is_cut_from_files(dataset, positions):
    """Whether the kernel makes the batch, or each sample is asked for."""
    reader = dataset._batch_reader()
    if reader is None:
        return False
    return reader.gather(dataset._draw(np.array(positions)), None, num_threads=1) is not None


def flat(built):
    for dataset in built:
        if isinstance(dataset, list):
            yield from flat(dataset)
        elif dataset is not None and len(dataset):
            yield from (dataset, *getattr(dataset, "datasets", ()))


BORDERS = ("create_cu_seqlens", "inter_document_masking", "mask_borders")


@given(
    case=configurations(ORDERS),
    borders=st.sets(st.sampled_from(BORDERS)),
    deferred=st.booleans(),
    seed=st.integers(0, 2**31),
)
@with_files
def test_a_batch_is_its_samples_stacked(tmp_path, case, borders, deferred, seed):
    remove_folder(tmp_path / "case")
    case.write(tmp_path / "case" / "data")
    places = tmp_path / "case" / "data", tmp_path / "case" / "cache"
    case = replace(case, options={**case.options, **dict.fromkeys(borders, True)})
    try:
        built = builder_of(case, *places).build()
        if deferred and case.options["order"] != "instant":
            case = replace(case, options={**case.options, "defer_npy_index_mmap": True})
            built = builder_of(case, *places).build()
    except (ArgumentError, TrackbedError):
        return
    rng = np.random.default_rng(seed)
    for dataset in flat(built):
        if len(dataset) == 0:
            continue
        first, second = (rng.integers(-len(dataset), len(dataset), 7).tolist() for _ in range(2))
        batch = dataset.gather(first)
        assert_equal(batch, stacked(dataset, first))
        assert dataset.gather(second, out=batch, num_threads=2) is batch
        assert_equal(batch, stacked(dataset, second))
        assert_equal(default_collate(dataset.__getitems__(first)), stacked(dataset, first))
        assert is_cut_from_files(dataset, first) == case.options["mmap_bin_files"]


class _Padding(NullTokenizer):
    """Its padding token occurs in the data."""

    def __init__(self, pad):
        super().__init__(100)
        self._padding = pad

    @property
    def pad(self):
        return self._padding


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("pad", [5, 70_000])
@pytest.mark.parametrize("order", ORDERS)
def test_tokens_of_every_type_and_padding_that_occurs_among_them(tmp_path, dtype, pad, order):
    prefix = write_pair(tmp_path / "pair", [20, 0, 33, 7, 40], dtype=dtype)
    options = dict.fromkeys(SHAPING, True)
    config = gpt_config(None, blend=([prefix], None), split="1", order=order, tokenizer=_Padding(pad), **options)
    dataset = build(config, (None, None, None))[0]
    positions = range(len(dataset))
    assert is_cut_from_files(dataset, positions)
    assert_equal(dataset.gather(positions), stacked(dataset, positions))


@pytest.mark.parametrize("order", ORDERS)
def test_a_group_is_gathered_like_the_pair_that_it_would_be_merged_to(tmp_path, order):
    parts = write_pairs(tmp_path)
    merge(parts, str(tmp_path / "merged"))
    other = write_pair(tmp_path / "other", [20] * 50, seed=9)
    batches = []
    for name, groups in (("group", {"group": parts}), (str(tmp_path / "merged"), None)):
        config = gpt_config(
            tmp_path / "cache" / name[-6:],
            blend=([name, other], [0.7, 0.3]),
            split="8,1,1",
            groups=groups,
            order=order,
            create_cu_seqlens=True,
        )
        dataset = build(config, (300, 10, 10))[0]
        positions = range(0, len(dataset), 3)
        assert is_cut_from_files(dataset, positions)
        assert_equal(dataset.gather(positions), stacked(dataset, positions))
        batches.append(dataset.gather(positions))
    assert_equal(*batches)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("extra", [True, False])
def test_no_loss_on_the_first_token_of_another_document(tmp_path, order, extra):
    # Each document has tokens of its own, and none that ends documents.
    tokens = [np.full(length, 1 + number, np.uint16) for number, length in enumerate([20, 0, 33, 16, 40, 1, 15])]
    builder = IndexedDatasetBuilder(f"{tmp_path / 'pair'}.bin", np.uint16)
    for document in tokens:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{tmp_path / 'pair'}.idx")
    options = {"blend": ([str(tmp_path / "pair")], None), "split": "1", "order": order}
    options |= {"add_extra_token_to_sequence": extra}
    plain, masked = (
        build(gpt_config(tmp_path / "cache", mask_borders=masks, **options), (7, 0, 0))[0] for masks in (False, True)
    )
    assert plain.fingerprint != masked.fingerprint
    num_masked = 0
    for position in range(len(masked)):
        sample, before = masked[position], plain[position]
        is_other = sample["tokens"] != sample["labels"]
        assert torch.equal(sample["loss_mask"], before["loss_mask"] * ~is_other)
        num_masked += int((before["loss_mask"] * is_other).sum())
    assert num_masked >= 3
    assert_equal(masked.gather(range(len(masked))), stacked(masked, range(len(masked))))


def one(tmp_path, *, lengths=(20, 0, 33, 7, 40), cls=GPTDataset, dtype=np.uint16, **options):
    prefix = write_pair(tmp_path / "pair", lengths, dtype=dtype)
    return build(gpt_config(None, blend=([prefix], None), split="1", **options), (10, None, None), cls=cls)[0]


def test_the_last_partial_sample_of_validation_is_filled_up(tmp_path):
    prefix = write_pair(tmp_path / "pair", [20, 17])
    options = {"split": "0,1,0", "drop_last_partial_validation_sequence": False, "create_cu_seqlens": True}
    for extra, apart in itertools.product((True, False), repeat=2):
        options["inter_document_masking"] = apart
        config = gpt_config(None, blend=([prefix], None), add_extra_token_to_sequence=extra, **options)
        dataset = build(config, (None, None, None))[1]
        assert is_cut_from_files(dataset, range(3))
        assert_equal(dataset.gather(range(3)), stacked(dataset, range(3)))


def test_the_causal_mask_is_one_view_and_never_copied(tmp_path):
    dataset = one(tmp_path)
    batch = dataset.gather([0, 1, 2])
    assert batch["attention_mask"].stride()[0] == 0
    assert batch["attention_mask"].data_ptr() == dataset.causal_mask.data_ptr()
    again = dataset.gather([0], out=dataset.gather([2]))
    assert again["attention_mask"].data_ptr() == dataset.causal_mask.data_ptr()


def test_a_batch_stays_as_it_is_until_it_is_given_as_out(tmp_path):
    dataset = one(tmp_path)
    batch = dataset.gather([0, 1])
    before = {name: tensor.clone() for name, tensor in batch.items()}
    dataset.gather([2, 3])
    assert_equal(batch, before)
    addresses = [tensor.data_ptr() for tensor in batch.values()]
    assert dataset.gather([2, 3], out=batch) is batch
    assert [tensor.data_ptr() for tensor in batch.values()] == addresses


def test_out_may_come_from_another_dataset_whose_masks_are_made_otherwise(tmp_path):
    plain = one(tmp_path)
    config = gpt_config(None, blend=([plain.dataset_path], None), split="1", reset_attention_mask=True)
    cut = build(config, (10, None, None))[0]
    for first, second in ((plain, cut), (cut, plain)):
        batch = first.gather([0, 1])
        assert_equal(second.gather([2, 3], out=batch), stacked(second, [2, 3]))
        assert_equal(first.gather([0, 1]), stacked(first, [0, 1]))


@pytest.mark.parametrize("size", [1, 2])
def test_a_mask_that_others_share_is_not_written_to_by_a_dataset_that_has_another(tmp_path, size):
    plain = one(tmp_path)
    options = {"split": "1", "reset_attention_mask": True, "mmap_bin_files": False}
    cut = build(gpt_config(None, blend=([plain.dataset_path], None), **options), (10, None, None))[0]
    batch = plain.gather(range(size))
    assert_equal(cut.gather(range(size), out=batch), stacked(cut, range(size)))
    assert_equal(plain.gather(range(size), out=batch), stacked(plain, range(size)))
    assert torch.equal(plain.causal_mask[0], torch.ones(16, 16, dtype=torch.bool).triu(1))


@pytest.mark.parametrize("cut", [True, False])
def test_out_that_does_not_fit_is_refused(tmp_path, cut):
    dataset = one(tmp_path, mmap_bin_files=cut)
    with pytest.raises(
        ArgumentError, match=r"tokens of out must be torch.int64 \[3, 16\], found torch.int64 \[2, 16\]"
    ):
        dataset.gather([0, 1, 2], out=dataset.gather([0, 1]))
    with pytest.raises(ArgumentError, match=r"out must hold tokens, .*position_ids, found tokens, "):
        dataset.gather([0], out=one(tmp_path, create_cu_seqlens=True).gather([0]))


@pytest.mark.parametrize(
    "indices",
    [[0, 2, -1], (0, 2, -1), range(3), np.array([0, 2, -1], np.int8), torch.tensor([0, 2, -1]), np.arange(6)[::-2]],
    ids=lambda indices: type(indices).__name__,
)
def test_indices_may_be_any_sequence_of_integers(tmp_path, indices):
    dataset = one(tmp_path)
    assert_equal(dataset.gather(indices), stacked(dataset, [int(number) for number in indices]))


@pytest.mark.parametrize("indices", [[0.5], [True], ["0"], 3, [[0, 1]], [None]], ids=repr)
def test_other_indices_are_refused(tmp_path, indices):
    with pytest.raises(ArgumentError, match="indices must be a vector of integers"):
        one(tmp_path).gather(indices)


@pytest.mark.parametrize("order", ORDERS)
def test_a_position_that_is_not_there_is_an_index_error(tmp_path, order):
    prefixes = write_pairs(tmp_path)
    config = gpt_config(None, blend=(prefixes, [3, 2, 1]), split="1", order=order)
    blended = build(config, (50, None, None))[0]
    for dataset in (blended, blended.datasets[0]):
        for wrong in (len(dataset), -len(dataset) - 1):
            with pytest.raises(IndexError):
                dataset.gather([0, wrong])


def test_an_empty_batch_has_no_samples(tmp_path):
    batch = one(tmp_path).gather([])
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        **dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"), (0, 16)),
        "attention_mask": (0, 1, 16, 16),
    }


class _OwnSamples(GPTDataset):
    def __getitem__(self, idx):
        return {**super().__getitem__(idx), "position": idx}


class _OwnText(GPTDataset):
    def _query_document_sample_shuffle_indices(self, idx):
        text, documents = super()._query_document_sample_shuffle_indices(idx)
        return text[::-1].copy(), documents


@pytest.mark.parametrize("cls", [_OwnSamples, _OwnText])
def test_a_subclass_that_makes_its_samples_is_asked_for_each(tmp_path, cls):
    dataset = one(tmp_path, cls=cls)
    assert not is_cut_from_files(dataset, [0])
    batch = dataset.gather([0, 3])
    assert_equal(batch, stacked(dataset, [0, 3]))
    assert_equal(dataset.gather([1, 2], out=batch), stacked(dataset, [1, 2]))
    assert_equal(default_collate(dataset.__getitems__([0, 3])), stacked(dataset, [0, 3]))


def test_a_blend_of_datasets_that_make_their_samples_is_asked_for_each(tmp_path):
    config = gpt_config(None, blend=(write_pairs(tmp_path), [3, 2, 1]), split="1")
    dataset = build(config, (50, None, None), cls=_OwnSamples)[0]
    assert_equal(dataset.gather(range(9)), stacked(dataset, range(9)))
    assert dataset.__getitems__([4])[0]["position"] == dataset[4]["position"]


def test_a_blend_that_makes_its_samples_is_asked_for_each(tmp_path):
    class Numbered(BlendedDataset):
        def __getitem__(self, idx):
            return {"number": idx, **super().__getitem__(idx)}

    config = gpt_config(None, blend=(write_pairs(tmp_path), [3, 2, 1]), split="1")
    plain = build(config, (50, None, None))[0]
    dataset = Numbered(plain.datasets, [3, 2, 1], 6, config)
    assert dataset.gather([4, 5])["number"].tolist() == [4, 5]


def test_made_up_documents_are_gathered_too(tmp_path):
    (train, _, _) = build(gpt_config(None, sequence_length=512), (20, 5, 5), cls=MockGPTDataset)
    assert_equal(train.gather(range(8)), stacked(train, range(8)))


def test_samples_that_do_not_fit_together_are_an_error(tmp_path):
    class Uneven(GPTDataset):
        def _query_document_sample_shuffle_indices(self, idx):
            text, documents = super()._query_document_sample_shuffle_indices(idx)
            return text[: len(text) - idx], documents

    with pytest.raises(FormatError, match=r"the samples at \[0, 1\] must have tensors of the same names and shapes"):
        one(tmp_path, cls=Uneven, create_attention_mask=False).gather([0, 1])


def test_a_pointer_outside_the_file_is_an_error_that_names_it(tmp_path):
    dataset = one(tmp_path, cls=GPTDataset)
    index = Path(f"{dataset.dataset_path}.idx")
    raw = bytearray(index.read_bytes())
    raw[34 + 4 * 5 : 34 + 4 * 5 + 8] = (10**15).to_bytes(8, "little")
    index.write_bytes(raw)
    hostile = one_of(dataset)
    with pytest.raises(FormatError, match=r"pair\.bin: a read of bytes .* must lie inside the file, which has 200"):
        hostile.gather(range(len(hostile)))


def one_of(dataset):
    """A dataset over the same files, opened again."""
    prefix = dataset.dataset_path
    return build(gpt_config(None, blend=([prefix], None), split="1"), (10, None, None))[0]


@pytest.mark.parametrize("order", ORDERS)
def test_a_file_that_is_cut_short_is_an_error_and_no_signal(tmp_path, order):
    prefix = write_pair(tmp_path / "pair", [3000] * 20)
    dataset = build(gpt_config(None, blend=([prefix], None), split="1", order=order), (10, None, None))[0]
    dataset.gather(range(10))
    os.truncate(f"{prefix}.bin", 4096)
    time.sleep(0.06)
    with pytest.raises(FormatError, match=r"pair\.bin: the file must keep the 120000 bytes .* truncated to 4096"):
        dataset.gather(range(10))


def test_a_file_that_was_replaced_or_removed_goes_on_being_read(tmp_path):
    dataset = one(tmp_path)
    wanted = stacked(dataset, range(5))
    dataset.gather([0])
    data = Path(f"{dataset.dataset_path}.bin")
    (tmp_path / "new").write_bytes(b"\0\0")
    (tmp_path / "new").replace(data)
    for _ in range(2):
        time.sleep(0.06)
        assert_equal(dataset.gather(range(5)), wanted)
        data.unlink(missing_ok=True)


def test_files_are_mapped_when_a_sample_of_theirs_is_wanted(tmp_path):
    prefixes = [write_pair(tmp_path / f"pair{number}", [50] * 30, seed=number) for number in range(40)]
    config = gpt_config(None, blend=(prefixes, [1] * 40), split="1")
    dataset = build(config, (400, None, None))[0]
    dataset.gather(range(5))
    table = dataset._batch_reader()._sources.table
    assert sum(mapped is not None for mapped in table.files) == len(set(dataset.dataset_index[:5].tolist()))
    assert_equal(dataset.gather(range(300)), stacked(dataset, range(300)))


def test_a_dataset_that_gathered_goes_to_another_process(tmp_path):
    dataset = build(gpt_config(None, blend=(write_pairs(tmp_path), [3, 2, 1]), split="1"), (50, None, None))[0]
    wanted = dataset.gather(range(20))
    assert_equal(pickle.loads(pickle.dumps(dataset)).gather(range(20)), wanted)
    found = run_in_fork(lambda: {name: tensor.numpy() for name, tensor in dataset.gather(range(20)).items()})
    assert_equal({name: torch.from_numpy(array) for name, array in found.items()}, wanted)


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_loader_asks_for_whole_batches(tmp_path, workers, monkeypatch):
    dataset = build(gpt_config(None, blend=(write_pairs(tmp_path), [3, 2, 1]), split="1"), (50, None, None))[0]
    wanted = [stacked(dataset, range(len(dataset))[first : first + 5]) for first in range(0, len(dataset), 5)]

    def refuse(self):
        raise AssertionError

    monkeypatch.setattr(IndexedSamples, "_visits", property(refuse))
    for source in (dataset, Subset(dataset, range(len(dataset)))):
        loader = DataLoader(source, batch_size=5, num_workers=workers)
        for batch, want in zip(loader, wanted, strict=True):
            assert_equal(batch, want)


def test_samples_of_getitems_view_one_batch(tmp_path):
    dataset = one(tmp_path)
    first, second = dataset.__getitems__([0, 1])
    assert second["tokens"].data_ptr() - first["tokens"].data_ptr() == 8 * 16
    assert first["attention_mask"].shape == (1, 16, 16)


def test_a_batch_says_what_it_holds(tmp_path):
    batch = one(tmp_path, create_attention_mask=False).gather([0, 1])
    assert isinstance(batch, Batch)
    assert repr(batch) == "Batch(tokens: [2, 16], labels: [2, 16], loss_mask: [2, 16], position_ids: [2, 16])"


def test_documents_that_are_not_consecutive_can_be_chosen(tmp_path):
    plain = one(tmp_path, lengths=[20, 30, 25, 60])
    for chosen in ([0, 2], [3, 1]):
        dataset = GPTDataset(plain.dataset, plain.dataset_path, np.array(chosen), None, Split.train, plain.config)
        assert_equal(dataset.gather(range(len(dataset))), stacked(dataset, range(len(dataset))))


def test_a_file_is_looked_at_every_now_and_then_only(tmp_path, monkeypatch):
    dataset = one(tmp_path)
    dataset.gather([0])
    looks = []
    monkeypatch.setattr("trackbed.tokens.source.stamp_of", lambda path: looks.append(path))
    for _ in range(100):
        dataset.gather([0])
    assert len(looks) <= 3


def test_an_end_of_document_token_is_where_resets_happen(tmp_path):
    dataset = one(tmp_path, reset_position_ids=True)
    batch = dataset.gather(range(len(dataset)))
    ends = (batch["tokens"][:, :-1] == EOD).nonzero()
    assert len(ends)
    assert (batch["position_ids"][ends[:, 0], ends[:, 1] + 1] == 0).all()
    assert isinstance(dataset._batch_reader()._sources, Sources)


def test_a_position_beyond_int64_is_an_index_error(tmp_path):
    dataset = build(gpt_config(None, blend=(write_pairs(tmp_path), [3, 2, 1]), split="1"), (50, None, None))[0]
    for position in (2**64 - 1, 2**63):
        with pytest.raises(IndexError, match=f"found {position}"):
            dataset.gather(np.array([0, position], np.uint64))
    assert dataset.gather(np.array([3], np.uint64))["tokens"].tolist() == dataset.gather([3])["tokens"].tolist()


@pytest.mark.parametrize("out", [{}, {"tokens": torch.zeros(1, 16)}, [], 5])
def test_out_must_be_a_batch(tmp_path, out):
    dataset = build(gpt_config(None, blend=(write_pairs(tmp_path), [3, 2, 1]), split="1"), (50, None, None))[0]
    with pytest.raises(ArgumentError, match="out must be a Batch"):
        dataset.gather([0], out=out)


@pytest.mark.parametrize("order", ORDERS)
def test_a_child_forked_while_another_thread_changes_the_tables_does_not_wait_for_it(tmp_path, order):
    prefix = write_pair(tmp_path / "pair", [9] * 300)
    train = build(gpt_config(tmp_path / "cache", blend=([prefix], None), split="1", order=order), (40, None, None))[0]
    wanted = train.gather(range(8))["tokens"].tolist()
    reader = train._batch_reader()
    with reader._sources._lock.writing(), reader._sources._lock._mutex:
        found = run_in_fork(lambda: train.gather(range(8))["tokens"].tolist())
    assert found == wanted


def test_an_interrupted_reader_holds_nobody_up(tmp_path):
    prefix = write_pair(tmp_path / "pair", [9] * 300)
    train = build(gpt_config(tmp_path / "cache", blend=([prefix], None), split="1"), (40, None, None))[0]
    wanted = train.gather(range(8))["tokens"].tolist()
    sources = train._batch_reader()._sources
    sources._lock.begin_reading()  # and never ends, as Ctrl-C came
    assert train.gather(range(8))["tokens"].tolist() == wanted
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(sources.release, sources._placed[0]).result(timeout=60)
    assert train.gather(range(8))["tokens"].tolist() == wanted
