"""Pickles of checkpoints: only classes of data, and those that torch and the program allow, are loaded."""

import contextlib
import pickletools
import re
from collections.abc import Iterator, Mapping
from io import BytesIO
from pickle import PicklingError, UnpicklingError
from typing import Any, Final
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch import _weights_only_unpickler as torch_unpickler

from trackbed.checkpoint.allowed_classes import allowing, stand_in, unknown_names
from trackbed.errors import CheckpointError
from trackbed.files.checksum import crc32

__all__ = ["load_torch_item", "torch_bytes"]

_GLOBAL: Final = re.compile(r"GLOBAL ([\w.<>]+)|(?:class|operand|global)[^\w]*([\w<>]+\.[\w.<>]+)")
_READ_BYTES: Final = 4 << 20
_MOST_PROTOCOL: Final = 3
"""Protocol of pickles from which torch's own loader understands only some operations."""
_PICKLE_ERRORS: Final = (PicklingError, TypeError, AttributeError, ValueError, RuntimeError)
"""Errors of values that cannot be pickled."""


def load_torch_item(content: bytes | memoryview, where: str, *, checks_members: bool = True) -> Any:
    """Loads what `torch.save` wrote.

    Args:
        content: bytes of the item.
        where: name of file and item, for errors.
        checks_members: True to compare the CRC-32 of all members of the archive, where it is one.

    Raises:
        CheckpointError: it is damaged, or has a class that is not allowed.
    """
    try:
        if checks_members and bytes(content[:4]) == b"PK\3\4":
            _check_members(content, where)
        _check_protocol(content, where)
        return _load(content)
    except CheckpointError:
        raise
    # The errors of torch, which advise to load any class, are not shown.
    except UnpicklingError as error:
        name = _class_in(error)
        if name is None:
            msg = f"{where}: must be a pickle of allowed classes, but cannot be read: {_without_advice(error)}"
            raise CheckpointError(msg) from None
        raise CheckpointError(_refusal(where, name)) from None
    except Exception as error:  # noqa: BLE001  damaged and hostile pickles raise errors of any kind
        found = f"{type(error).__name__}: {_without_advice(error)}"
        msg = f"{where}: must be what torch.save writes, but cannot be read: {found}"
        raise CheckpointError(msg) from None


def _refusal(where: str, name: str) -> str:
    return (
        f"{where}: must be made of classes that are allowed, but has {name.rpartition('.')[2]!r} ({name}): if you "
        f"trust it, call torch.serialization.add_safe_globals([{name}]) first"
    )


def _without_advice(error: Exception) -> str:
    """First sentences of an error, without what torch says about its argument `weights_only`."""
    text = str(error)
    cause = text.rpartition("WeightsUnpickler error:")[2].strip() or text
    lines = [line.strip() for line in cause.splitlines() if line.strip()]
    said = [line for line in lines if "weights_only" not in line and "weights-only" not in line.lower()]
    return said[0] if said else "it is not a pickle that can be read safely"


def _check_protocol(content: bytes | memoryview, where: str) -> None:
    """Checks that pickles have a protocol that torch's loader understands.

    Raises:
        CheckpointError: one has another; names the first class that is not allowed, if there is one.
    """
    for pickle in _pickles(content):
        protocol = pickle[1] if pickle[:1] == b"\x80" and len(pickle) > 1 else 0
        if protocol <= _MOST_PROTOCOL:
            continue
        with allowing():  # torch has no public names for these
            allowed = {*torch_unpickler._get_allowed_globals(), *_user_globals()}  # noqa: SLF001
        unknown = next((name for name in _globals_of(BytesIO(pickle)) if name not in allowed), None)
        if unknown is not None:
            raise CheckpointError(_refusal(where, unknown))
        msg = (
            f"{where}: must be a pickle of protocol {_MOST_PROTOCOL} or lower, as torch.save writes it, but is of "
            f"protocol {protocol}: load it where it was made, and save it again without pickle_protocol"
        )
        raise CheckpointError(msg)


def _user_globals() -> Mapping[str, Any]:
    """Classes that the program has allowed, by full name."""
    found: Mapping[str, Any] = torch_unpickler._get_user_allowed_globals()  # type: ignore[no-untyped-call]  # noqa: SLF001
    return found


