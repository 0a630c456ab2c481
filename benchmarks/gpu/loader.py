"""Batches into one GPU: as fast as they come, and beside training steps."""

import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

import trackbed
from benchmarks.gpu.steps import Contenders
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.datasets import GPTDataset, GPTDatasetConfig, NullTokenizer
from trackbed.tokens import IndexedDatasetBuilder

VOCABULARY = 50_000


def write_corpus(folder: Path, num_documents: int) -> str:
    """Documents of 4,096 random tokens of two bytes."""
    rng = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(str(folder / "corpus.bin"), np.uint16)
    for _ in range(num_documents):
        builder.add_document(rng.integers(0, VOCABULARY, 4096, dtype=np.uint16), [4096])
    builder.finalize(str(folder / "corpus.idx"))
    return str(folder / "corpus")


def open_corpus(prefix: str, length: int) -> GPTDataset:
    """The corpus as samples of some length, in random order."""
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=length,
        blend=([prefix], None),
        split="1",
        path_to_cache=f"{prefix}-cache",
        tokenizer=NullTokenizer(VOCABULARY),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], lambda: True, config).build()[0]


def batches_of(dataset: GPTDataset, batch_size: int, device: str) -> trackbed.BatchLoader:
    """A loader into the GPU; in a rehearsal, into the memory of the host."""
    where = {"device": device} if device == "cuda" else {}
    return trackbed.BatchLoader(dataset, batch_size=batch_size, num_threads=8, **where)


def samples_per_second(dataset: GPTDataset, batch_size: int, device: str, seconds: float) -> float:
    """Samples that arrive in the GPU if nothing is done with them."""
    loader = batches_of(dataset, batch_size, device)
    began, count = time.perf_counter(), 0
    for _ in loader:
        count += batch_size
        if time.perf_counter() - began > seconds:
            break
    torch.cuda.synchronize()
    return count / (time.perf_counter() - began)


def beside_steps(dataset: GPTDataset, device: str, *, rows: int, count: int) -> dict[str, float]:
    """Steps on batches of a loader against steps on one batch that stays in the GPU, in turns of ten."""
    is_real = device == "cuda"
    size = (1024, 24, VOCABULARY + 304) if is_real else (16, 2, VOCABULARY)
    step = Contenders(device, *size).trackbeds()
    loader = batches_of(dataset, rows, device)
    batches: Iterator[Any] = itertools.chain.from_iterable(itertools.repeat(loader))
    kept = next(batches)["tokens"].clone()
    for _ in range(3):
        step(kept)
    times: dict[str, list[float]] = {"loader": [], "kept": []}
    stalls = loader.counters.stall_seconds
    for number in range(count // 10 * 2 or 2):
        name = ("loader", "kept")[number % 2]
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10 if is_real else 1):
            step(next(batches)["tokens"] if name == "loader" else kept)
        torch.cuda.synchronize()
        times[name].append(time.perf_counter() - began)
    found = {
        "step on batches of the loader / on a batch that stays": statistics.median(times["loader"])
        / statistics.median(times["kept"]),
        "share of the time that the loop waited for batches": (loader.counters.stall_seconds - stalls)
        / sum(times["loader"]),
    }
    if is_real:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(5):
                step(next(batches)["tokens"])
            torch.cuda.synchronize()
        found["share of the copies that ran under kernels"] = share_under_kernels(profiled)
    return found


def share_under_kernels(profiled: Any) -> float:
    """Part of the time of the copies to the GPU in which a kernel ran, too."""
    copies, kernels = [], []
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            span = event.time_range.start, event.time_range.end
            if "Memcpy HtoD" in event.name:
                copies.append(span)
            elif "Mem" not in event.name:
                kernels.append(span)
    total = sum(end - start for start, end in copies)
    merged: list[list[float]] = []
    for start, end in sorted(kernels):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    covered = sum(
        max(0.0, min(end, high) - max(start, low)) for start, end in copies for low, high in merged if low < end
    )
    return covered / total if total else 1.0


def measure_all(folder: Path, *, device: str = "cuda", num_documents: int = 250_000) -> dict[str, float]:
    """All of it; with `device="cpu"`, a rehearsal."""
    is_real = device == "cuda"
    prefix = write_corpus(folder, num_documents)
    long, short = open_corpus(prefix, 4096 if is_real else 16), open_corpus(prefix, 2048 if is_real else 16)
    seconds = 3.0 if is_real else 0.1
    return {
        "samples of 4,096 tokens a second, batches of 32": samples_per_second(long, 32, device, seconds),
        "samples of 2,048 tokens a second, batches of 8": samples_per_second(short, 8, device, seconds),
        **beside_steps(short, device, rows=8 if is_real else 1, count=30 if is_real else 1),
    }
