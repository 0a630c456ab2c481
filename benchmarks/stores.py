"""`make bench-stores`: samples from an S3 server on loopback, against obstore and megatron-core, as Markdown.

The server is the one that `AWS_ENDPOINT_URL` names, with the credentials of the environment. A pair of 1 GB of tokens,
4,096 tokens a sample; each figure is a median, and the peers take turns in one process. obstore makes the requests that
Trackbed makes, with as many in flight, and does nothing with the bytes.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.harness import machine
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.datasets import GPTDataset, GPTDatasetConfig, NullTokenizer
from trackbed.files import stores
from trackbed.loading import BatchStream
from trackbed.tokens import IndexedDatasetBuilder

LENGTH: Final = 4096
BATCH: Final = 64
VOCABULARY: Final = 50_000
IN_FLIGHT: Final = 64
ROUNDS: Final = 5
BLOCKS: Final = (1, 4, 16, 64, 256, 1024)
NEEDED: Final = {"instant, blocks of 1,024": 0.8, "megatron": 0.7}
"""Part of obstore's rate."""
NEEDED_OF_MEGATRON: Final = 20.0
_BUCKET: Final = "trackbed-benchmark"


def write_corpus(folder: Path, gigabytes: float) -> str:
    """Documents of 1 to 4,000 tokens, 1,000 on average."""
    rng = np.random.default_rng(0)
    left = int(gigabytes * 1e9) // 2
    builder = IndexedDatasetBuilder(str(folder / "corpus.bin"), np.uint16)
    while left > 0:
        lengths = np.minimum(rng.gamma(1.0, 1000.0, 4096).astype(np.int32) + 1, 4000)
        builder.add_documents(rng.integers(0, VOCABULARY, int(lengths.sum()), dtype=np.uint16), lengths)
        left -= int(lengths.sum())
    builder.finalize(str(folder / "corpus.idx"))
    return str(folder / "corpus")


def upload(prefix: str) -> str:
    """Copies the pair to the server, and returns its address."""
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket=_BUCKET)
    for suffix in (".bin", ".idx"):
        client.upload_file(prefix + suffix, _BUCKET, "corpus" + suffix)
    return f"s3://{_BUCKET}/corpus"


def dataset(address: str, folder: Path, **options: Any) -> Any:
    """The training data, of one epoch."""
    is_stored = "://" in address
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=LENGTH,
        blend=([address], None),
        split="1",
        path_to_cache=str(folder / "cache"),
        tokenizer=NullTokenizer(VOCABULARY),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mmap_bin_files=not is_stored,
        object_storage_cache_path=str(folder / "idx") if is_stored else None,
        **options,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [None, 0, 0], lambda: True, config).build()[0]


class Recorded:
    """Requests that Trackbed makes inside a block, one list for each call."""

    def __enter__(self) -> list[list[Any]]:
        self._fetch, found = stores.fetch, []

        def fetch(ranges: Sequence[Any], **options: Any) -> Any:
            found.append(list(ranges))
            return self._fetch(ranges, **options)

        stores.fetch = fetch  # type: ignore[method-assign,assignment]
        return found

    def __exit__(self, *_error: object) -> None:
        stores.fetch = self._fetch  # type: ignore[method-assign]


def batches_of(size: int, num_samples: int) -> list[range]:
    """Consecutive positions."""
    return [range(at, at + size) for at in range(0, num_samples - size + 1, size)]


def read_with_obstore(calls: Sequence[Sequence[Any]]) -> int:
    """Makes the requests with obstore alone, all with one limit on those in flight. Returns the bytes."""
    import obstore

    endpoint = os.environ["AWS_ENDPOINT_URL"]
    options = {"allow_http": True}
    store = obstore.store.from_url(f"s3://{_BUCKET}", endpoint=endpoint, client_options=options)
    waiting: Iterator[Any] = iter([one for call in calls for one in call])
    size = 0

    async def take() -> None:
        nonlocal size
        for one in waiting:
            answer = await obstore.get_range_async(store, one.address.key, start=one.start, end=one.stop)
            size += len(answer)

    async def all_of_them() -> None:
        await asyncio.gather(*(take() for _ in range(IN_FLIGHT)))

    asyncio.run(all_of_them())
    return size


