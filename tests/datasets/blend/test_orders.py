"""The orders that are not Megatron Core's, through the datasets."""

import pickle
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.files.blends import EOD, build, gpt_config, tokens_of, write_pair, write_pairs
from trackbed.cache import await_flush
from trackbed.datasets import BlendedDataset, MockGPTDataset
from trackbed.datasets.blend import balanced
from trackbed.datasets.gpt import indices as index_module
from trackbed.datasets.gpt.indices import GPTIndices
from trackbed.errors import ArgumentError, FormatError, PlanError
from trackbed.index import InstantOrder, Permutation, largest_remainders
from trackbed.tokens import IndexedDataset
from trackbed.tokens.idx_header import HEADER_BYTES

S = 16


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs"))


def stream(prefix, start=0, stop=None):
    """All tokens of some documents, as they stand in the file."""
    dataset = IndexedDataset(prefix)
    return np.concatenate(dataset[start:stop]).astype(np.int64)


def sample(tokens, number):
    return tokens[number * S : number * S + S].tolist()


# ---------------------------------------------------------------- balanced


def test_a_balanced_blend_draws_exact_proportions(tmp_path, prefixes):
    config = gpt_config(tmp_path / "cache", blend=(prefixes, [0.5, 0.3, 0.2]), split="1", order="balanced")
    train = build(config, [101, 0, 0])[0]
    assert np.bincount(train.dataset_index).tolist() == largest_remainders([0.5, 0.3, 0.2], len(train))
    drawn = sorted(zip(train.dataset_index.tolist(), train.dataset_sample_index.tolist(), strict=True))
    assert drawn == [(d, k) for d, count in enumerate(np.bincount(train.dataset_index)) for k in range(count)]
    assert train.dataset_index.dtype == np.uint16
    assert train.dataset_sample_index.dtype == np.uint32
    found = train[3]
    assert found["dataset_id"] == train.dataset_index[3]
    datasets, samples = train.order.locate(range(len(train)))
    assert datasets.tolist() == train.dataset_index.tolist()
    assert samples.tolist() == train.dataset_sample_index.tolist()
    assert len(train.order) == len(train)
    for position in (0, 37, len(train)):
        wanted = np.bincount(train.dataset_index[:position], minlength=3)
        assert train.order.counts_before(position).tolist() == wanted.tolist()
    for position in (-1, len(train) + 1):
        with pytest.raises(ArgumentError, match="position must be in"):
            train.order.counts_before(position)
        with pytest.raises(ArgumentError, match="positions must be in"):
            train.order.locate([position])
    member = train.datasets[found["dataset_id"]]
    assert found["tokens"].tolist() == member[int(train.dataset_sample_index[3])]["tokens"].tolist()


def test_a_balanced_blend_opens_what_was_built(tmp_path, prefixes):
    config = gpt_config(tmp_path / "cache", blend=(prefixes, [0.5, 0.3, 0.2]), split="8,1,1", order="balanced")
    first = build(config)
    await_flush()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    again = build(config)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*") if path.is_file()} == before
    in_memory = build(gpt_config(None, blend=(prefixes, [0.5, 0.3, 0.2]), split="8,1,1", order="balanced"))
    for one, other, third in zip(first, again, in_memory, strict=True):
        assert tokens_of(one, range(len(one))) == tokens_of(other, range(len(one)))
        assert one.dataset_index.tolist() == third.dataset_index.tolist()
        assert one.fingerprint == other.fingerprint
    # Nothing lies where Megatron Core would take it for its own.
    assert not list((tmp_path / "cache").glob("*BlendedDataset*"))


def test_datasets_are_shared_with_the_order_of_megatron(tmp_path, prefixes):
    for order in ("megatron", "balanced"):
        train = build(gpt_config(tmp_path / "cache", blend=(prefixes, [1, 1, 1]), split="1", order=order), [60, 0, 0])[
            0
        ]
        files = {path.name for path in (tmp_path / "cache").glob("*GPTDataset*")}
        assert len(files) == 3 * 4
    assert (
        train.fingerprint != build(gpt_config(None, blend=(prefixes, [1, 1, 1]), split="1"), [60, 0, 0])[0].fingerprint
    )


