"""`trackbed ckpt`: contents, checks and comparison of checkpoints."""

import contextlib
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from trackbed.plural import number_of

if TYPE_CHECKING:
    import torch

    from trackbed.checkpoint import Checkpoint


class _Folder(click.Path):
    """A folder that is there, or an address of an object store."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        """Returns an address as it is, and a path that must be there."""
        from trackbed.files.stores import is_address

        if isinstance(value, str) and is_address(value):
            return value
        return Path(os.fsdecode(super().convert(value, param, ctx)))


_CHECKPOINT = _Folder(exists=True, file_okay=False, path_type=Path)
_FOLDER = click.argument("folder", metavar="FOLDER", type=_CHECKPOINT)


@click.group()
@click.pass_context
def ckpt(ctx: click.Context) -> None:
    """Look into checkpoints, also Megatron Core's and torch's.

    Objects of classes that are not known here are compared by their names and states; no code of theirs runs.
    """
    if ctx.resilient_parsing:
        return
    from trackbed.checkpoint.format.allowed_classes import naming_unknown

    ctx.obj = ctx.with_resource(naming_unknown())


@ckpt.command()
@_FOLDER
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(folder: Path | str, *, as_json: bool) -> None:
    """List the tensors and objects of a checkpoint.

    Plain tensors and values, which rank 0 has saved, are the common state: `trackbed ckpt inspect` lists its keys. A
    tensor with two names, as of tied weights, is stored once: its second name has `= FIRST NAME` in place of a size.
    """
    from rich import box
    from rich.filesize import decimal
    from rich.table import Table

    from trackbed.cli.output import table_console

    rows = _contents(folder)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("key", overflow="fold", min_width=12)
    for column in ("type", "shape", "boxes", "size"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        shape = "" if row["shape"] is None else " x ".join(f"{size:,}" for size in row["shape"]) or "scalar"
        size = f"= {_printable(row['same_as'])}" if "same_as" in row else decimal(row["bytes"])
        table.add_row(_printable(row["key"]), row["dtype"] or "object", shape, f"{row['boxes']:,}", size)
    if rows:
        table_console().print(table)
    tensors, size = sum(row["dtype"] is not None for row in rows), decimal(sum(row["bytes"] for row in rows))
    counts = f"{number_of(tensors, 'sharded tensor')}, {number_of(len(rows) - tensors, 'object')}, {size}"
    click.echo(f"{counts}; `trackbed ckpt inspect` shows the keys of plain values")


@ckpt.command(short_help="Show program, formats, files and common state.")
@_FOLDER
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(folder: Path | str, *, as_json: bool) -> None:
    """Show what a checkpoint is: program, formats, files, keys of the common state."""
    from trackbed.checkpoint.folder import any_folder, open_folder
    from trackbed.checkpoint.format.config_file import read_config

    opened = open_folder(any_folder(folder))
    config = read_config(opened.path)
    common = opened.load_common()
    rows = _contents(folder)
    fields: dict[str, Any] = {
        "folder": str(folder),
        "saved_by": "trackbed" if opened.side is not None else "torch" if config is None else "megatron-core",
        "save_id": None if opened.side is None else opened.side.save_id,
        "format": None if config is None else [config.sharded_backend, config.sharded_backend_version],
        "files": sorted(opened.catalogue.files),
        "bytes": sum(row["bytes"] for row in rows),
        "common_keys": sorted(map(_key_text, common)),
        "contents": rows,
    }
    if as_json:
        click.echo(json.dumps(fields, indent=1))
        return
    for name in ("folder", "saved_by", "save_id", "format", "bytes"):
        click.echo(f"{name.replace('_', ' ')}: {fields[name]}")
    click.echo(f"files: {len(fields['files']):,}")
    click.echo(f"common state: {', '.join(map(_printable, fields['common_keys'])) or 'none'}")
    click.echo(f"tensors and objects: {len(rows):,}; `trackbed ckpt ls` lists them")


@ckpt.command(short_help="Write the model as files of safetensors.")
@_FOLDER
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Type of tensors of floating point.")
@click.option(
    "--rename",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File in JSON with new names by name; others stay.",
)
@click.option("--shard-size", default="5GB", show_default=True, help="Size of the tensors of one file.")
def export(folder: Path | str, target: Path, dtype: str | None, rename: Path | None, shard_size: str) -> None:
    """Write the model of a checkpoint to a new folder, in Hugging Face's layout.

    These are the tensors under `model.`, without that prefix; if there are none, all but those under `optimizer.`.
    The folder appears whole or not at all. Put a `config.json` beside the files for `transformers`.
    """
    import torch

    from trackbed.checkpoint.export import export_model
    from trackbed.cli.progress import show_progress

    names = None if rename is None else _renames(rename)
    kind = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    with show_progress("exporting") as progress:
        found = export_model(
            folder, target, dtype=kind, rename=names, file_bytes=_num_bytes(shard_size), progress=progress
        )
    size = sum(tensor.num_bytes for tensor in found)
    click.echo(f"{target}: {number_of(len(found), 'tensor')}, {size:,} bytes")


@ckpt.command("import", short_help="Make a checkpoint of files of safetensors.")
@click.argument("folder", metavar="FOLDER", type=_CHECKPOINT)
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--prefix", default="model.", show_default=True, help="Text before the names of the tensors.")
def import_(folder: Path, target: Path, prefix: str) -> None:
    """Make a checkpoint of a folder of safetensors, as Hugging Face's libraries write it."""
    from trackbed.checkpoint.export import import_model

    click.echo(f"{target}: {number_of(import_model(folder, target, prefix=prefix), 'tensor')}")


