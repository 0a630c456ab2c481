"""The order "packed" through the datasets: batches, borders, epochs, splits and what is refused."""

import itertools
import os
import pickle
import shutil
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trackbed
from tests.support.files.blends import EOD, build, gpt_config
from tests.support.files.built_pair import build as build_pair
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.datasets import Batch, GPTDataset
from trackbed.errors import ArgumentError, FormatError, PlanError
from trackbed.kernels import gather_packs
from trackbed.kernels.reference import pieces_of_document
from trackbed.loading.pack_layouts import layout_of
from trackbed.tokens import IndexedDataset, IndexedDatasetBuilder
from trackbed.tokens.trained_tokens import TrainedColumns, runs_of

KEYS = [
    *("tokens", "labels", "loss_mask", "position_ids", "padding_mask"),
    *("cu_seqlens", "cu_seqlens_padded", "max_seqlen"),
    *("cu_trained_tokens", "num_trained_tokens", "num_documents"),
]


def write(prefix, lengths, seed=1, dtype=np.uint16):
    """A pair of documents of these lengths, with EOD as an ordinary token, too."""
    generator = np.random.default_rng(seed)
    build_pair(prefix, [generator.integers(0, EOD + 1, length).astype(dtype) for length in lengths], dtype=dtype)
    return str(prefix)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    generator = np.random.default_rng(3)
    lengths = [generator.integers(0, most, 200) for most in (12, 40, 90)]
    return [write(folder / f"p{number}", one, seed=number) for number, one in enumerate(lengths)]


def packed(cache, prefixes, sizes=(60, 0, 0), weights=None, **options):
    weights = weights if weights is not None or len(prefixes) == 1 else [1] * len(prefixes)
    config = gpt_config(cache, blend=(prefixes, weights), **{"split": "1", "order": "packed", **options})
    return build(config, sizes)[0]


def segments_of(item):
    """Inputs and labels of each piece of a pack, by its borders."""
    logical, ends = item["cu_seqlens"].tolist(), item["cu_seqlens_padded"].tolist()
    found = []
    for number, start in enumerate(ends[:-1]):
        places = logical[number + 1] - logical[number]
        if places:
            own = slice(start, start + places)
            found.append((item["tokens"][own].tolist(), item["labels"][own].tolist()))
    return found


def check_pack(item, length, multiple):
    """Checks what must hold for every pack."""
    logical, ends = item["cu_seqlens"], item["cu_seqlens_padded"]
    assert ends[0] == 0
    assert ends[-1] == length
    assert (ends % multiple == 0).all()
    places = logical.diff()
    segments = ends.diff()
    assert (places <= segments).all()
    is_piece = places > 0
    assert item["max_seqlen"] == (segments[is_piece].max() if is_piece.any() else 0)
    is_padding = torch.ones(length, dtype=torch.bool)
    positions = torch.zeros(length, dtype=torch.int64)
    for start, stop, own in zip(ends[:-1].tolist(), ends[1:].tolist(), places.tolist(), strict=True):
        is_padding[start : start + own] = False
        positions[start:stop] = torch.arange(stop - start)
    assert torch.equal(item["padding_mask"], is_padding)
    assert torch.equal(item["loss_mask"], (~is_padding).float())
    assert torch.equal(item["position_ids"], positions)
    assert not item["tokens"][is_padding].any()
    assert not item["labels"][is_padding].any()


