"""Ranks that build over addresses, each with folders of its own, and one whose store fails."""

import time

import pytest
import torch

from tests.support.files.blends import gpt_config, write_pairs
from tests.support.files.stored_pairs import upload
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.comm.threads import run_ranks
from trackbed.datasets import GPTDataset
from trackbed.errors import StoreError, TrackbedError


@pytest.fixture
def addresses(bucket, tmp_path):
    return [upload(bucket, prefix, f"pair{at}") for at, prefix in enumerate(write_pairs(tmp_path, 3))]


def make(group, folder, addresses):
    config = gpt_config(
        folder / "cache",
        blend=(addresses, None),
        split="90,10,0",
        mmap_bin_files=False,
        object_storage_cache_path=str(folder / "idx"),
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [100, 5, 0], lambda: True, config, group=group).build()


def test_hosts_without_a_shared_folder_build_the_same(tmp_path, addresses):
    def work(group):
        train, valid, _ = make(group, tmp_path / f"host{group.rank}", addresses)
        return train.gather(range(100)), valid.gather(range(5))

    first, second = run_ranks(2, work)
    for batch, other in zip(first, second, strict=True):
        assert all(torch.equal(batch[name], other[name]) for name in batch)
    for rank in range(2):
        assert len(list((tmp_path / f"host{rank}" / "idx").rglob("*.json"))) == 3


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_whose_index_was_replaced_ends_all(tmp_path, bucket, addresses, failing):
    errors = {}

    def work(group):
        started = time.monotonic()
        folder = tmp_path / f"host{group.rank}"
        try:
            if group.rank == failing:
                other = upload(bucket, tmp_path / "pair0", "other")
                bucket.delete("other.idx")
                make(group, folder, [*addresses[:2], other])
            else:
                make(group, folder, addresses)
        except Exception as error:
            errors[group.rank] = error
        assert time.monotonic() - started < 20

    run_ranks(2, work)
    assert set(errors) == {0, 1}
    assert all(isinstance(error, (TrackbedError, ValueError)) for error in errors.values())
    assert any("other.idx" in str(error) for error in errors.values())


def test_a_store_that_does_not_answer_is_an_error_in_time(tmp_path, addresses, monkeypatch, proxy):
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "1")
    proxy.stall_seconds = 5
    proxy.faults[:] = ["stall"] * 200
    started = time.monotonic()
    with pytest.raises(StoreError, match=r"s3://.*pair0.* the store must answer in time"):
        make(None, tmp_path / "host", addresses)
    assert time.monotonic() - started < 6