def seconds_of(call: Any) -> float:
    """Time of a call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def against_obstore(what: str, found: Any, num_samples: int) -> tuple[str, float, float, float]:
    """Samples a second of a loader, and the part of obstore's rate; requests, and bytes fetched per byte used."""
    indices = batches_of(BATCH, num_samples)

    def ours() -> None:
        for _ in BatchStream(found, indices):
            pass

    ours()
    with Recorded() as calls:
        ours()
    fetched = sum(one.stop - one.start for call in calls for one in call)
    mine, theirs = [], []
    for _ in range(ROUNDS):
        mine.append(seconds_of(ours))
        theirs.append(seconds_of(lambda: read_with_obstore(calls)))
    count = BATCH * len(indices)
    requests = sum(map(len, calls))
    print(
        f"| {what} | {count / statistics.median(mine):,.0f} | {fetched / statistics.median(mine) / 1e6:,.0f} |"
        f" {statistics.median(theirs) / statistics.median(mine):.2f} | {requests / count:.2f} |"
        f" {fetched / (count * (LENGTH + 1) * 2):.2f} |",
        flush=True,
    )
    return what, statistics.median(theirs) / statistics.median(mine), fetched / (count * (LENGTH + 1) * 2), count


def megatron_samples_per_second(address: str, folder: Path, count: int) -> float:
    """Samples a second of megatron-core's reader, which fetches 256 MiB for each chunk that it needs."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.object_storage_utils import ObjectStorageConfig

    config = ObjectStorageConfig(path_to_idx_cache=str(folder / "megatron-idx"))
    read = IndexedDataset(address, mmap=False, object_storage_config=config)
    rng = np.random.default_rng(1)
    documents = rng.permutation(len(read))
    lengths = read.sequence_lengths
    started, tokens = time.perf_counter(), 0
    for document in documents.tolist():
        tokens += len(read.get(document))
        if tokens >= count * LENGTH:
            break
    del lengths
    return tokens / LENGTH / (time.perf_counter() - started)


def resident_bytes() -> int:
    """Anonymous memory of this process: mapped files are not counted."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def main() -> None:
    """Prints the tables. An argument sets the gigabytes of tokens."""
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        address = upload(write_corpus(folder, gigabytes))
        print(f"{machine()}; {gigabytes} GB, {LENGTH} tokens a sample, batches of {BATCH}\n")
        print("| order | samples/s | MB/s | of obstore | requests per sample | bytes fetched per byte used |")
        print("|---|---:|---:|---:|---:|---:|")
        results = []
        for block in BLOCKS:
            found = dataset(address, folder, order="instant", shuffle_block=block)
            num_samples = min(len(found), 16_384 if block >= 64 else 4096)
            before = resident_bytes()
            results.append(against_obstore(f"instant, blocks of {block:,}", found, num_samples))
            grown = resident_bytes() - before
        found = dataset(address, folder, order="megatron")
        results.append(against_obstore("megatron", found, min(len(found), 2048)))
        theirs = megatron_samples_per_second(address, folder, 4)
        mine = 2048 / seconds_of(lambda: [None for _ in BatchStream(found, batches_of(BATCH, 2048))])
        print(f"\nmegatron-core: {theirs:.2f} samples/s, Trackbed {mine:,.0f}: {mine / theirs:,.0f} times as many")
        print(f"memory grew by {grown / 2**20:.0f} MiB in blocks of {BLOCKS[-1]:,}")
        short = [what for what, part, _, _ in results if part < NEEDED.get(what, 0)]
        if short or mine / theirs < NEEDED_OF_MEGATRON:
            sys.exit(f"less than needed: {', '.join(short) or 'megatron-core'}")


if __name__ == "__main__":
    main()