@settings(max_examples=25)
@given(
    options=st.fixed_dictionaries(
        {
            "sequence_length": st.sampled_from([16, 32, 64]),
            "pack_multiple": st.sampled_from([1, 2, 16]),
            "pack_most_documents": st.none() | st.integers(1, 4),
            "pack_window": st.none() | st.integers(1, 60),
            "pack_long": st.sampled_from(["split", "cut", "drop"]),
        }
    ),
    is_blend=st.booleans(),
)
def test_batches_are_those_of_single_samples_and_keep_documents_apart(prefixes, options, is_blend):
    data = packed(None, prefixes if is_blend else prefixes[:1], **options)
    positions = list(range(0, 60, 7))
    batch = data.gather(positions, num_threads=1)
    assert list(batch) == (["dataset_id"] if is_blend else []) + KEYS
    for number, position in enumerate(positions):
        item = data[position]
        for name, value in item.items():
            found, wanted = batch[name][number], torch.as_tensor(value)
            if name.startswith("cu_"):  # rows of a batch are filled up with the last border
                assert found[len(wanted) :].eq(wanted[-1]).all()
                found = found[: len(wanted)]
            assert torch.equal(found, wanted), name
        check_pack(item, options["sequence_length"], options["pack_multiple"])


@pytest.mark.parametrize("long", ["split", "cut", "drop"])
@pytest.mark.parametrize("window", [None, 50])
def test_each_epoch_has_every_label_once_with_its_documents_prefix(prefixes, long, window):
    prefix, length = prefixes[2], 32
    texts = [document.tolist() for document in IndexedDataset(prefix)]
    wanted = Counter(
        (tuple(text[start:stop]), tuple(text[start + 1 : stop + 1]))
        for text in texts
        for start, stop in pieces_of_document(len(text), length, long)
    )
    options = {"sequence_length": length, "pack_long": long, "pack_window": window}
    size = len(packed(None, [prefix], sizes=[None] * 3, **options))
    data = packed(None, [prefix], sizes=(2 * size, 0, 0), **options)
    epochs = []
    for start in (0, size):
        found = [data[position] for position in range(start, start + size)]
        pieces = Counter((tuple(tokens), tuple(labels)) for item in found for tokens, labels in segments_of(item))
        assert pieces == wanted
        epochs.append([item["tokens"].tolist() for item in found])
    assert sorted(epochs[0]) != sorted(epochs[1])  # documents meet others


def test_a_blend_draws_packs_by_weight_and_epoch(prefixes):
    data = packed(None, prefixes, weights=[1, 2, 1], sizes=(200, 0, 0), sequence_length=64)
    ids = data.gather(range(200))["dataset_id"].tolist()
    assert Counter(ids) == {0: 50, 1: 100, 2: 50}
    alone = packed(None, prefixes[:1], sizes=(60, 0, 0), sequence_length=64)
    per_epoch = alone.samples_per_epoch
    assert 2 * per_epoch < 50
    of_first = [data[position] for position, number in enumerate(ids) if number == 0]
    pieces = [Counter(map(str, segments_of(item))) for item in of_first]
    epochs = [sum(pieces[start : start + per_epoch], Counter()) for start in (0, per_epoch)]
    assert epochs[0] == epochs[1]
    assert pieces[:per_epoch] != pieces[per_epoch : 2 * per_epoch]


def test_a_copy_reads_the_same_and_another_seed_others(prefixes):
    data = packed(None, prefixes, sequence_length=64)
    copy = pickle.loads(pickle.dumps(data))
    assert torch.equal(copy.gather(range(30))["tokens"], data.gather(range(30))["tokens"])
    assert copy.fingerprint == data.fingerprint
    other = packed(None, prefixes, sequence_length=64, random_seed=8)
    assert not torch.equal(other.gather(range(30))["tokens"], data.gather(range(30))["tokens"])


@pytest.mark.parametrize(
    "change",
    [
        {"pack_multiple": 2},
        {"pack_most_documents": 3},
        {"pack_window": 20},
        {"pack_long": "cut"},
        {"random_seed": 8},
        {"sequence_length": 32},
    ],
)
def test_what_decides_packs_is_in_the_fingerprint(prefixes, change):
    data = packed(None, prefixes[:1], sequence_length=64)
    assert packed(None, prefixes[:1], **{"sequence_length": 64, **change}).fingerprint != data.fingerprint


