"""Checkpoints in an S3 server on loopback, against obstore alone and against a folder (a part of `make bench-stores`).

The server is the one that `AWS_ENDPOINT_URL` names, on the same processors. Each rank has a part of a state of 2 GB.
obstore writes and reads the same bytes in objects of 64 MiB, by requests of the same sizes, as many at a time, and does
nothing with them; the two take turns in one process group, and the figures are medians.
"""

import argparse
import asyncio
import os
import re
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.harness import machine, run_on_ranks
from trackbed import Checkpointer, ShardedTensor, load, save
from trackbed.files.stores.obstore_bucket import ObstoreBucket

BUCKET: Final = "trackbed-checkpoints"
OBJECT_BYTES: Final = 64 << 20
RANGE_BYTES: Final = 4 << 20
UPLOADS, DOWNLOADS = 4, 16
NUM_SMALL: Final = 20_000
MAX_BYTES: Final = 256 << 20


def state_of(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Entries for this rank's parts of some tensors."""
    place = (0, dist.get_rank(), dist.get_world_size())
    return {key: ShardedTensor.from_rank_offsets(key, data, place) for key, data in tensors.items()}


def timed(call: Callable[[], object]) -> float:
    """Seconds until the last rank has ended a call."""
    dist.barrier()
    start = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - start


class Obstore:
    """The same bytes by obstore alone."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        import obstore
        from obstore.store import S3Store

        self._library = obstore
        options = {"allow_http": True, "timeout": "300s"}
        self._store = S3Store(BUCKET, endpoint=os.environ["AWS_ENDPOINT_URL"], client_options=options)
        self._views = [memoryview(data.view(-1).view(torch.uint8).numpy()) for data in tensors.values()]
        self._objects = [
            (f"plain/{dist.get_rank()}/{number}/{start}", view[start : start + OBJECT_BYTES])
            for number, view in enumerate(self._views)
            for start in range(0, len(view), OBJECT_BYTES)
        ]

    def upload(self) -> None:
        """Writes the objects."""

        async def put(key: str, view: memoryview) -> None:
            await self._library.put_async(self._store, key, view, use_multipart=False)

        asyncio.run(_at_once(UPLOADS, [(put, key, view) for key, view in self._objects]))

    def download(self) -> None:
        """Reads them into new memory."""

        async def get(key: str, target: memoryview, start: int) -> None:
            stop = min(start + RANGE_BYTES, len(target))
            target[start:stop] = memoryview(
                await self._library.get_range_async(self._store, key, start=start, end=stop)
            )

        wanted = [
            (get, key, target, start)
            for key, view in self._objects
            for target in [memoryview(bytearray(len(view)))]
            for start in range(0, len(view), RANGE_BYTES)
        ]
        asyncio.run(_at_once(DOWNLOADS, wanted))


async def _at_once(count: int, calls: list[Any]) -> None:
    gate = asyncio.Semaphore(count)

    async def call(function: Any, *arguments: Any) -> None:
        async with gate:
            await function(*arguments)

    await asyncio.gather(*(call(*one) for one in calls))


class RequestedBytes:
    """Counts the bytes that are asked for."""

    def __enter__(self) -> "RequestedBytes":
        self.count = 0
        self._get = ObstoreBucket.get

        async def get(bucket: ObstoreBucket, wanted: Any) -> Any:
            self.count += wanted.stop - wanted.start
            return await self._get(bucket, wanted)

        ObstoreBucket.get = get  # type: ignore[method-assign]
        return self

    def __exit__(self, *_error: object) -> None:
        ObstoreBucket.get = self._get  # type: ignore[method-assign]


class PeakMemory:
    """The most anonymous memory of this process while the block runs, above that at its beginning."""

    def __enter__(self) -> "PeakMemory":
        self._first = self._most = _anonymous_bytes()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.num_bytes = self._most - self._first

    def _look(self) -> None:
        while not self._is_over.wait(0.005):
            self._most = max(self._most, _anonymous_bytes())


def _anonymous_bytes() -> int:
    found = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return sum(map(int, found)) * 1024


def median_of(times: list[float]) -> float:
    """Median of the slowest rank's times."""
    found = torch.tensor(statistics.median(times))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def measure(folder: Path, options: argparse.Namespace) -> None:
    """Prints a table, on rank 0."""
    size, run = dist.get_world_size(), f"s3://{BUCKET}/run"
    if dist.get_rank() == 0:
        import boto3

        boto3.client("s3").create_bucket(Bucket=BUCKET)
    dist.barrier()
    rows = int(options.gigabytes * 1e9 / 8 / size / 4096)
    tensors = {f"large.{number}": torch.rand(rows, 1024) for number in range(8)}
    alone = Obstore(tensors)
    times: dict[str, list[float]] = {}

    def take(name: str, call: Callable[[], object]) -> None:
        times.setdefault(name, []).append(timed(call))

    requested = peak = 0
    for _ in range(options.rounds + 1):
        take("obstore up", alone.upload)
        take("up", lambda: save(state_of(tensors), f"{run}/step-1"))
        take("obstore down", alone.download)
        targets = state_of({key: torch.zeros_like(data) for key, data in tensors.items()})
        with RequestedBytes() as counted:
            take("down", lambda targets=targets: load(targets, f"{run}/step-1"))
        requested = counted.count
    for key, data in tensors.items():
        if not torch.equal(targets[key].data, data):
            raise RuntimeError(f"{key}: must come back as it was saved")
    owned = sum(data.nbytes for data in tensors.values())
    with Checkpointer(run, max_bytes=MAX_BYTES) as checkpointer, PeakMemory() as memory:
        checkpointer.save(2, state_of(tensors))
        checkpointer.wait()
    peak = memory.num_bytes
    small = {f"small.{number}": torch.rand(16, 16) for number in range(NUM_SMALL)}
    for _ in range(options.rounds + 1):
        for name, place in (("small store", f"{run}/step-3"), ("small folder", str(folder / "step-3"))):
            take(f"{name} save", lambda place=place: save(state_of(small), place))
            targets = state_of({key: torch.zeros_like(data) for key, data in small.items()})
            take(f"{name} load", lambda place=place, targets=targets: load(targets, place))
    found = {name: median_of(values[1:]) for name, values in times.items()}
    if dist.get_rank() == 0:
        gigabytes = owned * size / 1e9
        print(f"{gigabytes:.2f} GB of {size} ranks; seconds, medians of {options.rounds}\n")
        print("| | Trackbed | obstore alone | |\n|---|---:|---:|---:|")
        for name, ours, theirs in (("upload", "up", "obstore up"), ("download", "down", "obstore down")):
            print(f"| {name} | {found[ours]:.2f} | {found[theirs]:.2f} | {found[theirs] / found[ours]:.2f} |")
        print(f"\n{NUM_SMALL:,} tensors of 1 KiB a rank:\n\n| | store | folder | |\n|---|---:|---:|---:|")
        for what in ("save", "load"):
            ours, theirs = found[f"small store {what}"], found[f"small folder {what}"]
            print(f"| {what} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} |")
        print(f"\na load in the same layout asks for {requested / owned:.3f} of the bytes of its rank")
        print(f"a save with max_bytes of {MAX_BYTES >> 20} MiB takes {peak >> 20} MiB")


def main() -> int:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="folder on the disk that is measured")
    options = parser.parse_args()
    if "RANK" in os.environ:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        measure(Path(os.environ["TRACKBED_BENCH_FOLDER"]), options)
        dist.destroy_process_group()
        return 0
    print(f"{machine()}, torch {torch.__version__}, {options.ranks} ranks of one thread", flush=True)
    return run_on_ranks("benchmarks.stored_checkpoints", options.ranks, options.folder)


if __name__ == "__main__":
    sys.exit(main())