def test_a_balanced_blend_of_all_samples(tmp_path, prefixes):
    train = build(gpt_config(tmp_path, blend=(prefixes, None), split="1", order="balanced"), [None] * 3)[0]
    assert np.bincount(train.dataset_index).tolist() == [len(dataset) for dataset in train.datasets]


def test_the_blend_is_built_while_its_datasets_are(tmp_path, prefixes, monkeypatch):
    timeline = []
    real_blend, real_build = balanced.balanced_blend, GPTIndices.build

    def balanced_blend(*arguments, **options):
        timeline.append("blend begins")
        try:
            return real_blend(*arguments, **options)
        finally:
            timeline.append("blend ends")

    def build_indices(self, allocate):
        timeline.append("dataset begins")
        time.sleep(0.05)
        made = real_build(self, allocate)
        timeline.append("dataset ends")
        return made

    monkeypatch.setattr(balanced, "balanced_blend", balanced_blend)
    monkeypatch.setattr(GPTIndices, "build", build_indices)
    monkeypatch.setattr(index_module, "SMALL_COST", 0.0)  # as if they were large
    build(gpt_config(tmp_path, blend=(prefixes, [1, 1, 1]), split="1", order="balanced"), [60, 0, 0])
    last_dataset = len(timeline) - 1 - timeline[::-1].index("dataset ends")
    assert timeline.index("blend begins") < timeline.index("dataset ends")
    assert timeline.index("blend ends") < last_dataset


def test_a_dataset_that_fails_ends_the_blend_that_is_built_meanwhile(tmp_path):
    prefixes = write_pairs(tmp_path)
    index = Path(f"{prefixes[1]}.idx")
    raw = bytearray(index.read_bytes())
    raw[HEADER_BYTES : HEADER_BYTES + 4] = (-5).to_bytes(4, "little", signed=True)
    index.write_bytes(raw)
    config = gpt_config(tmp_path / "cache", blend=(prefixes, [1] * 3), split="1", order="balanced")
    started = time.monotonic()
    with pytest.raises(FormatError, match=f"{prefixes[1]}, split train: documents must have at least 0"):
        build(config, [400_000_000, 0, 0])
    assert time.monotonic() - started < 2
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and "balanced" in path.name]
    assert left == []


# ---------------------------------------------------------------- instant


