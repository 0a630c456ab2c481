"""Datasets over pairs in object stores: requests, bounds and refusals."""

import time

import pytest
import torch

from tests.support.files.blends import build, gpt_config, write_pair, write_pairs
from tests.support.files.stored_pairs import upload
from trackbed.errors import ArgumentError
from trackbed.tokens.stored.budget import BUDGET


@pytest.fixture
def folder(tmp_path):
    return tmp_path


@pytest.fixture
def options(tmp_path):
    return {"mmap_bin_files": False, "object_storage_cache_path": str(tmp_path / "idx")}


@pytest.fixture
def pairs(bucket, folder):
    """Prefixes of pairs on the disk, and their addresses."""
    prefixes = write_pairs(folder, 3)
    return prefixes, [upload(bucket, prefix, f"corpora/{at}") for at, prefix in enumerate(prefixes)]


def equal(batch, other):
    return batch.keys() == other.keys() and all(torch.equal(batch[name], other[name]) for name in batch)


def test_the_spans_of_a_batch_are_in_flight_together(pairs, folder, options, proxy):
    prefixes, addresses = pairs
    local = build(gpt_config(folder / "a", blend=(prefixes, None), split="1"), (None, 0, 0))[0]
    stored = build(gpt_config(folder / "b", blend=(addresses, None), split="1", **options), (None, 0, 0))[0]
    stored.gather([0, 40, 90])  # copies the indexes
    proxy.delay_seconds = 0.2
    proxy.log.clear()
    wanted = local.gather(range(60))
    started = time.monotonic()
    assert equal(stored.gather(range(60)), wanted)
    assert time.monotonic() - started < 1
    assert {key.rpartition("/")[2] for _, key, _ in proxy.log} <= {"0.bin", "1.bin", "2.bin"}
    assert len(proxy.log) <= 6  # close spans are joined


def test_a_single_sample_takes_one_round(pairs, folder, options, proxy):
    _, addresses = pairs
    stored = build(gpt_config(folder / "b", blend=([addresses[2]], None), split="1", **options), (None, 0, 0))[0]
    _ = stored[0]
    proxy.log.clear()
    _ = stored[5]
    assert 1 <= len(proxy.log) <= 3


@pytest.mark.parametrize("limit", [1, 100, 1000])
def test_a_batch_above_the_bound_is_gathered_in_parts(monkeypatch, pairs, folder, options, limit):
    prefixes, addresses = pairs
    local = build(gpt_config(folder / "a", blend=(prefixes, None), split="1"), (None, 0, 0))[0]
    stored = build(gpt_config(folder / "b", blend=(addresses, None), split="1", **options), (None, 0, 0))[0]
    monkeypatch.setattr(BUDGET, "_limit", 2 * limit)
    monkeypatch.setattr("trackbed.tokens.stored.source._GAP_BYTES", 0)
    most = []
    held = BUDGET.held

    def watched(size):
        most.append(size)
        return held(size)

    monkeypatch.setattr(BUDGET, "held", watched)
    assert equal(stored.gather(range(50)), local.gather(range(50)))
    assert max(most) <= max(limit, 17 * 2)
    assert len(most) > 1


def test_samples_of_a_group_are_those_of_the_disk(pairs, folder, options):
    prefixes, addresses = pairs
    results = []
    for root, some, more in (("a", prefixes, {}), ("b", addresses, options)):
        config = gpt_config(folder / root, blend=(["all"], None), groups={"all": some}, split="1", **more)
        dataset = build(config, (None, 0, 0))[0]
        results.append((dataset.gather(range(len(dataset))), [dataset[at] for at in range(0, len(dataset), 7)]))
    (batch, samples), (other, others) = results
    assert equal(batch, other)
    assert all(map(equal, samples, others))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mmap_bin_files": True}, "mmap must be False for a pair in an object store .*mmap_bin_files"),
        ({"object_storage_cache_path": None}, "object_storage_config must be given .*object_storage_cache_path"),
        ({"path_to_cache": None}, "path_to_cache must be a folder for a pair in an object store, found None"),
    ],
)
@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_configuration_that_does_not_fit_an_address_is_refused(pairs, folder, options, changes, words, is_grouped):
    _, addresses = pairs
    groups = {"all": addresses} if is_grouped else None
    blend = (["all"] if is_grouped else addresses, None)
    config = gpt_config(folder / "b", blend=blend, groups=groups, split="1", **{**options, **changes})
    with pytest.raises(ArgumentError, match=words):
        build(config, (None, 0, 0))


def test_instant_needs_no_folder_for_indices(bucket, folder, options):
    address = upload(bucket, write_pair(folder / "one", [20] * 30), "one")
    config = gpt_config(None, blend=([address], None), split="1", order="instant", **options)
    assert len(build(config, (10, 0, 0))[0].gather(range(10))["tokens"]) == 10


def test_either_name_of_the_folder_suffices(pairs, folder):
    _, addresses = pairs
    config = gpt_config(
        folder / "b", blend=([addresses[0]], None), split="1", mmap_bin_files=False, s3_cache_path=str(folder / "old")
    )
    assert len(build(config, (5, 0, 0))[0]) >= 5
    assert list((folder / "old").rglob("*.json"))
