"""`python -m benchmarks.compilers OTHER`: the kernels of this Python against those of another, as a Markdown table.

OTHER is the path of a Python that has Trackbed as a wheel, such as `build/versions/3.11-wheel/bin/python` after
`make wheels` and `python tests/versions/run.py --wheel dist --keep 3.11`. Both run in turn, in processes of their own,
one thread each.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.harness import machine
from trackbed import kernels
from trackbed.index import BlockPermutation, InstantOrder, Permutation, legacy_shuffle

ROUNDS = 5
"""Processes of each."""
RUNS = 9
"""Runs of a kernel in a process, of which the median counts."""


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Each kernel of `make bench`, with what it is given."""
    rng = np.random.default_rng(1)
    datasets, samples = np.zeros(10**6, np.int16), np.zeros(10**6, np.int64)
    for number in (10, 100, 1000):
        weights = rng.random(number)
        weights /= weights.sum()
        count = 10**6 if number < 1000 else 200_000
        yield (
            f"greedy blend of {number:,} datasets",
            lambda w=weights, n=count: kernels.greedy_blend(w, datasets[:n], samples[:n]),
        )
    sizes = rng.integers(1, 1000, 1000)
    total = int(sizes.sum())
    yield (
        "exhaustive blend of 1,000 datasets",
        lambda: kernels.exhaustive_blend(sizes, datasets[:total], samples[:total]),
    )
    ids, ours = np.zeros(total, np.uint16), np.zeros(total, np.uint32)
    yield "balanced blend of 1,000 datasets", lambda: kernels.balanced_blend(sizes, ids, ours, key=7)
    shuffled = np.arange(2 * 10**6, dtype=np.int32)
    yield "legacy shuffle", lambda: legacy_shuffle(shuffled, seed=1234)
    lengths = rng.integers(0, 1200, 10**6, dtype=np.int32)
    visits = rng.permutation(np.arange(10**6, dtype=np.int32))
    rows = np.zeros(((int(lengths.sum()) - 1) // 4096 + 1, 2), dtype=np.int32)
    yield "sample index", lambda: kernels.sample_index(lengths, visits, rows, sequence_length=4096, extra_token=1)
    yield "count of tokens", lambda: kernels.count_tokens(lengths)
    wide = rng.integers(0, 60_000, 10**6)
    yield "narrowing to 16 bits", lambda: kernels.narrow(wide, np.dtype(np.uint16))
    positions = rng.integers(0, 10**9, 1 << 16)
    yield "keyed permutation", lambda: Permutation(10**9 + 7, seed=5)(positions)
    yield "keyed permutation of blocks", lambda: BlockPermutation(10**9 + 7, seed=5, block=64, window=1024)(positions)
    order = InstantOrder(
        sizes=rng.integers(10_000, 10**7, 1000), weights=rng.random(1000) + 1e-3, seed=1, num_samples=2 * 10**9
    )
    yield "instant order, 1,000 datasets", lambda: order.locate(positions)
    for dtype in ("float32", "bfloat16"):
        for num_ranks in (2, 8):
            buffers = [numbers(rng, 1 << 20, dtype) for _ in range(num_ranks)]
            yield (
                f"sum of {num_ranks} ranks in {dtype}",
                lambda b=buffers: kernels.sum_ranks(b, start=0, stop=1 << 20, owner=0),
            )
        squared = numbers(rng, 1 << 20, dtype)
        yield f"exact sum of squares in {dtype}", lambda s=squared: kernels.square_sum(s)
    yield from gathers(rng)


def numbers(rng: np.random.Generator, count: int, dtype: str) -> np.ndarray:
    """Random numbers as the kernels take them: bfloat16 by its bits."""
    found = rng.standard_normal(count).astype(np.float32)
    return found if dtype == "float32" else (found.view(np.uint32) >> 16).astype(np.uint16)


def gathers(rng: np.random.Generator) -> Iterator[tuple[str, Callable[[], object]]]:
    """A batch of samples that are cut from documents."""
    import torch

    import trackbed
    from trackbed.tokens import IndexedDatasetBuilder

    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="trackbed-bench-"))
    builder = IndexedDatasetBuilder(str(folder / "pair.bin"), dtype=np.uint16)
    for length in rng.integers(100, 2000, 5000):
        builder.add_document(rng.integers(1, 50_000, length), [length])
    builder.finalize(str(folder / "pair.idx"))
    data = trackbed.open_blend(
        prefixes=[str(folder / "pair")], sequence_length=2048, tokenizer={"eod": 0, "vocab_size": 50_000},
        order="instant", size=2000,
    ).train  # fmt: skip
    batch = data.gather(range(64), num_threads=1)
    picked = rng.integers(0, len(data), (RUNS + 1) * 64).reshape(-1, 64)
    numbers_of = iter(list(picked) * 100)
    yield "gather of 64 samples of 2,048 tokens", lambda: data.gather(next(numbers_of), batch, num_threads=1)


def measure() -> dict[str, float]:
    """Median milliseconds of each kernel here."""
    found = {}
    for what, run in cases():
        taken = []
        for _ in range(RUNS + 1):
            started = time.perf_counter()
            run()
            taken.append(time.perf_counter() - started)
        found[what] = 1e3 * statistics.median(taken[1:])
    return found


def main() -> int:
    """Measure here and there in turn, and print the table."""
    if sys.argv[1:] == ["--here"]:
        json.dump([kernels.compiler(), measure()], sys.stdout)
        return 0
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    taken: dict[str, list[dict[str, float]]] = {}
    for _ in range(ROUNDS):
        for python in (sys.executable, sys.argv[1]):
            command = [python, "-W", "ignore", "-m", "benchmarks.compilers", "--here"]
            compiler, found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            taken.setdefault(compiler, []).append(found)
    (here, ours), (there, theirs) = taken.items()
    print(f"Medians of {ROUNDS} processes of each in turn, one thread, on {machine()}.\n")
    print(f"| kernel | {here}, ms | {there}, ms | speed of the second |\n|---|---:|---:|---:|")
    for what in ours[0]:
        first, second = (statistics.median(one[what] for one in runs) for runs in (ours, theirs))
        print(f"| {what} | {first:.2f} | {second:.2f} | {first / second:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
