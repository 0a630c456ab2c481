"""Pickles of checkpoints: only classes of data, and those that torch and the program allow, are loaded."""

import contextlib
import pickletools
from collections.abc import Iterator, Mapping
from io import BytesIO
from pickle import UnpicklingError
from typing import Any, Final
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np
import torch
from torch import _weights_only_unpickler as torch_unpickler

from trackbed.checkpoint.format.allowed_classes import allowing, stand_in, unknown_names
from trackbed.checkpoint.state.partial_tensors import search
from trackbed.checkpoint.values.explain_refusal import PICKLE_ERRORS, class_in, place_of_change, refusal, without_advice
from trackbed.checkpoint.values.pickler import RefusedError, pickle_module, survey
from trackbed.checkpoint.values.rebuild import FactoryStandIn
from trackbed.checkpoint.values.storages import own_memory
from trackbed.errors import CheckpointError
from trackbed.files.checksum import crc32

_IS_FOLDER: Final = 0x10
"""Attribute of folders in archives."""
_READ_BYTES: Final = 4 << 20
_MOST_PROTOCOL: Final = 3
"""Protocol of pickles from which torch's own loader understands only some operations."""


class RefusedClassError(CheckpointError):
    """An item has a class that is not allowed."""


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
        pickles = list(_pickles(content))
        _check_protocol(pickles, where)
        with_defaultdicts = any(b"defaultdict" in pickle for pickle in pickles)
        found = _load(content, with_defaultdicts=with_defaultdicts)
        if with_defaultdicts:
            _check_factories(found, where)
    except CheckpointError:
        raise
    # The errors of torch, which advise to load any class, are not shown.
    except UnpicklingError as error:
        name = class_in(error)
        if name is None:
            raise CheckpointError(
                f"{where}: must be a pickle of allowed classes, but cannot be read: {without_advice(error)}"
            ) from None
        raise RefusedClassError(_refusal(where, name)) from None
    except Exception as error:  # noqa: BLE001  damaged and hostile pickles raise errors of any kind
        found = f"{type(error).__name__}: {without_advice(error)}"
        raise CheckpointError(f"{where}: must be what torch.save writes, but cannot be read: {found}") from None
    return found


def _check_factories(value: Any, where: str) -> None:
    """Checks that factories lie in defaultdicts alone: a class as a value would be loaded as its stand-in."""
    stops = FactoryStandIn, torch.Tensor, np.ndarray
    for _, found in search(value, lambda one: isinstance(one, stops)):
        if isinstance(found, FactoryStandIn):
            raise CheckpointError(_refusal(where, f"builtins.{found.kind.__name__}"))
        if isinstance(found, torch.Tensor):
            _check_factories(vars(found), where)


def _refusal(where: str, name: str) -> str:
    module, _, short = name.rpartition(".")
    if module == "exceptions":  # the name that protocol 2 has for those of Python, which torch does not find
        advice = "no reader of torch's takes exceptions: save str(value) where it was made"
    else:
        advice = f"if you trust it, call torch.serialization.add_safe_globals([{name}]) first"
    return f"{where}: must be made of classes that are allowed, but has {short!r} ({name}): {advice}"


def _check_protocol(pickles: list[bytes], where: str) -> None:
    """Checks that pickles have a protocol that torch's loader understands."""
    for pickle in pickles:
        protocol = pickle[1] if pickle[:1] == b"\x80" and len(pickle) > 1 else 0
        if protocol <= _MOST_PROTOCOL:
            continue
        with allowing(with_defaultdicts=True):  # torch has no public names for these
            allowed = {*torch_unpickler._get_allowed_globals(), *_user_globals()}
        unknown = next((name for name in _globals_of(BytesIO(pickle)) if name not in allowed), None)
        if unknown is not None:
            raise CheckpointError(_refusal(where, unknown))
        raise CheckpointError(
            f"{where}: must be a pickle of protocol {_MOST_PROTOCOL} or lower, as torch.save writes it, but is of "
            f"protocol {protocol}: load it where it was made, and save it again without pickle_protocol"
        )


def _user_globals() -> Mapping[str, Any]:
    """Classes that the program has allowed, by full name."""
    found: Mapping[str, Any] = torch_unpickler._get_user_allowed_globals()  # type: ignore[no-untyped-call]
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
    """Yields the names in the next pickle."""
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


def _load(content: bytes | memoryview, *, with_defaultdicts: bool) -> Any:
    """Loads a pickle. Inside `naming_unknown` each class that is not allowed is replaced by one that is its name."""
    stand_ins: list[tuple[Any, str]] = []
    while True:
        try:
            with allowing(*stand_ins, with_defaultdicts=with_defaultdicts):
                return torch.load(BytesIO(content), map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            name, names = class_in(error), unknown_names()
            if name is None or names is None or name in (known for _, known in stand_ins):
                raise
            names.add(name)
            stand_ins.append((stand_in(name), name))


def torch_bytes(value: Any, where: str, *, writes_storages: bool = False) -> bytes:
    """Bytes that `torch.save` writes.

    Args:
        value: value.
        where: name of file or item, for errors.
        writes_storages: True to write the whole storages of tensors, as `torch.save` does; False to write the elements
            that the value uses.

    Raises:
        CheckpointError: the value cannot be pickled, or has a class that is not allowed, so that it could not be
            loaded.
    """
    stream = BytesIO()
    try:
        surveyed = survey(value)
        copies = {} if writes_storages else own_memory(surveyed.tensors, surveyed.storages)
        torch.save(value, stream, pickle_module=pickle_module(copies))
        # Not a view: a traceback may hold it in a cycle, on which Python 3.12.1 crashes.
        content = stream.getvalue()
        loaded = load_torch_item(content, where, checks_members=False)
    except RefusedError as error:
        raise CheckpointError(refusal(value, where) or f"{where}: {error}") from None
    except (CheckpointError, *PICKLE_ERRORS) as error:
        raise CheckpointError(
            refusal(value, where) or f"{where}: must be a value that can be pickled, but: {error}"
        ) from (None if isinstance(error, CheckpointError) else error)
    if surveyed.has_own_classes and place_of_change(value, loaded) is not None:
        raise CheckpointError(refusal(value, where) or f"{where}: must come back as it is, but does not")
    return content


def _check_members(content: bytes | memoryview, where: str) -> None:
    """Compares the CRC-32 of the members of an archive, which torch does not do."""
    try:
        with ZipFile(BytesIO(content)) as archive:
            for member in archive.infolist():
                if member.compress_type != ZIP_STORED:
                    raise CheckpointError(
                        f"{where}: members must be stored plainly, but {member.filename} is compressed"
                    )
                if member.is_dir() or member.external_attr & _IS_FOLDER:
                    # torch's reader would read nothing for it, and leave a tensor's memory as it is
                    raise CheckpointError(f"{where}: members must be files, but {member.filename} is a folder")
                # zipfile checks too, with a slower function, at the end of a member
                with archive.open(member) as stream:
                    stream._expected_crc = None  # type: ignore[attr-defined]  # noqa: SLF001
                    crc = 0
                    while piece := stream.read(_READ_BYTES):
                        crc = crc32(piece, crc)
                if crc != member.CRC:
                    raise CheckpointError(
                        f"{where}: the checksum of {member.filename} must be {member.CRC:08x}, but is {crc:08x}: the "
                        "file is damaged"
                    )
    except BadZipFile as error:
        raise CheckpointError(
            f"{where}: must be an archive of torch.save, but is not: {error}: the file is damaged"
        ) from error