def test_splits_pack_their_own_documents(prefixes):
    config = gpt_config(None, blend=([prefixes[1]], None), split="3,1,1", order="packed", sequence_length=64)
    splits = build(config, [None] * 3)
    texts = [document.tolist() for document in IndexedDataset(prefixes[1])]
    documents = [sorted({piece.document for at in range(len(one)) for piece in one.pieces(at)}) for one in splits]
    assert sorted(sum(documents, [])) == [number for number, text in enumerate(texts) if len(text) > 1]
    assert max(documents[0]) < min(documents[1])


def test_pieces_have_the_token_behind_the_last_input(prefixes):
    data = packed(None, prefixes[:1], sequence_length=64)
    texts = [document.tolist() for document in IndexedDataset(prefixes[0])]
    for position in range(5):
        found = [texts[piece.document][piece.start : piece.stop] for piece in data.pieces(position)]
        assert [(text[:-1], text[1:]) for text in found] == segments_of(data[position])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"pack_multiple": 3}, "pack_multiple must divide the sequence_length 16, found 3"),
        ({"pack_window": 0}, "pack_window must be a whole number of at least 1, found 0"),
        ({"pack_most_documents": 0}, "pack_most_documents must be a whole number of at least 1, found 0"),
        ({"pack_long": "trim"}, "long_documents must be one of split, cut, drop, found 'trim'"),
        ({"eod_mask_loss": True}, "eod_mask_loss must be False with order='packed'"),
        ({"mask_borders": True}, "mask_borders must be False with order='packed'"),
        ({"add_extra_token_to_sequence": False}, "add_extra_token_to_sequence must be True with order='packed'"),
        ({"order": "instant", "pack_multiple": 2}, "pack_multiple needs order='packed', found 'instant'"),
        ({"fast_cache_load": True}, "fast_cache_load must be False with order='packed'"),
    ],
)
def test_options_that_do_not_fit_are_refused(prefixes, options, problem):
    with pytest.raises(ArgumentError, match=problem):
        gpt_config(None, blend=(prefixes, None), split="1", **{"order": "packed", **options})


def test_a_split_without_a_document_that_fits_is_refused(tmp_path):
    prefix = write(tmp_path / "short", [1, 1, 0])
    with pytest.raises(PlanError, match="must have a document of two tokens"):
        packed(None, [prefix])


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """A pair with trained tokens, some of its documents without one, and what they are."""
    folder = tmp_path_factory.mktemp("masked")
    generator = np.random.default_rng(5)
    builder = IndexedDatasetBuilder(f"{folder / 'p'}.bin", np.uint16)
    builder.trained, masks, texts = TrainedColumns(), [], []
    for length in generator.integers(0, 120, 150).tolist():
        mask = generator.random(length) < generator.choice([0.0, 0.3, 0.7, 1.0])
        text = generator.integers(0, EOD + 1, length)
        builder.add_document(text, [length])
        runs = runs_of(mask)
        builder.trained.add(np.array([len(runs)]), runs, lengths=np.array([length]), where="mask")
        masks.append(mask)
        texts.append(text)
    builder.finalize(f"{folder / 'p'}.idx")
    return str(folder / "p"), texts, masks


@pytest.mark.parametrize("long", ["split", "cut", "drop"])
@pytest.mark.parametrize("multiple", [1, 8])
def test_the_loss_mask_is_that_of_the_labels(masked, long, multiple):
    prefix, texts, masks = masked
    options = {"sequence_length": 64, "pack_long": long, "pack_multiple": multiple}
    size = len(packed(None, [prefix], sizes=[None] * 3, **options))
    data = packed(None, [prefix], sizes=(size, 0, 0), **options)
    batch = data.gather(range(size), num_threads=1)
    wanted = Counter()
    for text, mask in zip(texts, masks, strict=True):
        for start, stop in pieces_of_document(len(text), 64, long):
            labels = text[start + 1 : stop + 1].tolist()
            wanted[tuple(zip(labels, mask[start + 1 : stop + 1].tolist(), strict=True))] += 1
    found = Counter()
    for position in range(size):
        item = data[position]
        assert torch.equal(batch["loss_mask"][position], item["loss_mask"])
        ends = item["cu_seqlens_padded"].tolist()
        for start, places in zip(ends, item["cu_seqlens"].diff().tolist(), strict=False):
            own = slice(start, start + places)
            labels = zip(item["labels"][own].tolist(), item["loss_mask"][own].bool().tolist(), strict=True)
            found[tuple(labels)] += places > 0
    assert found - Counter({(): 10**6}) == wanted
    trained = sum(
        int(mask[start + 1 : stop + 1].sum())
        for mask in masks
        for start, stop in pieces_of_document(len(mask), 64, long)
    )
    assert batch["loss_mask"].sum() == trained


