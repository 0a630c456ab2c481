"""Batches on a GPU, whose copies end late: their memory is not written again before."""

import os
import subprocess
import sys

import pytest
import torch

from tests.gpu.card import needs_cuda, sleep
from tests.loading.test_device import WAYS
from tests.support.files.blends import build, gpt_config, write_pairs
from trackbed.datasets import Batch
from trackbed.loading import BatchStream, MegatronPretrainingSampler
from trackbed.loading.device import DeviceCopies

pytestmark = needs_cuda


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    config = gpt_config(None, blend=(write_pairs(tmp_path_factory.mktemp("pairs")), [3, 2, 1]), split="1")
    return build(config, (600, None, None))[0]


def loader_of(data, **options):
    sampler = MegatronPretrainingSampler(
        total_samples=len(data), consumed_samples=0, micro_batch_size=4, data_parallel_rank=0, data_parallel_size=1
    )
    return BatchStream(data, sampler, **options)


def wanted(data, number):
    return [data[position]["tokens"].tolist() for position in range(4 * number, 4 * number + 4)]


@pytest.fixture
def slow_copies(monkeypatch):
    """Each copy begins 20 ms late."""
    begin = DeviceCopies.begin

    def begin_late(self, batch):
        with torch.cuda.stream(self._stream):
            sleep(0.02)
        return begin(self, batch)

    monkeypatch.setattr(DeviceCopies, "begin", begin_late)


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_memory_is_not_written_while_it_is_copied(way, ahead, data, slow_copies):
    """L1."""
    for number, batch in enumerate(way(loader_of(data, ahead=ahead, device="cuda"), 12)):
        assert batch["tokens"].tolist() == wanted(data, number)


@pytest.mark.parametrize("num_threads", [1, 8])
def test_a_hundred_batches_that_are_held_keep_their_tokens(num_threads, data):
    """L2."""
    loader = loader_of(data, device="cuda", num_threads=num_threads)
    held = [batch for batch, _ in zip(loader, range(100), strict=False)]
    for number, batch in enumerate(held):
        assert all(tensor.is_cuda for tensor in batch.values())
        assert batch["tokens"].tolist() == wanted(data, number)


def test_a_consumer_on_a_stream_of_its_own(data, slow_copies):
    """L2."""
    side, sums = torch.cuda.Stream(), []
    with torch.cuda.stream(side):
        for batch, _ in zip(loader_of(data, device="cuda"), range(30), strict=False):
            sums.append(batch["tokens"].sum())
            del batch
    side.synchronize()
    assert [int(one) for one in sums] == [sum(map(sum, wanted(data, number))) for number in range(30)]


def test_copies_that_the_program_queues_of_pinned_batches(data):
    """L2."""
    work, copies = torch.rand(4000, 4000, device="cuda"), []
    for batch, _ in zip(loader_of(data, pinned=True), range(40), strict=False):
        for _ in range(20):
            work = work @ work  # the copy waits behind it, while the next batches are prefetched
        copies.append(batch["tokens"].cuda(non_blocking=True))
        del batch
    for number, copy in enumerate(copies):
        assert copy.tolist() == wanted(data, number)


def test_a_batch_without_samples_and_with_a_shared_mask():
    """L3."""
    copies = DeviceCopies(torch.device("cuda", 0))
    for size in (0, 3, 0, 2):
        mask = torch.ones(1, 8, 8, dtype=torch.bool).expand(size, 1, 8, 8)
        batch = Batch({"tokens": torch.zeros(size, 8), "attention_mask": mask}, shared=["attention_mask"])
        found = copies.begin(batch).wait()
        assert found["attention_mask"].shape == (size, 1, 8, 8)
        assert bool(found["attention_mask"].all())


def test_the_sanitizer_of_torch_finds_nothing(tmp_path):
    """L4: reads and writes of one memory on two streams are ordered."""
    script = tmp_path / "sanitized.py"
    script.write_text(
        "import sys, pathlib\n"
        "from tests.gpu.test_loader import build, gpt_config, loader_of, write_pairs\n"
        "pairs = write_pairs(pathlib.Path(sys.argv[1]))\n"
        "data = build(gpt_config(None, blend=(pairs, [3, 2, 1]), split='1'), (200, None, None))[0]\n"
        "print(sum(int(batch['tokens'].sum()) for batch in loader_of(data, device='cuda')))\n"
    )
    environment = {"TORCH_CUDA_SANITIZER": "1", "PYTHONPATH": ":".join(sys.path)}
    found = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert "CSAN detected" not in found.stderr, found.stderr[-2000:]


def test_a_graph_is_captured_beside_the_thread_of_the_loader(data):
    """L5."""
    x, found = torch.ones(64, 64, device="cuda"), []
    iterator = iter(loader_of(data, device="cuda", ahead=1))
    next(iterator)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x @ x
    for _ in range(10):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            y = x @ x
        graph.replay()
        found.append(next(iterator)["tokens"].sum())
    torch.cuda.synchronize()
    assert float(y[0, 0]) == 64.0
    assert len(found) == 10


def test_device_memory_does_not_grow(data):
    """L6."""
    used = []
    for number, batch in enumerate(loader_of(data, device="cuda")):
        del batch
        if number in (10, 140):
            used.append(torch.cuda.memory_allocated())
    one_batch = 4 * 16 * 8 * 4 + 4096
    assert used[1] <= used[0] + one_batch