@pytest.mark.parametrize("split", ["1", "6,3,1"])
def test_an_instant_dataset_gives_every_sample_of_its_part_once_an_epoch(prefixes, split):
    built = build(gpt_config(None, blend=([prefixes[2]], None), split=split, order="instant"), [None] * 3)
    for dataset in filter(None, built):
        tokens = stream(prefixes[2], int(dataset.indices[0]), int(dataset.indices[-1]) + 1)
        samples = [sample(tokens, number) for number in range((len(tokens) - 1) // S)]
        assert len(dataset) == len(samples) == dataset.samples_per_epoch
        assert sorted(tokens_of(dataset, range(len(dataset)))) == sorted(samples)


def test_an_instant_sample_is_the_one_that_the_order_says(prefixes):
    train = build(gpt_config(None, blend=([prefixes[1]], None), split="1", order="instant"), [500, 0, 0])[0]
    tokens, size = stream(prefixes[1]), train.samples_per_epoch
    order = InstantOrder(sizes=[size], weights=[1], seed=7)
    for position in (0, 1, size - 1, size, 499, -1):
        number = int(order.locate([position % 500])[1][0])
        assert train[position]["tokens"].tolist() == sample(tokens, number)
        assert train[position]["labels"].tolist() == tokens[number * S + 1 : number * S + S + 1].tolist()
    with pytest.raises(IndexError, match=r"\[-500, 500\), found 500"):
        train[500]


def test_an_instant_blend_is_what_its_order_says(prefixes):
    config = gpt_config(None, blend=(prefixes, [0.5, 0.3, 0.2]), split="1", order="instant")
    train = build(config, [300, 0, 0])[0]
    assert isinstance(train, BlendedDataset)
    streams = [stream(prefix) for prefix in prefixes]
    datasets, samples = train.order.locate(range(len(train)))
    for position in range(len(train)):
        found = train[position]
        assert found["dataset_id"] == datasets[position]
        assert found["tokens"].tolist() == sample(streams[datasets[position]], int(samples[position]))
    shares = np.array([0.5, 0.3, 0.2]) * len(train)
    assert (np.abs(train.order.counts_before(len(train)) - shares) <= 2).all()


def test_an_instant_blend_needs_no_cache_and_writes_nothing(tmp_path, prefixes):
    train = build(gpt_config(tmp_path / "cache", blend=(prefixes, [1, 1, 1]), split="1", order="instant"), [50, 0, 0])[
        0
    ]
    train[0]
    assert not (tmp_path / "cache").exists()
    for dataset in (train, train.datasets[0]):
        with pytest.raises(AttributeError, match="_index needs order='megatron' or 'balanced'"):
            _ = dataset.dataset_sample_index if dataset is train else dataset.document_index
    with pytest.raises(AttributeError, match="no attribute 'something'"):
        _ = train.something


@pytest.mark.parametrize("order", ["megatron", "balanced", "instant"])
@pytest.mark.parametrize(("weights", "sizes"), [([1, 2], [10, 0, 0]), (None, [None] * 3), (None, [5, None, None])])
def test_splits_without_samples_are_empty_in_every_order(tmp_path, order, weights, sizes):
    pair = [write_pair(tmp_path / name, [20] * 20) for name in ("one", "two")]
    built = build(gpt_config(tmp_path / "cache", blend=(pair, weights), split="98,1,1", order=order), sizes)
    assert len(built[0]) >= 5
    assert [dataset is None or len(dataset) == 0 for dataset in built[1:]] == [True, True]
    with pytest.raises(IndexError):
        built[1][0]


def test_dataset_numbers_can_be_counted_with_in_every_order(tmp_path, prefixes):
    for order in ("megatron", "balanced", "instant"):
        train = build(gpt_config(tmp_path, blend=(prefixes, [1, 1, 1]), split="1", order=order), [30, 0, 0])[0]
        batch = torch.utils.data.default_collate([train[position] for position in range(8)])
        assert len(torch.bincount(batch["dataset_id"])) <= 3


def test_a_deferred_balanced_blend_is_not_built(tmp_path, prefixes):
    options = {"blend": (prefixes, [1, 1, 1]), "split": "1", "order": "balanced"}
    deferred = gpt_config(tmp_path / "cache", defer_npy_index_mmap=True, **options)
    train = build(deferred, [30, 0, 0])[0]
    assert not list((tmp_path / "cache").rglob("*.npy"))
    build(gpt_config(tmp_path / "cache", **options), [30, 0, 0])
    assert train[3]["dataset_id"] in {0, 1, 2}


def test_stages_change_the_training_blend_alone(prefixes):
    stages = [(40, [0, 0, 1]), (60, [1, 1, 0])]
    config = gpt_config(None, blend=(prefixes, [1, 1, 1]), split="2,1,1", order="instant", blend_stages=stages)
    train, valid, _ = build(config, [90, 60, 30])
    numbers = [train[position]["dataset_id"] for position in range(90)]
    assert set(numbers[:40]) == {0, 1, 2}
    assert set(numbers[40:60]) == {2}
    assert set(numbers[60:]) == {0, 1}
    assert {valid[position]["dataset_id"] for position in range(len(valid))} == {0, 1, 2}
    assert (
        train.fingerprint
        != build(gpt_config(None, blend=(prefixes, [1, 1, 1]), split="2,1,1", order="instant"))[0].fingerprint
    )


def test_a_ramp_changes_the_training_blend_little_by_little(prefixes):
    options = {"blend": (prefixes, [1, 1, 0]), "split": "2,1,1", "order": "instant"}
    ramp, at_once = (
        build(gpt_config(None, blend_stages=[(40, [0, 0, 1], *length)], **options), [100, 0, 0])[0]
        for length in ([40], [])
    )
    numbers = [ramp[position]["dataset_id"] for position in range(100)]
    assert 2 not in numbers[:40]
    assert 4 <= numbers[40:60].count(2) <= 6
    assert 14 <= numbers[60:80].count(2) <= 16
    assert set(numbers[80:]) == {2}
    assert ramp.fingerprint != at_once.fingerprint
    of_none = build(gpt_config(None, blend_stages=[(40, [0, 0, 1], 0)], **options), [100, 0, 0])[0]
    assert of_none.fingerprint == at_once.fingerprint


def test_a_dataset_that_runs_out_is_an_error_or_left_out(prefixes, caplog):
    limits = {"blend_max_epochs": [None, None, 1], "order": "instant"}
    config = gpt_config(None, blend=(prefixes, [1, 1, 8]), split="1", **limits)
    with pytest.raises(PlanError, match="dataset 2"):
        build(config, [2000, 0, 0])
    config = gpt_config(None, blend=(prefixes, [1, 1, 8]), split="1", blend_when_exhausted="reweight", **limits)
    train = build(config, [2000, 0, 0])[0]
    size = train.datasets[2].samples_per_epoch
    (ended,) = train.order.exhaustions
    assert (ended.dataset, train.order.counts_before(2000)[2]) == (2, size)
    warning = f"{prefixes[2]}: has reached its limit of epochs; the blend goes on without it from sample {ended.sample}"
    assert warning in caplog.text
    drawn = sorted(train[k]["tokens"].tolist() for k in range(ended.sample) if train[k]["dataset_id"] == 2)
    tokens = stream(prefixes[2])
    assert drawn == sorted(sample(tokens, number) for number in range(size))


def test_blocks_are_read_contiguously(prefixes):
    options = {"order": "instant", "shuffle_block": 8, "shuffle_window": 1}
    train = build(gpt_config(None, blend=([prefixes[2]], None), split="1", **options), [None] * 3)[0]
    order = [train._samples.stored(position) for position in range(len(train))]
    assert sorted(order) == list(range(len(train)))
    blocks = [number // 8 for number in order]
    assert 1 + sum(before != after for before, after in pairwise(blocks)) == len(set(blocks))  # each at one go
    assert order != sorted(order)


def test_an_instant_dataset_survives_pickling_and_worker_processes(prefixes):
    train = build(gpt_config(None, blend=(prefixes, [1, 2, 1]), split="1", order="instant"), [64, 0, 0])[0]
    wanted = tokens_of(train, range(64))
    assert tokens_of(pickle.loads(pickle.dumps(train)), range(64)) == wanted
    loader = torch.utils.data.DataLoader(train, batch_size=8, num_workers=2)
    assert [row for batch in loader for row in batch["tokens"].tolist()] == wanted


def test_every_flag_shapes_instant_samples(tmp_path):
    prefix = write_pair(tmp_path / "pair", [5, 0, 7, 40, 3, 9, 1, 30])
    flags = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True, "create_cu_seqlens": True}
    train = build(gpt_config(None, blend=([prefix], None), split="1", order="instant", **flags), [None] * 3)[0]
    tokens = stream(prefix)
    borders = np.cumsum([5, 0, 7, 40, 3, 9, 1, 30]).tolist()
    for position in range(len(train)):
        found = train[position]
        number = train._samples.stored(position)
        start = number * S
        assert found["tokens"].tolist() == sample(tokens, number)
        inside = sorted({0, S, *(border - start for border in borders if 0 < border - start < S)})
        assert [border for border in found["cu_seqlens"].tolist() if border < S] + [S] == inside
        ends = (found["tokens"] == EOD).nonzero().flatten().tolist()
        assert found["loss_mask"][ends].sum() == 0
        assert all(found["position_ids"][end + 1] == 0 for end in ends if end + 1 < S)


def test_without_the_extra_token_more_samples_fit(tmp_path):
    prefix = write_pair(tmp_path / "pair", [S * 3])
    assert len(build(gpt_config(None, blend=([prefix], None), split="1", order="instant"), [None] * 3)[0]) == 2
    options = {"add_extra_token_to_sequence": False, "order": "instant"}
    assert len(build(gpt_config(None, blend=([prefix], None), split="1", **options), [None] * 3)[0]) == 3


def test_a_split_without_tokens_has_no_samples(tmp_path, prefixes):
    prefix = write_pair(tmp_path / "pair", [0, 0])
    config = gpt_config(None, blend=([prefix], None), split="1", order="instant")
    with pytest.raises(PlanError, match="must have tokens for one sample to give 5, found 0"):
        build(config, [5, 0, 0])
    assert len(build(config, [None] * 3)[0]) == 0
    with pytest.raises(PlanError):
        build(gpt_config(None, blend=([prefix, prefixes[0]], [1, 1]), split="1", order="instant"), [5, 0, 0])


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"order": "random"}, "one of 'megatron', 'balanced', 'instant', 'packed', found 'random'"),
        ({"order": "balanced", "renormalize_blend_weights": True}, "a rule of order='megatron'"),
        ({"blend_stages": [(5, [1, 1])]}, "blend_stages needs order='instant' or 'packed', found 'megatron'"),
        ({"order": "instant", "blend_stages": [(5,)]}, "blend_stages must have a first sample, weights and perh"),
        ({"blend_max_epochs": [1, 1]}, "blend_max_epochs needs order='instant' or 'packed', found 'megatron'"),
        (
            {"blend": (["a"], None), "blend_stages": [(5, [1])], "order": "instant"},
            "a training blend of several datasets",
        ),
        (
            {"shuffle_block": 4, "order": "balanced"},
            "needs order='instant' or 'packed', found 'balanced'",
        ),
        (
            {"shuffle_window": 0, "order": "instant"},
            "shuffle_window must be a whole number at least 1, found 0",
        ),
        ({"order": "instant", "defer_npy_index_mmap": True, "path_to_cache": "x"}, "no indices to load"),
    ],
)
def test_fields_that_an_order_cannot_mean(fields, found):
    with pytest.raises(ArgumentError, match=found):
        gpt_config(None, **{"blend": (["a", "b"], [1, 1]), "split": "1", **fields})


def test_classes_that_do_not_support_an_order_refuse_it():
    with pytest.raises(
        PlanError, match="MockGPTDataset must be built with order megatron or balanced, found 'instant'"
    ):
        build(gpt_config(None, order="instant"), [5, 1, 1], cls=MockGPTDataset)


def test_partial_samples_are_megatrons_alone(prefixes):
    options = {"drop_last_partial_validation_sequence": False, "order": "instant"}
    with pytest.raises(ArgumentError, match="drop_last_partial_validation_sequence must be True"):
        build(gpt_config(None, blend=([prefixes[0]], None), split="1,1,0", **options), [5, 5, 0])


def test_the_shuffle_of_an_epoch_is_a_permutation_of_the_file(prefixes):
    train = build(gpt_config(None, blend=([prefixes[2]], None), split="1", order="instant"), [None] * 3)[0]
    assert sorted(train._samples.stored(position) for position in range(len(train))) == list(range(len(train)))
    assert len(Permutation(len(train), seed=1)) == len(train)
