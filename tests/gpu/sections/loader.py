"""Speed of batches into the GPU."""

import tempfile
from pathlib import Path

from benchmarks.gpu.loader import measure_all
from tests.gpu.card import DEVICE, IS_DRY, scaled
from tests.gpu.sections.result import Result, run_section


def run(out: Path, result: Result) -> None:
    """Measures."""
    with tempfile.TemporaryDirectory(dir=out) as folder:
        found = measure_all(Path(folder), device=DEVICE, num_documents=scaled(250_000))
    result.figures.update(found)
    lines = [
        ("L1", "share of the time that the loop waited for batches", 0.001, False),
        ("L2", "step on batches of the loader / on a batch that stays", 1.005, False),
        ("L3", "samples of 4,096 tokens a second, batches of 32", 60_000, True),
        ("L4", "share of the copies that ran under kernels", 0.95, True),
    ]
    for name, figure, wanted, at_least in lines:
        if figure in found:
            result.line(
                f"{name} {figure}",
                found[figure],
                0 if at_least and IS_DRY else 100 if IS_DRY else wanted,
                at_least=at_least,
            )


if __name__ == "__main__":
    run_section("loader", run)
