"""Speed of saves and loads of tensors on the GPU, and the host memory that they take."""

import tempfile
from pathlib import Path

from benchmarks.gpu.checkpoints import measure_all
from tests.gpu.card import DEVICE, IS_DRY, scaled
from tests.gpu.sections.result import Result, run_section


def run(out: Path, result: Result) -> None:
    """Measures."""
    with tempfile.TemporaryDirectory(dir=out) as folder:
        found = measure_all(Path(folder), device=DEVICE, num_bytes=max(1 << 20, scaled(2_100_000_000)))
    result.figures.update(found)
    ratios = [
        ("C1 save from the GPU / from the host", "save from the GPU, s", "save from the host, s", 1.15),
        ("C3 load into the GPU / into the host", "load into the GPU, s", "load into the host, s", 1.25),
        ("C5 save / dcp.save", "save from the GPU, s", "dcp.save, s", 0.67),
    ]
    for name, ours, theirs, wanted in ratios:
        result.line(name, found[ours] / found[theirs], 1000 if IS_DRY else wanted)
    memory = "host memory of a save from the GPU, MiB"
    result.line(f"C4 {memory}", found[memory], 256)


if __name__ == "__main__":
    run_section("checkpoints", run)
