"""The kernels of the orders against megatron-core's helpers and NumPy, one thread each, in the same process."""

from collections.abc import Iterator

import numpy as np
from megatron.core.datasets import helpers

from benchmarks.harness import Comparison, compare
from trackbed import kernels
from trackbed.index import EpochPlan, LegacyShuffle, legacy_shuffle
from trackbed.index.ranges import number_range
from trackbed.index.visits import visit_indices

SEQUENCE_LENGTH = 4096


def greedy(num_datasets: int, num_samples: int, *, equal: bool = False) -> Comparison:
    """Random weights, uniform in [0, 1), or equal ones."""
    rng = np.random.default_rng(num_datasets)
    weights = np.ones(num_datasets) if equal else rng.random(num_datasets)
    weights /= weights.sum()
    datasets, samples = np.zeros(num_samples, np.int16), np.zeros(num_samples, np.int64)
    return compare(
        f"greedy blend of {num_datasets:,} datasets{' of equal weight' if equal else ''}, a sample",
        lambda: kernels.greedy_blend(weights, datasets, samples),
        lambda: helpers.build_blending_indices(datasets, samples, weights.tolist(), num_datasets, num_samples, False),
        items=num_samples,
        rounds=5,
        moved_bytes=10,
    )


def exhaustive(num_datasets: int, samples_each: int) -> Comparison:
    """Sizes that scatter around a mean."""
    sizes = np.random.default_rng(1).integers(1, 2 * samples_each, num_datasets)
    total = int(sizes.sum())
    datasets, samples = np.zeros(total, np.int16), np.zeros(total, np.int64)
    return compare(
        f"exhaustive blend of {num_datasets:,} datasets, a sample",
        lambda: kernels.exhaustive_blend(sizes, datasets, samples),
        lambda: helpers.build_exhaustive_blending_indices(datasets, samples, sizes, num_datasets),
        items=total,
        rounds=3,
        moved_bytes=10,
    )


def shuffle(size: int, *, rounds: int) -> Comparison:
    """An int32 array; each element moves with another one, and each of them with its cache line."""
    ours, theirs = np.arange(size, dtype=np.int32), np.arange(size, dtype=np.int32)
    return compare(
        f"legacy shuffle of {size:.0e} int32, an element",
        lambda: legacy_shuffle(ours, seed=1234),
        lambda: np.random.RandomState(1234).shuffle(theirs),
        items=size,
        rounds=rounds,
        moved_bytes=128 if ours.nbytes > 32 << 20 else 8,
    )


def sample_index(num_documents: int, *, mean_length: int, num_threads: int = 1) -> Comparison:
    """Two epochs of documents of 0 to twice the mean length, shuffled."""
    rng = np.random.default_rng(2)
    lengths = rng.integers(0, 2 * mean_length, num_documents, dtype=np.int32)
    visits = np.tile(np.arange(num_documents, dtype=np.int32), 2)
    rng.shuffle(visits)
    tokens = int(lengths.sum(dtype=np.int64))
    rows = np.zeros(((2 * tokens - 1) // SEQUENCE_LENGTH + 1, 2), dtype=np.int32)
    threads = f", {num_threads} threads" if num_threads > 1 else ""
    return compare(
        f"sample index, {num_documents:.0e} documents of {mean_length} tokens, a visit{threads}",
        lambda: kernels.sample_index(
            lengths, visits, rows, sequence_length=SEQUENCE_LENGTH, extra_token=1, num_threads=num_threads
        ),
        lambda: helpers.build_sample_idx(lengths, visits, SEQUENCE_LENGTH, 2, tokens, True, True),
        items=len(visits),
        rounds=3,
        moved_bytes=4 + (64 if lengths.nbytes > 32 << 20 else 4),
    )


def visits(num_documents: int, *, mean_length: int, rounds: int) -> Comparison:
    """Document index and sample index of one epoch, into arrays of an earlier run as far as the library takes them."""
    lengths = np.random.default_rng(2).integers(0, 2 * mean_length, num_documents, dtype=np.int32)
    documents, theirs = number_range(0, num_documents), np.arange(num_documents, dtype=np.int32)
    tokens = int(lengths.sum(dtype=np.int64))
    plan = EpochPlan(num_epochs=1, num_samples=(tokens - 1) // SEQUENCE_LENGTH, samples_before_last=None)
    ours = {
        "document_index": np.zeros(num_documents, dtype=np.int32),
        "sample_index": np.zeros((plan.num_samples + 1, 2), dtype=np.int32),
    }
    shape = {"sequence_length": SEQUENCE_LENGTH, "extra_token": 1}

    def by_megatron() -> None:
        np.random.RandomState(1234).shuffle(theirs)
        helpers.build_sample_idx(lengths, theirs, SEQUENCE_LENGTH, 1, tokens, True, True)

    return compare(
        f"document and sample index, {num_documents:.0e} documents of {mean_length} tokens, a document",
        lambda: visit_indices(
            documents, lengths, plan, LegacyShuffle(1234), **shape, allocate=lambda name, _shape, _dtype: ours[name]
        ),
        by_megatron,
        items=num_documents,
        rounds=rounds,
        moved_bytes=128 if ours["document_index"].nbytes > 32 << 20 else 16,
    )


def comparisons() -> Iterator[Comparison]:
    """All of them, one after the other."""
    yield greedy(10, 4_000_000)
    yield greedy(100, 2_000_000)
    yield greedy(1_000, 600_000)
    yield greedy(1_000, 600_000, equal=True)
    yield greedy(10_000, 60_000)
    yield exhaustive(1_000, 500)
    yield shuffle(10**7, rounds=5)
    yield shuffle(10**8, rounds=3)
    yield sample_index(10**6, mean_length=600)
    yield sample_index(10**7, mean_length=600)
    yield sample_index(10**8, mean_length=600)
    yield sample_index(10**7, mean_length=2400)
    yield visits(10**7, mean_length=600, rounds=5)
    yield visits(10**8, mean_length=600, rounds=3)