def test_a_damaged_mask_is_refused_where_it_is_read(masked, tmp_path):
    prefix = str(tmp_path / "p")
    for suffix in (".bin", ".idx", ".trackbed.json", ".mask"):
        shutil.copy(f"{masked[0]}{suffix}", f"{prefix}{suffix}")
    data = packed(None, [prefix], sequence_length=64)
    raw = bytearray((tmp_path / "p.mask").read_bytes())
    raw[40:48] = (2**40).to_bytes(8, "little")
    (tmp_path / "p.mask").write_bytes(raw)
    with pytest.raises(FormatError, match="must have runs in"):
        data.gather(range(60), num_threads=1)


def test_a_mask_that_was_truncated_after_it_was_mapped_is_an_error(tmp_path):
    builder = IndexedDatasetBuilder(f"{tmp_path / 'p'}.bin", np.uint16)
    builder.trained = TrainedColumns()
    lengths = np.full(3_000, 20)
    builder.add_documents(np.ones(60_000, dtype=np.uint16), lengths)
    builder.trained.add_whole(lengths)
    builder.finalize(f"{tmp_path / 'p'}.idx")
    data = packed(None, [str(tmp_path / "p")], sequence_length=64)
    data.gather(range(60))
    os.truncate(tmp_path / "p.mask", 4096)
    time.sleep(0.06)
    with pytest.raises(FormatError, match=r"p\.mask: the file must keep the 48040 bytes .* truncated to 4096"):
        data.gather(range(60))


def counts_of(item):
    """Counts of a pack, by its loss mask and its borders."""
    ends = item["cu_seqlens_padded"].tolist()
    trained = [int(item["loss_mask"][start:stop].sum()) for start, stop in itertools.pairwise(ends)]
    return {
        "cu_trained_tokens": list(itertools.accumulate([0, *trained])),
        "num_trained_tokens": sum(trained),
        "num_documents": sum(own > 0 for own in trained),
    }


@pytest.mark.parametrize("long", ["split", "cut"])
def test_counts_are_those_of_the_loss_mask(masked, long):
    data = packed(None, masked[:1], sequence_length=64, pack_long=long, pack_multiple=4)
    batch = data.gather(range(60), num_threads=1)
    seen = set()
    for position in range(60):
        item = data[position]
        wanted = counts_of(item)
        assert {name: item[name].tolist() for name in wanted} == wanted
        for name, one in wanted.items():
            found = batch[name][position].tolist()
            if name == "cu_trained_tokens":  # filled up with the last one
                found, rest = found[: len(one)], found[len(one) :]
                assert set(rest) <= {one[-1]}
            assert found == one, name
        seen.add(wanted["num_documents"])
    assert len(seen) > 2


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_of_a_context_has_the_counts_of_the_whole_pack(masked, size):
    data = packed(None, masked[:1], sequence_length=64, pack_multiple=8)
    whole = data.gather(range(20), num_threads=1)
    form = data._batch_reader()._form
    datasets, positions = data._draw(np.arange(20))
    pieces, firsts = form._members[0].find(positions)
    reader = data._batch_reader()
    for rank in range(size):
        shape = replace(form._shape, context_rank=rank, context_size=size)
        spec = replace(form.spec, length=shape.own_length)
        part = Batch.empty(spec, 20)
        found = gather_packs(reader._sources.table, datasets, pieces, firsts, part.arrays, shape)
        assert found.is_whole
        for name in ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", *KEYS[-3:]):
            assert torch.equal(part[name], whole[name]), name
        assert part["loss_mask"].sum() < whole["loss_mask"].sum()


