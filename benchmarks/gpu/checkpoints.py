"""Saves and loads of tensors on one GPU, against the same tensors on the host, and against PyTorch."""

import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import trackbed

NUM_TENSORS = 300


def tensors_on(device: str, num_bytes: int) -> dict[str, torch.Tensor]:
    """Tensors of float32, as many bytes in all, each with a number of its own."""
    count = num_bytes // NUM_TENSORS // 4 // 64 * 64
    return {
        f"layer{number}": torch.full((count // 64, 64), float(number), device=device) for number in range(NUM_TENSORS)
    }


def sharded(tensors: dict[str, torch.Tensor]) -> dict[str, trackbed.ShardedTensor]:
    """The only shard of each tensor."""
    return {name: trackbed.ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}


def resident_bytes() -> int:
    """Memory of this process on the host."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_of(call: Callable[[], object]) -> int:
    """Bytes by which the memory of this process grew in a call, looked at every 10 ms."""
    before, most, is_over = resident_bytes(), [0], threading.Event()

    def look() -> None:
        while not is_over.wait(0.01):
            most[0] = max(most[0], resident_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        call()
    finally:
        is_over.set()
        thread.join()
    return max(0, most[0] - before)


def seconds_of(call: Callable[[int], object], count: int) -> float:
    """Median time of a call, which gets its number."""
    times = []
    for number in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call(number)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def save_with_torch(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """`torch.save`, flushed."""
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def measure_all(folder: Path, *, device: str = "cuda", num_bytes: int = 2_100_000_000) -> dict[str, float]:
    """Seconds of each way, and bytes of host memory of a save from the GPU; with `device="cpu"`, a rehearsal."""
    gpu, host = tensors_on(device, num_bytes), tensors_on("cpu", num_bytes)
    count = 2
    found: dict[str, float] = {"GB": sum(tensor.nbytes for tensor in gpu.values()) / 1e9}
    found["save from the GPU, s"] = seconds_of(lambda n: trackbed.save(sharded(gpu), folder / f"gpu{n}"), count)
    found["save from the host, s"] = seconds_of(lambda n: trackbed.save(sharded(host), folder / f"host{n}"), count)
    peak = peak_of(lambda: trackbed.save(sharded(gpu), folder / "peak"))
    found["host memory of a save from the GPU, MiB"] = peak / 2**20
    for number in range(count):  # a save does not leave its files in memory, and both loads are to find them there
        trackbed.load(sharded(host), folder / f"gpu{number}")
    found["load into the GPU, s"] = seconds_of(lambda n: trackbed.load(sharded(gpu), folder / f"gpu{n}"), count)
    found["load into the host, s"] = seconds_of(lambda n: trackbed.load(sharded(host), folder / f"gpu{n}"), count)
    found["dcp.save, s"] = seconds_of(lambda n: dcp.save(gpu, checkpoint_id=folder / f"dcp{n}", no_dist=True), count)
    found["dcp.load, s"] = seconds_of(lambda n: dcp.load(gpu, checkpoint_id=folder / f"dcp{n}", no_dist=True), count)
    found["torch.save, s"] = seconds_of(lambda n: save_with_torch(gpu, folder / f"torch{n}.pt"), 1)
    return found
