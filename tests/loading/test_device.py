"""Copies to a device that end late: memory is not written again before. The device is pretended."""

import contextlib
import gc
import itertools
import threading
from itertools import islice

import pytest
import torch

from tests.support.files.blends import build, gpt_config, write_pairs
from tests.support.tiers import slow_but
from trackbed.datasets import Batch
from trackbed.loading import BatchStream, MegatronPretrainingSampler
from trackbed.loading.device import DeviceCopies


class LateDevice:
    """A device whose copies all begin when `run` is called."""

    def __init__(self):
        self.memory = {}  # the tensors that own it, which the ring does not watch
        self.queue = []
        self.has_run = False
        self.num_streams = 0

    def stream(self, device):
        self.num_streams += 1
        return self

    def allocate(self, batch):
        self.memory.update({tensor.data_ptr(): tensor for tensor in batch.values()})
        return batch

    def copy(self, tensor):
        target = torch.full_like(tensor, -1)
        self.queue.append((target, tensor.data_ptr()))
        return target

    def run(self):
        self.has_run = True
        for target, address in self.queue:
            target.copy_(self.memory[address])

    def record_event(self):
        return self

    def query(self):
        return self.has_run


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    config = gpt_config(None, blend=(write_pairs(tmp_path_factory.mktemp("pairs")), [3, 2, 1]), split="1")
    return build(config, (200, None, None))[0]


@pytest.fixture
def device(monkeypatch, data):
    late, plain = LateDevice(), data.empty_batch
    monkeypatch.setattr(data, "empty_batch", lambda size, **_: late.allocate(plain(size)))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.device", lambda number: contextlib.nullcontext())
    monkeypatch.setattr("torch.cuda.Stream", late.stream)
    monkeypatch.setattr("torch.cuda.stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr("trackbed.loading.device.DeviceBatch.wait", lambda one: one.batch)
    monkeypatch.setattr(
        DeviceCopies,
        "_copy",
        lambda _, name, batch: batch[name] if name in batch.shared else late.copy(batch[name]),
    )
    return late


def loader_of(data, **options):
    return BatchStream(
        data, MegatronPretrainingSampler(len(data), 0, 4, 0, 1, fingerprint=data.fingerprint), device="cuda", **options
    )


def first_batches(loader, count):
    """Each from an iteration of its own."""
    return [next(iter(loader)) for _ in range(count)]


def left_by_break(loader, count):
    found = []
    for _ in range(count):
        for batch in loader:
            found.append(batch)
            break
    return found


def left_by_an_error(loader, count):
    found = []
    for _ in range(count):
        with contextlib.suppress(ZeroDivisionError):
            for batch in loader:
                found.append(batch)
                raise ZeroDivisionError
    return found


def closed_between(loader, count):
    found = []
    for _ in range(count):
        found.append(next(iter(loader)))
        loader.close()
        gc.collect()
    return found


def resumed_between(loader, count):
    found = []
    for number in range(count):
        state = loader.state_dict()
        loader.load_state_dict(state)
        found.append(next(iter(loader)))
        assert state["consumed_samples"] == 4 * number
    return found


def kept_iterators(loader, count):
    """No iterator is dropped before the next one is made."""
    iterators, found = [], []
    for _ in range(count):
        iterators.append(iter(loader))
        found.append(next(iterators[-1]))
    return found


def dropped_late(loader, count):
    """Each iterator is dropped while the next one is in use."""
    found, iterator = [], None
    for _ in range(count):
        following = iter(loader)
        found.append(next(following))
        iterator = following
        gc.collect()
    del iterator
    return found


def in_pieces(loader, count):
    found = []
    while len(found) < count:
        found += islice(loader, 3)
    return found[:count]


def beside_a_list_that_ends(loader, count):
    """`zip` takes a batch more than it gives."""
    found = []
    for number in range(count):
        state = loader.state_dict()
        found += [batch for batch, _ in zip(loader, [number], strict=False)]
        loader.load_state_dict({**state, "consumed_samples": 4 * (number + 1)})
    return found


def from_other_threads(loader, count):
    found = []
    for _ in range(count):
        thread = threading.Thread(target=lambda: found.append(next(iter(loader))))
        thread.start()
        thread.join()
    return found


def rewound(loader, count):
    """Each batch is read twice, of which the second copy is kept."""
    found = []
    for _ in range(count):
        state = loader.state_dict()
        next(iter(loader))
        loader.load_state_dict(state)
        found.append(next(iter(loader)))
    return found


WAYS = [
    first_batches,
    left_by_break,
    left_by_an_error,
    closed_between,
    resumed_between,
    kept_iterators,
    dropped_late,
    in_pieces,
    beside_a_list_that_ends,
    from_other_threads,
    rewound,
]


@pytest.mark.parametrize(
    ("ahead", "way"),
    slow_but(
        [((1, 3)[number % 2], way) for number, way in enumerate(WAYS)],
        itertools.product([1, 3], WAYS),
        [f"{ahead}-{way.__name__}" for ahead in (1, 3) for way in WAYS],
    ),
)
def test_memory_is_not_written_while_it_is_copied_however_an_iteration_ends(way, ahead, data, device):
    batches = way(loader_of(data, ahead=ahead), 8)
    device.run()
    for number, batch in enumerate(batches):
        wanted = [data[position]["tokens"].tolist() for position in range(4 * number, 4 * number + 4)]
        assert batch["tokens"].tolist() == wanted


def test_two_loaders_of_one_dataset_write_into_memory_of_their_own(data, device):
    loaders = [loader_of(data, ahead=ahead) for ahead in (1, 2)]
    batches = [next(iter(loader)) for _ in range(6) for loader in loaders]
    device.run()
    for number, batch in enumerate(batches):
        first = 4 * (number // 2)
        assert batch["tokens"].tolist() == [data[position]["tokens"].tolist() for position in range(first, first + 4)]


def test_the_last_batches_of_a_pass_are_not_written_by_the_next_pass(data, device):
    loader = loader_of(data)
    batches = [batch for _ in range(3) for batch in loader]
    device.run()
    for number, batch in enumerate(batches):
        first = 4 * (number % 50)
        assert batch["tokens"].tolist() == [data[position]["tokens"].tolist() for position in range(first, first + 4)]


def test_iterations_share_one_stream_and_memory_is_free_after_its_copy(data, device):
    loader = loader_of(data, ahead=1)
    device.has_run = True  # each copy is over at once
    for _ in range(30):
        next(iter(loader))
    addresses = {address for _, address in device.queue}
    assert device.num_streams == 1
    assert len(addresses) < len(device.queue) / 3


def test_a_batch_without_samples_and_with_a_shared_mask_is_copied(monkeypatch):
    late = LateDevice()
    monkeypatch.setattr("torch.cuda.Stream", late.stream)
    monkeypatch.setattr("torch.cuda.stream", lambda stream: contextlib.nullcontext())
    copies = DeviceCopies(torch.device("cpu"))

    def batch(size):
        mask = torch.ones(1, 8, 8, dtype=torch.bool).expand(size, 1, 8, 8)
        return Batch({"tokens": torch.zeros(size, 8), "attention_mask": mask}, shared=["attention_mask"])

    for size in (0, 3, 0, 2):
        found = copies.begin(batch(size)).batch
        assert found["attention_mask"].shape == (size, 1, 8, 8)
        assert bool(found["attention_mask"].all())
        assert found["tokens"].shape == (size, 8)
