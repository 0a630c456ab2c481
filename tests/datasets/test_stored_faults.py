"""Batches while a proxy injects faults: the right samples, or in time an error that names the address."""

import random
import time

import pytest
import torch

from tests.support.files.blends import build, gpt_config, write_pair
from tests.support.files.stored_pairs import upload
from trackbed.errors import StoreError

FAULTS = [500, 503, "reset", "reset body", "stall", "stall body", "cut", "overlong", "range", 403, 404, "tag", None]


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("order", ["megatron", "instant"])
def test_no_fault_gives_another_sample(monkeypatch, tmp_path, bucket, proxy, order, count):
    rng = random.Random(count)
    prefix = write_pair(tmp_path / "corpus", [rng.randrange(200) for _ in range(400)])
    address = upload(bucket, prefix, "corpus")
    options = {"mmap_bin_files": False, "object_storage_cache_path": str(tmp_path / "idx")}
    local = build(gpt_config(tmp_path / "a", blend=([prefix], None), split="1", order=order), (500, 0, 0))[0]
    config = gpt_config(tmp_path / "b", blend=([address], None), split="1", order=order, **options)
    stored = build(config, (500, 0, 0))[0]
    stored.gather([0])
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "1.5")
    proxy.stall_seconds = 0.5
    refused = 0
    for _ in range(count // 2 if order == "instant" else count):
        positions = [rng.randrange(500) for _ in range(rng.choice([1, 3, 8]))]
        proxy.faults[:] = [rng.choice(FAULTS) for _ in range(rng.choice([1, 1, 2, 4]))]
        started = time.monotonic()
        try:
            found = stored.gather(positions)
        except (StoreError, FileNotFoundError) as error:
            refused += 1
            assert f"{address}.bin" in str(error)  # noqa: PT017  the right samples are as good
        else:
            wanted = local.gather(positions)
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert time.monotonic() - started < 3
        proxy.faults.clear()
        assert torch.equal(stored.gather([1])["tokens"], local.gather([1])["tokens"])
    assert 0 < refused < count