@pytest.mark.parametrize("before", [-1, "fewer", "more than all"])
def test_a_pack_whose_pieces_are_in_disorder_is_refused(prefixes, before):
    data = packed(None, prefixes[:1])
    reader = data._batch_reader()
    data.gather(range(4))  # maps the file
    datasets, positions = data._draw(np.arange(4))
    pieces, firsts = reader._form._members[0].find(positions)
    firsts[2] = {"fewer": firsts[1] - 1, "more than all": len(pieces) + 1}.get(before, before)
    batch = data.empty_batch(4)
    found = gather_packs(reader._sources.table, datasets, pieces, firsts, batch.arrays, reader._form._shape)
    assert found.refused == 1


@pytest.mark.parametrize("layout", [None, "thd", "torch", "bridge"])
def test_a_part_of_one_tensor_is_enough_to_hold_a_batch(prefixes, layout):
    names = itertools.cycle(["tokens", "labels", "loss_mask", "position_ids", "padding_mask"])
    held, copies, places = [], [], set()
    for number, batch in enumerate(trackbed.BatchLoader(packed(None, prefixes), batch_size=1, layout=layout)):
        places.add(batch["tokens"].data_ptr())
        if number % 3 == 0:
            held.append(batch[next(names)][..., 5:])
            copies.append(held[-1].clone())
    assert all(map(torch.equal, held, copies))
    assert len(places) < 60  # the others are reused


@pytest.mark.parametrize("layout", ["thd", "torch"])
def test_a_batch_that_is_not_lent_is_laid_out_by_views_of_torch(prefixes, layout):
    """Its allocator of pinned memory knows a tensor by the storage that it has made."""
    rows = packed(None, prefixes).gather(range(3))
    joined = layout_of(layout, pads_borders=False).join(rows)
    for name in ("tokens", "labels", "loss_mask", "position_ids", "padding_mask"):
        assert joined[name]._base is rows[name]


class Copied(GPTDataset):
    """A subclass with samples of its own, which are read one by one."""

    def __getitem__(self, idx):
        found = super().__getitem__(idx)
        return {**found, "labels": found["labels"].clone(), "quality": torch.ones(2, dtype=torch.bfloat16)}


def test_samples_of_a_subclass_are_stacked_with_as_many_borders(tmp_path, prefixes):
    config = gpt_config(tmp_path, blend=(prefixes, [1] * 3), split="1", order="packed")
    own = BlendedMegatronDatasetBuilder(Copied, [60, 0, 0], lambda: True, config).build()[0]
    plain = packed(tmp_path, prefixes)
    for found, wanted in zip(
        *(trackbed.BatchLoader(one, batch_size=6, layout="thd") for one in (own, plain)), strict=True
    ):
        for name in wanted:
            assert torch.equal(found[name].flatten(), wanted[name].flatten()), name


def test_another_mask_is_another_fingerprint(tmp_path):
    fingerprints = []
    for first in (0, 1):
        builder = IndexedDatasetBuilder(str(tmp_path / "chat.bin"), np.uint16)
        builder.trained = TrainedColumns()
        for _ in range(20):
            builder.add_document(np.arange(9), [9])
            runs = runs_of(np.arange(9) > 3 + first)
            builder.trained.add(np.array([1]), runs, lengths=np.array([9]), where="test")
        builder.finalize(str(tmp_path / "chat.idx"))
        fingerprints.append(packed(tmp_path / "cache", [str(tmp_path / "chat")], (4, 0, 0)).fingerprint)
    assert fingerprints[0] != fingerprints[1]
