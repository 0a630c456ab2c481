"""Contract tests of all groups."""

from itertools import count

import pytest
from torch.distributed import FileStore, HashStore, TCPStore

from tests.support.contracts.group import GroupContract, SharedGroupContract
from trackbed.comm import SOLO, run_ranks
from trackbed.comm.torch_store import share_store
from trackbed.errors import CollectiveError

TIMEOUT_SECONDS = 30


class TestSolo(GroupContract):
    def run(self, size, function):
        return [function(SOLO)]

    def test_its_errors_propagate_unchanged(self):
        error = ValueError("no")
        with pytest.raises(ValueError) as caught, SOLO.guarded("building"):
            raise error
        assert caught.value is error


class TestMemory(SharedGroupContract):
    sizes = (1, 2, 3, 4, 5)

    def run(self, size, function, *, timeout_seconds=TIMEOUT_SECONDS):
        return run_ranks(size, function, timeout_seconds=timeout_seconds)


class TestSealed(TestMemory):
    """Groups of threads over a store in memory, with a secret."""

    def run(self, size, function, *, timeout_seconds=TIMEOUT_SECONDS):
        return run_ranks(size, function, timeout_seconds=timeout_seconds, secret=b"secret")


class OnChildren:
    """Runs the contract on children of groups, or on their children."""

    depth = 1

    def run(self, size, function, **options):
        def work(group):
            for _ in range(self.depth):
                group = group.child("side")
            return function(group)

        return super().run(size, work, **options)


@pytest.mark.slow
class TestSealedGrandchild(OnChildren, TestSealed):
    depth = 2


class TorchStores(SharedGroupContract):
    """Groups of threads over a store of torch's; each run has its own keys."""

    secret = None

    @pytest.fixture(autouse=True)
    def _serials(self):
        self.serials = count()

    def run(self, size, function, *, timeout_seconds=TIMEOUT_SECONDS):
        prefix = f"run{next(self.serials)}"

        def connect():
            return share_store(self.open(), prefix, timeout_seconds=timeout_seconds)

        return run_ranks(size, function, timeout_seconds=timeout_seconds, connect=connect, secret=self.secret)


@pytest.mark.slow
class TestHashStore(TorchStores):
    @pytest.fixture(autouse=True)
    def _store(self):
        self.store = HashStore()

    def open(self):
        return self.store


@pytest.mark.slow
class TestFileStore(TorchStores):
    @pytest.fixture(autouse=True)
    def _path(self, tmp_path):
        self.path = tmp_path / "store"

    def open(self):
        return FileStore(str(self.path), -1)


class TestTCPStore(TorchStores):
    @pytest.fixture(autouse=True)
    def _server(self):
        self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def open(self):
        return self.server


class TestSealedTCPStore(TestTCPStore):
    secret = b"secret"


class TestChildOverTCPStore(OnChildren, TestTCPStore):
    pass


class Unprintable(Exception):
    def __str__(self):
        raise TypeError("no text")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("b\udcff"), r"rank 1: ValueError: b\\udcff$"),
        (ValueError("x" * 20_000_000), r"rank 1: ValueError: x{10000}\.\.\. \(20,000,000 characters\)$"),
        (Unprintable(), r"rank 1: Unprintable: its text cannot be made$"),
    ],
)
def test_a_message_of_any_text_and_length_reaches_the_others(error, words):
    def work(group):
        with group.guarded("training"):
            if group.rank == 1:
                raise error
            group.barrier()

    with pytest.raises(CollectiveError, match=words):
        run_ranks(2, work)