_UNITS: Final = {"": 1, "B": 1} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for end, base in (("B", 1000), ("iB", 1024))
}


def _num_bytes(text: str) -> int:
    """Number of bytes, such as 5GB."""
    found = re.fullmatch(r"(\d+) ?([A-Za-z]*)", text)
    if found is None or found[2] not in _UNITS:
        raise click.UsageError(f"--shard-size must be a number of bytes, such as 5GB or 500MiB, found {text!r}")
    return int(found[1]) * int(_UNITS[found[2]])


def _renames(path: Path) -> dict[str, str]:
    """New names by name, from a file in JSON."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise click.UsageError(f"--rename: {path} must be JSON, but is not: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise click.UsageError(f"--rename: {path} must have texts by name, found {str(found)[:60]}")
    return found


@ckpt.command(short_help="Compare every byte of a checkpoint with its checksums.")
@_FOLDER
@click.pass_context
def verify(ctx: click.Context, folder: Path | str) -> None:
    """Read every byte of a checkpoint, and compare it with its checksums.

    Prints a line for each problem; the exit status is 1 if there is any.
    """
    from trackbed.checkpoint import find_damage
    from trackbed.checkpoint.folder import any_folder, open_folder
    from trackbed.cli.progress import cumulative, show_progress, size_of

    with show_progress("verifying") as progress:
        is_local = isinstance(folder, Path) and folder.is_dir()
        total = size_of(map(str, Path(folder).iterdir())) if is_local else _size_in_store(folder)
        problems = list(find_damage(folder, cumulative(progress, max(1, total))))
    for problem in problems:
        where = "" if str(folder) in problem else f"{folder}: "
        click.echo(f"trackbed: {_printable(where + problem)}", err=True)
    if problems:
        ctx.exit(1)
    if ctx.obj:
        names = ", ".join(sorted(map(_printable, ctx.obj)))
        click.echo(f"note: load takes objects of these classes only if the program allows them: {names}", err=True)
    has_checksums = open_folder(any_folder(folder)).side is not None
    click.echo(
        f"{folder}: ok" if has_checksums else f"{folder}: ok, but without checksums, which other programs do not write"
    )


def _size_in_store(folder: Path | str) -> int:
    """Bytes of a checkpoint in a store; 0 if they are not known."""
    from trackbed.checkpoint.folder import any_folder, open_folder
    from trackbed.errors import CheckpointError

    try:
        side = open_folder(any_folder(folder)).side
    except CheckpointError:
        return 0  # `find_damage` says why
    return 0 if side is None else sum(found.num_bytes for found in side.files.values())


@ckpt.command(short_help="List or remove what unfinished saves have left in a store.")
@click.argument("address", metavar="ADDRESS")
@click.option("--remove", is_flag=True, help="Remove saves whose writers are known to be dead.")
@click.option("--all", "with_others", is_flag=True, help="Also those of other hosts and living processes.")
def clean(address: str, *, remove: bool, with_others: bool) -> None:
    """List what unfinished saves have left of a checkpoint in an object store, or of the checkpoints in a folder of it.

    Nothing is removed without --remove. A save that ends later than it is removed raises an error; it never becomes a
    checkpoint that lacks something.
    """
    from trackbed.checkpoint.leftovers import find_leftovers, remove_leftover
    from trackbed.files.publish import Writer

    words = {
        Writer.dead: "its writer is dead",
        Writer.living: "is being written by process {} of this host",
        Writer.elsewhere: "its writer is {}, of which nothing is known here",
    }
    found = find_leftovers(address)
    for one in found:
        objects = f"{number_of(one.num_objects, 'object')}, {one.num_bytes:,} bytes"
        state = words[one.state].format(_printable(one.writer))
        if not one.writer and one.state is Writer.elsewhere:
            state = "there is no marker beside it, so that a program may be copying a checkpoint there"
        click.echo(f"{_printable(one.address)}: {objects}; {state}")
    chosen = [one for one in found if with_others or one.state is Writer.dead]
    if not remove:
        hint = f"; --remove removes {len(chosen):,} of them" if chosen else ""
        click.echo(f"{number_of(len(found), 'unfinished save')}{hint}")
        return
    for one in chosen:
        remove_leftover(one)
    rest = len(found) - len(chosen)
    hint = f"; --all removes the other {rest:,}, too" if rest else ""
    click.echo(f"removed {number_of(len(chosen), 'unfinished save')}{hint}")


@ckpt.command(short_help="Compare two checkpoints, however they are sharded.")
@click.argument("first", metavar="A", type=_CHECKPOINT)
@click.argument("second", metavar="B", type=_CHECKPOINT)
@click.option(
    "--tensors", is_flag=True, help="Compare the tensors alone, not objects, arguments and other plain values."
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    metavar="T",
    help="Elements of tensors that differ by at most T count as equal; by default all bits are compared.",
)
@click.pass_context
def diff(ctx: click.Context, first: Path | str, second: Path | str, *, tensors: bool, tolerance: float | None) -> None:
    """Compare the tensors and objects of two checkpoints, however they are sharded.

    Prints a line for each difference, of a tensor with its largest one; the exit status is 1 if there is any.
    """
    from trackbed.checkpoint import open_checkpoint

    if tolerance is not None and not math.isfinite(tolerance):
        raise click.UsageError(f"--tolerance must be a finite number, found {tolerance}")
    ours, other = open_checkpoint(first), open_checkpoint(second)
    differing = _tensor_differences(ours, other, tolerance)
    differences = [*differing.lines, *([] if tensors else _object_differences(ours, other))]
    for line in differences:
        click.echo(_printable(line))
    if differences:
        ctx.exit(1)
    objects = "" if tensors else f", {len(ours.object_keys):,} objects"
    within = "" if tolerance is None else f" within {tolerance:g} (the largest difference is {differing.largest:.3g})"
    click.echo(f"equal{within}: {len(ours):,} tensors{objects}")


class _TensorDifferences(NamedTuple):
    """Differences between the tensors of two checkpoints."""

    lines: list[str]
    largest: float
    """Largest difference of elements that count as equal."""


def _tensor_differences(ours: "Checkpoint", other: "Checkpoint", tolerance: float | None) -> _TensorDifferences:
    from trackbed.cli.ckpt import compare_tensors

    largest = 0.0
    lines = [f"only in A: {key}" for key in ours if key not in other]
    lines += [f"only in B: {key}" for key in other if key not in ours]
    for key in ours:
        if key not in other:
            continue
        kinds = [(str(side[key].dtype).removeprefix("torch."), list(side[key].shape)) for side in (ours, other)]
        if kinds[0] != kinds[1]:
            lines.append(f"{key}: {kinds[0][0]} {kinds[0][1]} in A, {kinds[1][0]} {kinds[1][1]} in B")
            continue
        a, b = ours[key][...], other[key][...]
        difference = compare_tensors(a, b, tolerance=tolerance)
        if difference.num_elements:
            amount = "" if difference.largest is None else f", by {difference.largest:.3g} at most"
            lines.append(f"{key}: {difference.num_elements:,} of {a.numel():,} elements differ{amount}")
        elif difference.largest is not None:
            largest = max(largest, difference.largest)
    return _TensorDifferences(lines, largest)


def _object_differences(ours: "Checkpoint", other: "Checkpoint") -> list[str]:
    from trackbed.checkpoint.state.tree import diff as compare
    from trackbed.errors import CheckpointError

    keys, others = set(ours.object_keys), set(other.object_keys)
    lines = [f"only in A: {key}" for key in sorted(keys - others)]
    lines += [f"only in B: {key}" for key in sorted(others - keys)]
    pairs = [(key, ours.load_object(key), other.load_object(key)) for key in sorted(keys & others)]
    for name, a, b in [*pairs, ("common state", ours.load_common(), other.load_common())]:
        try:
            only_a, only_b, mismatches = compare(a, b)
        except Exception as error:  # values of hostile checkpoints raise errors of any kind
            raise CheckpointError(
                f"{name}: values must be such that can be compared, but are not: {type(error).__name__}: {error}"
            ) from error
        lines += [f"{name}: only in A: {_path_text(path)}" for path in only_a]
        lines += [f"{name}: only in B: {_path_text(path)}" for path in only_b]
        lines += [f"{name}: {_path_text(path)} differs" for path, *_ in mismatches]
    return lines


def _path_text(path: Any) -> str:
    """Path of a value in nested containers, as text."""
    return ".".join(map(_key_text, path)) if isinstance(path, tuple) else _key_text(path)


def _key_text(key: Any) -> str:
    """A key of the common state as text; the type alone of one that may be nested."""
    return str(key) if isinstance(key, str | int | float) else f"<{type(key).__name__}>"


def _printable(text: str) -> str:
    """Text with escapes in the place of what a terminal cannot print, or would obey."""
    shown = text if text.isprintable() else repr(text)[1:-1]
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def _contents(folder: Path | str) -> list[dict[str, Any]]:
    """Tensors and objects of a checkpoint as JSON values."""
    from trackbed.checkpoint.folder import any_folder, open_folder

    catalogue = open_folder(any_folder(folder)).catalogue
    tensors = []
    first_of_place: dict[tuple[int, int], str] = {}
    for key, stored in catalogue.tensors.items():
        same_as = None
        if stored.rows:
            place = int(catalogue.file[stored.rows[0]]), int(catalogue.start[stored.rows[0]])
            same_as = first_of_place.setdefault(place, key)
        tensors.append(
            {
                "key": key,
                "dtype": str(stored.dtype).removeprefix("torch."),
                "shape": list(stored.shape),
                "boxes": len(stored.rows),
                "bytes": int(catalogue.num_bytes[list(stored.rows)].sum()) if same_as in (None, key) else 0,
                **({} if same_as in (None, key) else {"same_as": same_as}),
            }
        )
    objects = [
        {"key": key, "dtype": None, "shape": None, "boxes": 1, "bytes": int(catalogue.num_bytes[row])}
        for key, row in catalogue.objects.items()
    ]
    return tensors + objects


_AT_ONCE: Final = 1 << 22
"""Elements that are compared together, which bounds the memory of their differences."""


class Difference(NamedTuple):
    """Elements in which two tensors differ."""

    num_elements: int
    """Number of elements that differ."""
    largest: float | None
    """Largest difference of two elements; NaN if only one of them is NaN, None if their type has no differences."""


def compare_tensors(tensor: "torch.Tensor", other: "torch.Tensor", *, tolerance: float | None = None) -> Difference:
    """Returns the elements that differ in their bits, or with `tolerance` by more than that.

    Args:
        tensor: a tensor.
        other: a tensor of the same shape and type.
        tolerance: largest absolute difference that counts as none, at least 0; then NaN is equal to NaN.
    """
    count, largest = 0, 0.0
    is_known = True
    first, second = tensor.reshape(-1), other.reshape(-1)
    for start in range(0, first.numel(), _AT_ONCE):
        found = _compare_part(first[start : start + _AT_ONCE], second[start : start + _AT_ONCE], tolerance)
        count += found.num_elements
        if found.largest is None:
            is_known = False
        elif not found.largest <= largest and largest == largest:  # a NaN stays
            largest = found.largest
    return Difference(count, largest if is_known else None)


def _compare_part(tensor: "torch.Tensor", other: "torch.Tensor", tolerance: float | None) -> Difference:
    import torch

    # Bytes are chosen, as torch 2.9 cannot choose elements of 8-bit floats.
    own, others = (one.view(torch.uint8).view(one.numel(), -1) for one in (tensor, other))
    differs = (own != others).any(dim=1)
    if not bool(differs.any()):
        return Difference(0, 0.0)
    count = int(differs.sum())
    with contextlib.suppress(RuntimeError):  # some types cannot be converted
        distances = _distances(*(one[differs].view(-1).view(tensor.dtype) for one in (own, others)))
        if tolerance is not None:
            count = int((~(distances <= tolerance)).sum())
        is_nan = bool(distances.isnan().any())
        return Difference(count, float("nan") if is_nan else float(distances.max()))
    return Difference(count, None)


def _distances(tensor: "torch.Tensor", other: "torch.Tensor") -> "torch.Tensor":
    """Returns the absolute differences as doubles: 0 for two NaNs, NaN for one."""
    import torch

    if tensor.is_complex() or tensor.is_floating_point():
        kind = torch.complex128 if tensor.is_complex() else torch.float64
        a, b = tensor.to(kind), other.to(kind)
        found = (a - b).abs()
    else:
        # Whole numbers are subtracted as such: doubles would lose the last digits of large ones.
        a, b = tensor.to(torch.int64), other.to(torch.int64)
        found = (torch.maximum(a, b) - torch.minimum(a, b)).double()
        found = torch.where(found < 0, found + 2.0**64, found)  # more than fits into the type
    return torch.where((a.isnan() & b.isnan()) | (a == b), 0.0, found)
