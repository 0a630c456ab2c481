"""Installs Trackbed where it is not, and measures what the machine can do."""

import importlib.util
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from tests.gpu.card import DEVICE, IS_DRY, scaled
from tests.gpu.sections.result import Result, run_section

ROOT = Path(__file__).parents[3]
SITE = ROOT / ".gpu-site"


def install(result: Result) -> None:
    """Builds Trackbed from this folder, without a network, unless it can be imported. Wheels lie in `.whl`."""
    if importlib.util.find_spec("trackbed") is not None:
        return
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(SITE)]
    wheels = sorted(map(str, (ROOT / ".whl").glob("*.whl")))
    environment = {**os.environ, "PYTHONPATH": str(SITE), "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count())}
    for name, what in {"wheels": wheels, "Trackbed": ["--no-build-isolation", str(ROOT)]}.items():
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *what], check=True, env=environment)
        result.figures[f"seconds to install {name}"] = time.monotonic() - began


def seconds_of(call, count=5) -> float:
    """Median time of a call, on the device."""
    times = []
    for _ in range(count + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def measure(out: Path, result: Result) -> None:
    """Copies on the device, between device and host, and to the disk, in GB/s."""
    size = scaled(256 << 20)
    device, other = (torch.zeros(size, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    pageable = torch.zeros(size, dtype=torch.uint8)
    pinned = pageable if IS_DRY else pageable.pin_memory()
    speeds = {
        "device to device": lambda: other.copy_(device),
        "pinned to device": lambda: device.copy_(pinned, non_blocking=True),
        "device to pinned": lambda: pinned.copy_(device, non_blocking=True),
        "pageable to device": lambda: device.copy_(pageable),
        "device to pageable": lambda: pageable.copy_(device),
    }
    for name, call in speeds.items():
        result.figures[f"{name}, GB/s"] = size / seconds_of(call) / 1e9
    path, content = out / "disk", b"\1" * scaled(1 << 28)
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(4):
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    result.figures["disk written and flushed, GB/s"] = 4 * len(content) / (time.perf_counter() - began) / 1e9
    path.unlink()


def run(out: Path, result: Result) -> None:
    """Installs, and measures."""
    install(result)
    result.figures["python"] = sys.version.split()[0]
    result.figures["torch"] = torch.__version__
    if not IS_DRY:
        result.figures["card"] = torch.cuda.get_device_name()
        result.figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    result.figures["cores"] = os.cpu_count()
    measure(out, result)


if __name__ == "__main__":
    run_section("install", run)
