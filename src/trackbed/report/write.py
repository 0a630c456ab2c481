"""Reading the folder of a run, and publishing its report."""

import contextlib
import gc
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from trackbed.blends.blend_file import BlendFile
from trackbed.blends.read import read_blend_content
from trackbed.errors import ArgumentError, TrackbedError
from trackbed.files.publish import new_partial, publish, write_new
from trackbed.files.regular import open_regular
from trackbed.ledger import read_run
from trackbed.ledger.record import BEGIN, BLEND, BLENDS, EVENTS, OPEN, STEPS, RunRecord
from trackbed.report.page import page_of
from trackbed.report.plan import RunInputs, plan_report

NAME: Final = "report.html"
_BLEND_NAME: Final = re.compile(rf"{BLENDS}/[0-9]{{1,9}}\.toml")
_BLOCK_BYTES: Final = 1 << 20


def write_report(run: Path, output: Path | None = None) -> Path:
    """Writes the report of a run, also while a job adds to its record. The file appears as a whole.

    Args:
        run: folder of the run.
        output: path of the report, whose earlier version is replaced; by default `report.html` in the folder.

    Returns:
        The path of the report.

    Raises:
        FormatError: the folder has no record, or a damaged one.
        ArgumentError: `output` is a file of the record.
        OSError: the record cannot be read, or the report not written.
    """
    path = run / NAME if output is None else output
    folder, target = run.resolve(), path.resolve()
    if target in (folder / STEPS, folder / EVENTS) or target.parent == folder / BLENDS:
        raise ArgumentError(f"{path}: the report must not replace a file of the record")
    if not target.parent.is_dir():
        raise ArgumentError(f"{path}: the report must be written into a folder that is there, found none")
    with _without_collector():
        page = page_of(plan_report(read_inputs(run)))
    partial = new_partial(path)
    try:
        write_new(partial, page.encode("utf-8", errors="backslashreplace"))
        publish(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def read_inputs(run: Path) -> RunInputs:
    """Reads the record of a run, and its copies of blend files.

    Raises:
        FormatError: the folder has no record, or a damaged one.
        OSError: the record cannot be read.
    """
    record = read_run(run)
    sizes = [int(event["steps_bytes"]) for event in record.events if event.get("event") == BEGIN]
    return RunInputs(run.resolve().name, record, _lines_before(run / STEPS, sizes), _blend_files(run, record))


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Stops the garbage collector, which would look through all lines each time that their number grows by a fourth."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _lines_before(path: Path, sizes: Sequence[int]) -> list[int]:
    """Returns the number of lines before each byte of a file."""
    found = dict.fromkeys([0, *sizes], 0)
    if path.exists() and any(sizes):
        with open(open_regular(path)[0], "rb") as file:  # noqa: PTH123  a descriptor
            place = lines = 0
            for size in sorted(size for size in found if size > 0):
                while place < size and (block := file.read(min(_BLOCK_BYTES, size - place))):
                    place, lines = place + len(block), lines + block.count(b"\n")
                found[size] = lines
    return [found[size] for size in sizes]


def _blend_files(run: Path, record: RunRecord) -> dict[str, BlendFile | str]:
    """Returns the blend files of the jobs by their names in events, or the reasons why they cannot be read."""
    found: dict[str, BlendFile | str] = {}
    folder = run / BLENDS
    for event in record.events:
        if event.get("event") == OPEN and isinstance(event.get("blend_source"), str):
            folder = Path(event["blend_source"]).parent
        name = event.get("blend")
        if event.get("event") in (OPEN, BLEND) and name is not None and str(name) not in found:
            found[str(name)] = _read_blend(run, str(name), folder)
    return found


def _read_blend(run: Path, name: str, folder: Path) -> BlendFile | str:
    if not _BLEND_NAME.fullmatch(name):
        return f"the copy of a blend file must be {BLENDS}/NUMBER.toml"
    path = run / name
    try:
        with open(open_regular(path)[0], "rb") as file:  # noqa: PTH123  a descriptor
            return read_blend_content(file.read(), path=path, folder=folder)
    except (TrackbedError, OSError, ValueError) as error:  # a path may have characters that no path has
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return " ".join(reason.split())
