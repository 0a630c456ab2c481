"""Bytes of batches that are fetched ahead."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from tests.support import ROOT
from tests.support.files.blends import build, gpt_config, write_pair
from tests.support.files.stored_pairs import upload
from trackbed.cancellation import Flag
from trackbed.datasets.batches.reader import ReadsBatches
from trackbed.errors import ArgumentError, StoreError
from trackbed.kernels import FetchedBytes
from trackbed.loading import BatchStream, MegatronPretrainingSampler
from trackbed.loading.read_ahead import fetch_ahead
from trackbed.tokens.stored.budget import BUDGET, FetchBudget


class Slow(ReadsBatches):
    """A dataset of which each fetch takes a while, and the sizes of its groups."""

    def __init__(self, seconds, *, bytes_of=lambda size: size):
        self.seconds, self.groups, self.bytes_of = seconds, [], bytes_of

    def missing_ranges(self, indices):
        if 13 in indices:
            raise StoreError("13")
        return np.array([[0, 0, self.bytes_of(len(indices))]])

    def fetch(self, ranges):
        self.groups.append(int(ranges[0, 2]))
        time.sleep(self.seconds)
        return FetchedBytes([(0, 0, np.zeros(1, dtype=np.uint8))])

    __getitem__ = __len__ = _index = _batch_reader = _draw = None


def ahead(jobs, dataset, *, together=1):
    return fetch_ahead(jobs, dataset, Flag(), indices_of=lambda job: [job], together=lambda _: together)


def test_batches_come_in_order_and_groups_grow_while_they_are_late():
    slow = Slow(0.05)
    started = time.monotonic()
    found = list(ahead(range(20, 220), slow))
    assert [job for job, _ in found] == list(range(20, 220))
    assert all(found for _, found in found)
    assert slow.groups[:5] == [1, 2, 2, 4, 8]
    assert time.monotonic() - started < 20 * 0.05


def test_a_slow_consumer_has_small_groups():
    slow = Slow(0.01)
    for _ in ahead(range(20, 50), slow):
        time.sleep(0.02)
    assert max(slow.groups) <= 3


def test_batches_of_one_block_are_fetched_together():
    slow = Slow(0.001)
    for _ in ahead(range(20, 120), slow, together=16):
        time.sleep(0.002)
    assert slow.groups[:5] == [1, 2, 4, 8, 16]
    assert max(slow.groups) == 16


def test_no_more_is_fetched_ahead_than_the_budget_allows(monkeypatch):
    monkeypatch.setattr(BUDGET, "_limit", 20)
    slow = Slow(0.01)
    assert [job for job, _ in ahead(range(20, 90), slow)] == list(range(20, 90))
    assert max(slow.groups) <= 10
    assert BUDGET._ahead == 0
    nothing = list(ahead(range(20, 25), Slow(0.01, bytes_of=lambda size: 1000)))
    assert [bool(fetched) for _, fetched in nothing] == [False] * 5


def test_an_error_is_left_to_the_batch():
    found = dict(ahead(range(10, 20), Slow(0.001)))
    assert list(found) == list(range(10, 20))
    assert not found[13]
    assert BUDGET._ahead == 0


def test_an_error_of_the_jobs_comes_after_the_batches_before_it():
    def jobs():
        yield from range(3)
        raise ValueError("no more")

    found = ahead(jobs(), Slow(0.01))
    assert [next(found)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="no more"):
        next(found)


def test_leaving_frees_what_is_held():
    found = ahead(range(20, 100), Slow(0.05))
    for _ in range(5):
        next(found)
    found.close()
    time.sleep(0.2)
    assert BUDGET._ahead == 0


def test_a_budget_is_never_exceeded_but_by_something_larger():
    budget = FetchBudget()
    budget.lower(200)
    budget.lower(1000)
    assert budget.half == 100
    held, most, lock = 0, 0, threading.Lock()

    def work(size):
        nonlocal held, most
        with budget.held(size):
            with lock:
                held += size
                most = max(most, held)
            time.sleep(0.01)
            with lock:
                held -= size

    threads = [threading.Thread(target=work, args=(size,)) for size in [60, 50, 40, 30, 20, 10] * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most <= 100
    assert budget.hold_ahead(100)
    assert not budget.hold_ahead(1)
    with budget.held(10**9):  # does not wait for what was fetched ahead
        pass
    budget.free_ahead(100)
    assert budget.hold_ahead(1)


@pytest.fixture
def stored(bucket, tmp_path):
    prefix = write_pair(tmp_path / "corpus", [30] * 400)
    address = upload(bucket, prefix, "corpus")
    options = {"mmap_bin_files": False, "object_storage_cache_path": str(tmp_path / "idx")}

    def datasets(order):
        common = {"split": "1", "order": order}
        local = build(gpt_config(tmp_path / "a", blend=([prefix], None), **common), (300, 0, 0))[0]
        return local, build(gpt_config(tmp_path / "b", blend=([address], None), **common, **options), (300, 0, 0))[0]

    return datasets


@pytest.mark.parametrize("order", ["megatron", "instant"])
def test_a_loader_gives_the_batches_of_the_disk_and_fetches_ahead(stored, proxy, order):
    local, remote = stored(order)
    remote.gather([0])  # copies the index
    proxy.delay_seconds = 0.05
    proxy.log.clear()
    loader = BatchStream(remote, MegatronPretrainingSampler(300, 0, 4, 0, 1))
    started = time.monotonic()
    count = 0
    for batch, wanted in zip(loader, BatchStream(local, MegatronPretrainingSampler(300, 0, 4, 0, 1)), strict=True):
        assert all(torch.equal(batch[name], wanted[name]) for name in wanted)
        count += 1
    assert count == 75
    assert time.monotonic() - started < 75 * 0.05


def test_a_loader_left_early_resumes_after_the_last_batch(stored):
    local, remote = stored("megatron")
    loader = BatchStream(remote, MegatronPretrainingSampler(300, 0, 4, 0, 1))
    for _, batch in zip(range(5), loader, strict=False):
        last = batch["tokens"].clone()
    state = loader.state_dict()
    assert torch.equal(last, local.gather(range(16, 20))["tokens"])
    again = BatchStream(remote, MegatronPretrainingSampler(300, 0, 4, 0, 1))
    again.load_state_dict(state)
    assert torch.equal(next(iter(again))["tokens"], local.gather(range(20, 24))["tokens"])


def test_a_saved_position_is_compared_without_reading_an_index(stored, proxy, tmp_path, bucket):
    _, remote = stored("instant")
    loader = BatchStream(remote, MegatronPretrainingSampler(300, 0, 4, 0, 1))
    next(iter(loader))
    state = loader.state_dict()
    assert {"data_checksum", "data_stamps"} <= state.keys()
    _, same = stored("instant")
    resumed = BatchStream(same, MegatronPretrainingSampler(300, 0, 4, 0, 1))
    proxy.log.clear()
    resumed.load_state_dict(state)
    assert proxy.log == []
    assert same.data_checksum.result() == state["data_checksum"]
    with_time = bucket.get("corpus.idx")
    bucket.put("corpus.idx", with_time)
    _, copied = stored("instant")
    BatchStream(copied, MegatronPretrainingSampler(300, 0, 4, 0, 1)).load_state_dict({**state, "data_stamps": "other"})


def test_objects_that_were_written_anew_since_a_position_was_saved_are_told(stored, bucket, caplog):
    _, remote = stored("instant")
    loader = BatchStream(remote, MegatronPretrainingSampler(300, 0, 4, 0, 1))
    next(iter(loader))
    state = loader.state_dict()
    bucket.put("corpus.bin", bytes(len(bucket.get("corpus.bin"))))
    _, other = stored("instant")
    with caplog.at_level("WARNING"):
        BatchStream(other, MegatronPretrainingSampler(300, 0, 4, 0, 1)).load_state_dict(state)
    assert "objects that were written anew since the position was saved" in caplog.text


def test_an_object_that_is_replaced_ends_the_iteration_with_its_name(stored, bucket):
    _, remote = stored("megatron")
    loader = iter(BatchStream(remote, MegatronPretrainingSampler(300, 0, 4, 0, 1)))
    next(loader)
    bucket.put("corpus.bin", bucket.get("corpus.bin")[::-1])
    with pytest.raises(StoreError, match=r"corpus\.bin: the object must be the one that was opened"):
        for _ in loader:
            pass


@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_a_loader_is_closed_at_once_while_its_store_does_not_answer(stored, proxy, monkeypatch, delay):
    _, remote = stored("instant")
    remote.gather([0])
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "20")
    proxy.stall_seconds = 20
    loader = BatchStream(remote, MegatronPretrainingSampler(300, 0, 4, 0, 1))
    batches = iter(loader)
    next(batches)
    proxy.faults[:] = ["stall"] * 1000
    time.sleep(delay)  # the prefetch thread waits meanwhile
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 2
    while BUDGET._ahead and time.monotonic() - started < 2:  # the thread that fetches looks every 50 ms
        time.sleep(0.01)
    assert BUDGET._ahead == 0


EXIT = """
import os, sys, threading, time
from tests.support.files.blends import build, gpt_config
from trackbed.loading import BatchStream

