"""The samples of a step of a run, for `trackbed show --run`."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trackbed.errors import ArgumentError, FormatError

if TYPE_CHECKING:
    from trackbed.blends import BlendFile


def find_step(run: Path, step: int, rank: int | None, idx_cache: str | None) -> tuple["BlendFile", list[int]]:
    """Returns the blend file that a step was fed from, and the positions of the step's samples in its dataset.

    Args:
        run: folder of the run.
        step: number of the step.
        rank: the rank that has read them; None for all.
        idx_cache: folder for copies of indices of pairs in object stores.

    Raises:
        ArgumentError: there is no such step, or rank.
        FormatError: the record is damaged.
        OSError: it cannot be read.
    """
    from trackbed.blends import read_blend_file
    from trackbed.ledger import read_run
    from trackbed.loading.loader import samples_of

    line, job = read_run(run).find(step)
    try:
        division = {name: job[name] for name in _names(samples_of)}
        source, copy = Path(job["blend_source"]), run / job["blend"]
        first, num_samples = line["first_sample"], line["num_samples"]
    except KeyError as error:
        raise FormatError(f"{run}: a job must have said {error} before step {step}, found nothing") from None
    if rank is not None and not 0 <= rank < division["num_ranks"]:
        raise ArgumentError(f"--rank must be in [0, {division['num_ranks']}), the ranks of step {step}, found {rank}")
    positions = samples_of(first, num_samples, rank, **division) if num_samples else []
    stages = job.get("stages")
    file = read_blend_file(copy, folder=source.parent).with_idx_cache(idx_cache)
    return replace(file, schedule=None if stages is None else tuple(map(tuple, stages))), positions


def _names(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