def _pickles(content: bytes | memoryview) -> Iterator[bytes]:
    """Yields the pickle of an archive of torch, or the content itself."""
    if bytes(content[:4]) != b"PK\3\4":
        yield bytes(content)
        return
    with ZipFile(BytesIO(content)) as archive:
        for member in archive.infolist():
            if member.filename.endswith("/data.pkl") or member.filename == "data.pkl":
                yield archive.read(member)


def _globals_of(stream: BytesIO) -> Iterator[str]:
    """Yields the full names of classes and functions in pickles of any protocol that follow each other.

    They are not run. What comes after the last one, such as the elements of tensors in older files, is ignored.
    """
    with contextlib.suppress(ValueError, EOFError):
        while True:
            yield from _globals_of_one(stream)


def _globals_of_one(stream: BytesIO) -> Iterator[str]:
    """Yields the names in the next pickle.

    Raises:
        ValueError: there is none.
    """
    memo: dict[int, Any] = {}
    strings: list[Any] = []
    for operation, argument, _ in pickletools.genops(stream):
        if operation.name == "GLOBAL":
            yield str(argument).replace(" ", ".")
        elif operation.name == "STACK_GLOBAL":
            yield ".".join(map(str, strings[-2:]))
        elif operation.name == "MEMOIZE":
            memo[len(memo)] = strings[-1] if strings else None
        elif operation.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(argument or 0)] = strings[-1] if strings else None
        elif operation.name in ("GET", "BINGET", "LONG_BINGET"):
            strings.append(memo.get(int(argument or 0)))
        elif "UNICODE" in operation.name:
            strings.append(argument)


def _load(content: bytes | memoryview) -> Any:
    """Loads a pickle. Inside `naming_unknown` each class that is not allowed is replaced by one that is its name."""
    stand_ins: list[tuple[Any, str]] = []
    while True:
        try:
            with allowing(*stand_ins):
                return torch.load(BytesIO(content), map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            name, names = _class_in(error), unknown_names()
            if name is None or names is None or name in (known for _, known in stand_ins):
                raise
            names.add(name)
            stand_ins.append((stand_in(name), name))


def _class_in(error: UnpicklingError) -> str | None:
    """Name of the class that is not allowed; None if that is not the reason."""
    found = _GLOBAL.search(str(error))
    return None if found is None else next(filter(None, found.groups()))


def torch_bytes(value: Any, where: str) -> bytes:
    """Bytes that `torch.save` writes.

    Args:
        value: value.
        where: name of file or item, for errors.

    Raises:
        CheckpointError: the value cannot be pickled, or has a class that is not allowed, so that it could not be
            loaded.
    """
    stream = BytesIO()
    try:
        torch.save(value, stream)
    except _PICKLE_ERRORS as error:
        place = _place_of_failure(value) if isinstance(value, dict) else ""  # the lists of one are our own
        msg = f"{where}: {place}must be a value that can be pickled, but: {error}"
        raise CheckpointError(msg) from error
    load_torch_item(stream.getbuffer(), where, checks_members=False)
    return stream.getvalue()


def _place_of_failure(value: Any, place: str = "") -> str:
    """Place of the first value in dictionaries and lists that cannot be pickled, with a blank; empty for the top."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, below in pairs:
        try:
            torch.save(below, BytesIO())
        except _PICKLE_ERRORS:
            return _place_of_failure(below, f"{place}.{key}" if place else str(key))
    return f"{place} " if place else ""


def _check_members(content: bytes | memoryview, where: str) -> None:
    """Compares the CRC-32 of the members of an archive, which torch does not do.

    Raises:
        CheckpointError: one differs.
    """
    try:
        with ZipFile(BytesIO(content)) as archive:
            for member in archive.infolist():
                if member.compress_type != ZIP_STORED:
                    msg = f"{where}: members must be stored plainly, but {member.filename} is compressed"
                    raise CheckpointError(msg)
                # zipfile checks too, with a slower function, at the end of a member
                with archive.open(member) as stream:
                    stream._expected_crc = None  # type: ignore[attr-defined]  # noqa: SLF001
                    crc = 0
                    while piece := stream.read(_READ_BYTES):
                        crc = crc32(piece, crc)
                if crc != member.CRC:
                    msg = (
                        f"{where}: the checksum of {member.filename} must be {member.CRC:08x}, but is {crc:08x}: the "
                        "file is damaged"
                    )
                    raise CheckpointError(msg)
    except BadZipFile as error:
        msg = f"{where}: must be an archive of torch.save, but is not: {error}: the file is damaged"
        raise CheckpointError(msg) from error
