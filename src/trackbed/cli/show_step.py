"""The samples of a step of a run, for `trackbed show --run`."""

import inspect
import re
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
    from trackbed.cli.blend_split import open_split
    from trackbed.ledger import read_run

    record = read_run(run)
    line, job = record.find(step)
    file = _blend_of(run, job, idx_cache, _last_source(record.events))
    dataset = open_split(file, "train", None) if rank is not None and job.get("balance") else None
    return file, samples_of_step(run, line, job, rank, dataset)


def samples_of_step(
    run: Path, line: dict[str, Any], job: dict[str, Any], rank: int | None = None, dataset: Any = None
) -> list[int]:
    """Returns the positions of the samples of a step, or of those that a rank has read.

    Args:
        run: folder of the run, for errors.
        line: line of the step.
        job: what its job has said of itself.
        rank: the rank; None for all.
        dataset: the dataset, for a rank of a job that balances.
    """
    from trackbed.loading.loader import samples_of

    first, num_samples, _ = _place_of(run, line, job)
    try:
        division = {name: job[name] for name in _names(samples_of)}
    except KeyError as error:
        raise FormatError(f"{run}: a job must have said {error} before its steps, found nothing") from None
    if rank is not None and not 0 <= rank < division["num_ranks"]:
        ranks = f"[0, {division['num_ranks']}), the ranks of step {line['step']}"
        raise ArgumentError(f"--rank must be in {ranks}, found {rank}")
    try:
        division["balance"] = job.get("balance")  # jobs of older releases have none
        return samples_of(first, num_samples, rank, **division, dataset=dataset) if num_samples else []
    except (TypeError, ValueError, KeyError, OverflowError, ArgumentError) as error:
        raise FormatError(f"{run}: a job must have said how it divides samples, found {division}: {error}") from None


def may_have(run: Path, line: dict[str, Any], job: dict[str, Any], positions: list[int]) -> bool:
    """False if a step has none of some positions, without listing its samples."""
    first, count, total = _place_of(run, line, job)
    try:
        stop = first + count + sum(last - begin + 1 for begin, last in job.get("skip", []))
    except (TypeError, ValueError) as error:
        raise FormatError(
            f"{run}: a job must have said what it skips as pairs, found {job['skip']!r}: {error}"
        ) from None
    return bool(count) and (stop > total or any(first <= position < stop for position in positions))


def _place_of(run: Path, line: dict[str, Any], job: dict[str, Any]) -> tuple[int, int, int]:
    """Returns the first sample of a step, their number, and the number of samples of the dataset."""
    total, count = job.get("total_samples"), line.get("num_samples")
    first = 0 if count == 0 else line.get("first_sample")
    numbers = (first, count, total)
    if not all(type(one) is int for one in numbers) or not (0 <= first <= total < 2**63 and 0 <= count <= total):  # type: ignore[operator]
        found = f"{count} from {first} on, of {total}"
        raise FormatError(f"{run}: step {line.get('step')} must have samples of the dataset, found {found}")
    return first, count, total  # type: ignore[return-value]  # whole numbers


def find_last_blend(run: Path, idx_cache: str | None) -> "BlendFile":
    """Returns the blend file that the next step of a run is fed from."""
    from trackbed.ledger import read_run
    from trackbed.ledger.record import BLEND, OPEN

    job: dict[str, Any] = {}
    events = read_run(run).events
    for event in events:
        if event.get("event") in (OPEN, BLEND):
            job = {**({} if event["event"] == OPEN else job), **event}
    return _blend_of(run, job, idx_cache, _last_source(events))


def _last_source(events: list[dict[str, Any]]) -> Any:
    """Path of the blend file of the newest job."""
    from trackbed.ledger.record import OPEN

    return next((event.get("blend_source") for event in reversed(events) if event.get("event") == OPEN), None)


def _blend_of(run: Path, job: dict[str, Any], idx_cache: str | None, newest: Any) -> "BlendFile":
    """Returns the blend file of a job, with the stages that it has had.

    Its paths are relative to where the file was, or to where that of the newest job is, if all has been moved there.
    """
    from trackbed.blends import read_blend_file

    try:
        source, copy = Path(job["blend_source"]), run / job["blend"]
        stages = job.get("stages") and [
            (int(first), list(map(float, one)), *more) for first, one, *more in job["stages"]
        ]
        is_name = re.fullmatch(r"blends/\d+\.toml", job["blend"]) is not None and "\0" not in job["blend_source"]
    except KeyError as error:
        raise FormatError(f"{run}: a job must have said {error} before its steps, found nothing") from None
    except (TypeError, ValueError) as error:
        raise FormatError(f"{run}: a job must have said which blend it reads, found: {error}") from None
    if not is_name:
        raise FormatError(f"{run}: a job must have said a copy of a blend file, found {job['blend']!r}")
    if not source.parent.is_dir() and isinstance(newest, str):
        source = Path(newest)
    file = read_blend_file(copy, folder=source.parent).with_idx_cache(idx_cache)
    return replace(file, schedule=tuple(stages) if stages else None)


def _names(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
