"""Batches that are gathered together while a store answers."""

import threading
import time

import pytest
import torch

from blends import build, gpt_config, write_pair
from stored_pairs import upload
from trackbed.errors import StoreError
from trackbed.loading import BatchLoader, MegatronPretrainingSampler
from trackbed.loading.gather_ahead import gather_ahead
from trackbed.tokens.stored.budget import FetchBudget


class Slow:
    """Gathers that take a while, and how many there were at the same time."""

    def __init__(self, seconds):
        self.seconds, self.running, self.most = seconds, 0, 0
        self._lock = threading.Lock()

    def __call__(self, job):
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        time.sleep(self.seconds)
        with self._lock:
            self.running -= 1
        if job == 13:
            raise KeyError(job)
        return job * 2


def test_batches_come_in_order_and_many_are_gathered_together():
    slow = Slow(0.05)
    started = time.monotonic()
    assert list(gather_ahead(range(10), slow, most=lambda: 100)) == [(job, 2 * job) for job in range(10)]
    list(gather_ahead(range(14, 60), slow, most=lambda: 100))
    assert 4 <= slow.most <= 32
    assert time.monotonic() - started < 56 * 0.05 / 2


def test_a_slow_consumer_has_few_gathered_together():
    slow = Slow(0.01)
    for _ in gather_ahead(range(12), slow, most=lambda: 100):
        time.sleep(0.03)
    assert slow.most <= 3


def test_no_more_than_the_most_are_gathered_together():
    slow = Slow(0.02)
    assert len(list(gather_ahead(range(9), slow, most=lambda: 2))) == 9
    assert slow.most == 2


def test_an_error_is_raised_in_the_place_of_its_batch():
    found = gather_ahead(range(10, 20), Slow(0.01), most=lambda: 100)
    assert [job for job, _ in (next(found) for _ in range(3))] == [10, 11, 12]
    with pytest.raises(KeyError, match="13"):
        next(found)


def test_an_error_of_the_jobs_comes_after_the_batches_before_it():
    def jobs():
        yield from range(3)
        raise ValueError("no more")

    found = gather_ahead(jobs(), Slow(0.01), most=lambda: 100)
    assert [next(found)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="no more"):
        next(found)


def test_leaving_ends_what_runs():
    slow = Slow(0.05)
    found = gather_ahead(range(100), slow, most=lambda: 100)
    next(found)
    found.close()
    time.sleep(0.2)
    assert slow.running == 0


def test_a_budget_is_never_exceeded_but_by_something_larger():
    budget = FetchBudget()
    budget.lower(100)
    budget.lower(1000)
    assert budget.limit == 100
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
    with budget.held(10**9):
        pass


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
    loader = BatchLoader(remote, MegatronPretrainingSampler(300, 0, 4, 0, 1))
    started = time.monotonic()
    count = 0
    for batch, wanted in zip(loader, BatchLoader(local, MegatronPretrainingSampler(300, 0, 4, 0, 1)), strict=True):
        assert all(torch.equal(batch[name], wanted[name]) for name in wanted)
        count += 1
    assert count == 75
    assert time.monotonic() - started < 75 * 0.05


def test_a_loader_left_early_resumes_after_the_last_batch(stored):
    local, remote = stored("megatron")
    loader = BatchLoader(remote, MegatronPretrainingSampler(300, 0, 4, 0, 1))
    for _, batch in zip(range(5), loader, strict=False):
        last = batch["tokens"].clone()
    state = loader.state_dict()
    assert torch.equal(last, local.gather(range(16, 20))["tokens"])
    again = BatchLoader(remote, MegatronPretrainingSampler(300, 0, 4, 0, 1))
    again.load_state_dict(state)
    assert torch.equal(next(iter(again))["tokens"], local.gather(range(20, 24))["tokens"])


def test_a_saved_position_is_compared_without_reading_an_index(stored, proxy, tmp_path, bucket):
    _, remote = stored("instant")
    loader = BatchLoader(remote, MegatronPretrainingSampler(300, 0, 4, 0, 1))
    next(iter(loader))
    state = loader.state_dict()
    assert {"data_checksum", "data_stamps"} <= state.keys()
    _, same = stored("instant")
    resumed = BatchLoader(same, MegatronPretrainingSampler(300, 0, 4, 0, 1))
    proxy.log.clear()
    resumed.load_state_dict(state)
    assert proxy.log == []
    assert same.data_checksum.result() == state["data_checksum"]
    with_time = bucket.get("corpus.idx")
    bucket.put("corpus.idx", with_time)
    _, copied = stored("instant")
    BatchLoader(copied, MegatronPretrainingSampler(300, 0, 4, 0, 1)).load_state_dict({**state, "data_stamps": "other"})


def test_an_object_that_is_replaced_ends_the_iteration_with_its_name(stored, bucket):
    _, remote = stored("megatron")
    loader = iter(BatchLoader(remote, MegatronPretrainingSampler(300, 0, 4, 0, 1)))
    next(loader)
    bucket.put("corpus.bin", bucket.get("corpus.bin")[::-1])
    with pytest.raises(StoreError, match=r"corpus\.bin: the object must be the one that was opened"):
        for _ in loader:
            pass
