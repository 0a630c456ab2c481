"""What blocks and windows cost in quality, as figures rather than verdicts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from quality.neighbours import differences, same_block_neighbours, serial_correlation
from quality.runs import Runs, sampled
from quality.shuffles import Shuffle, blocks
from quality.tables import batch_composition


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to permute in blocks."""

    block: int
    window: int


SETTINGS: Final = (
    Setting(1, 1),
    Setting(16, 1_024),
    Setting(16, 16_384),
    Setting(64, 64),
    Setting(64, 256),
    Setting(64, 1_024),
    Setting(64, 4_096),
    Setting(1_024, 64),
    Setting(1_024, 256),
    Setting(1_024, 1_024),
    Setting(65_536, 256),
)
"""Those that the documentation has figures of."""

_SIZE: Final = 10**9 + 7
_SEEDS: Final = range(30)
_BATCH: Final = 256


def table() -> str:
    """One Markdown row for each setting; 1.00 is what random permutations give."""
    lines = [
        "| block | window | samples in a window | blocks in a batch | batch composition | same-block neighbours "
        "| differences | serial correlation |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [_row(setting) for setting in SETTINGS]
    return "\n".join(lines)


def _row(setting: Setting) -> str:
    shuffle: Shuffle = blocks(block=setting.block, window=setting.window)
    runs = list(sampled(shuffle, _SIZE, _SEEDS, num_runs=64, length=4_096, stride=1))
    composition, neighbours = batch_composition(runs, batch=_BATCH), same_block_neighbours(runs)
    spread, correlation = differences(runs), serial_correlation(runs)
    return (
        f"| {setting.block:,} | {'' if setting.block == 1 else f'{setting.window:,}'} "
        f"| {_SIZE if setting.block == 1 else setting.block * setting.window:,} "
        f"| {_blocks_in_a_batch(runs, setting.block):.1f} | {composition.value / composition.mean:.3f} "
        f"| {neighbours.value / neighbours.mean:.3f} | {spread.value / spread.mean:.2f} "
        f"| {correlation.value / correlation.variance:+.4f} |"
    )


def _blocks_in_a_batch(runs: Iterable[Runs], block: int) -> float:
    """From how many blocks, that is reads, a batch comes on average."""
    counts = []
    for run in runs:
        batches = np.sort(run.images.reshape(-1, _BATCH) // block, axis=1)
        counts.append(1 + np.count_nonzero(np.diff(batches, axis=1), axis=1))
    return float(np.concatenate(counts).mean())