address, folder, deaf = sys.argv[1:]
options = {"mmap_bin_files": False, "object_storage_cache_path": folder}
data = build(gpt_config(None, blend=([address], None), split="1", order="instant", **options), (300, 0, 0))[0]
data.gather([0])
os.environ.update({"AWS_ENDPOINT_URL_S3": deaf, "TRACKBED_STORE_TIMEOUT": "20"})
batches = iter(BatchStream(data, [[0, 1], [2, 3]] * 50))
threading.Thread(target=lambda: next(batches), daemon=True).start()
time.sleep(1)
print("exits", flush=True)
"""


def test_the_end_of_a_program_does_not_wait_for_a_store(stored, tmp_path, bucket, deaf_store):
    deaf = os.environ["AWS_ENDPOINT_URL_S3"]
    address = upload(bucket, write_pair(tmp_path / "one", [30] * 400), "one")
    paths = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "AWS_ENDPOINT_URL_S3": bucket.endpoint, "PYTHONPATH": paths}
    command = [sys.executable, "-W", "ignore", "-c", EXIT, address, str(tmp_path / "copies"), deaf]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout.readline() == "exits\n"
        started = time.monotonic()
        assert process.wait(timeout=60) == 0
    assert time.monotonic() - started < 5


def test_a_position_that_does_not_exist_is_an_error_in_its_place(stored):
    _, remote = stored("instant")
    batches = iter(BatchStream(remote, [[0, 1], [2, 3], [2**63, 1]]))
    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(ArgumentError):
        next(batches)
