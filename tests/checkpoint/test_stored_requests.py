"""Requests of saves to an object store, and of loads from there: how many, and of how many bytes."""

import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.processes.launching import run_script
from trackbed.checkpoint import ShardedObject, ShardedTensor, load, open_checkpoint, save
from trackbed.checkpoint.damage import find_damage
from trackbed.files.stores import put_buffers, writes

RANK = Path(__file__).parent / "wanted_by_all_rank.py"


def asked_bytes(proxy):
    """Bytes of each range of a data file that was asked for."""
    spans = [span.removeprefix("bytes=").split("-") for _, key, span in proxy.log if span and key.endswith(".distcp")]
    return [int(stop) - int(start) + 1 for start, stop in spans]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_each_byte_of_foreign_items_is_asked_for_about_once(bucket, proxy, tmp_path):
    """Items of another program have no checksums of parts, and are read whole."""
    tensors = {f"w{number}": torch.rand(50_000) for number in range(8)}
    dcp.save(dict(tensors), checkpoint_id=str(tmp_path / "torch"), no_dist=True)
    num_bytes = 0
    for path in (tmp_path / "torch").iterdir():
        bucket.put(f"step-1/{path.name}", path.read_bytes())
        num_bytes += path.stat().st_size
    proxy.log.clear()
    opened = open_checkpoint(bucket.text("step-1"))
    for key, tensor in tensors.items():
        assert torch.equal(opened[key][...], tensor)
    # Of small files, up to 1 MiB is asked for.
    assert sum(count for count in asked_bytes(proxy) if count < 1 << 20) < 1.2 * num_bytes
    assert list(find_damage(bucket.text("step-1"))) == []


def test_many_objects_are_fetched_together(bucket, proxy):
    def state(is_empty):
        return {
            str(place): ShardedObject("o", None if is_empty else {"place": place}, (200,), (place,))
            for place in range(200)
        }

    save(state(False), bucket.text("step-1"))
    proxy.log.clear()
    found = load(state(True), bucket.text("step-1"))
    assert all(found[str(place)] == {"place": place} for place in range(200))
    assert len(proxy.log) < 15
    proxy.log.clear()
    assert list(find_damage(bucket.text("step-1"))) == []
    assert len(proxy.log) < 15


def test_ranks_of_one_host_fetch_once_what_all_want(bucket, proxy):
    address = bucket.text("step-1")
    weight = torch.rand(3000, 2003)
    save({"weight": ShardedTensor.from_rank_offsets("weight", weight), "few": torch.ones(3)}, address)
    proxy.log.clear()
    assert run_script(RANK, 3, address, limit_seconds=60) == [[zlib.crc32(weight.numpy())]] * 3
    assert weight.nbytes <= sum(asked_bytes(proxy)) < 1.1 * weight.nbytes


@pytest.mark.parametrize("sizes", [[5 << 20, 0, 1, (7 << 20) + 3], [(16 << 20) + 1], [9, 12 << 20]])
def test_large_objects_are_written_in_parts(sizes, bucket, proxy, monkeypatch):
    monkeypatch.setattr(writes, "_LARGE_BYTES", 10 << 20)
    monkeypatch.setattr(writes, "_LARGE_PART_BYTES", 5 << 20)
    buffers = [bytes([number]) * size for number, size in enumerate(sizes, 1)]
    put_buffers(bucket.address("large"), list(map(memoryview, buffers)))
    assert bucket.get("large") == b"".join(buffers)
    num_parts = -(-sum(sizes) // (5 << 20))
    assert [method for method, _, _ in proxy.log] == ["POST"] + ["PUT"] * num_parts + ["POST"]
