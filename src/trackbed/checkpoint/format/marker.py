"""The marker of a checkpoint in an object store: which save is the checkpoint, and which are being written.

Objects cannot be renamed together. So the files of a save lie in a folder of its own, which has the save's id as its
name, and one object says which of these folders is the checkpoint. Each change of a checkpoint is one conditional write
of that object, which fails if another program has changed it since it was read.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, NoReturn, Self
from uuid import uuid4

import orjson

from trackbed.checkpoint.format.extents import FileChecksum
from trackbed.errors import CheckpointError

MARKER_NAME: Final = "trackbed.marker"
MOST_MARKER_BYTES: Final = 64 << 20
_VERSION: Final = 1
_MOST_NAME_CHARS: Final = 255


class UnfinishedSave(NamedTuple):
    """A save that is being written, or was when its writer died."""

    save_id: str
    writer: str
    """Host, number and start of the process, as in the names of partial files."""


class CommittedSave(NamedTuple):
    """A save that is the checkpoint."""

    save_id: str
    files: Mapping[str, FileChecksum]
    """All its files by name."""


@dataclass(frozen=True, slots=True)
class Marker:
    """Contents of a marker."""

    current: CommittedSave | None = None
    """The checkpoint; None where there is none yet, or none any more."""
    unfinished: tuple[UnfinishedSave, ...] = ()
    set_aside: tuple[CommittedSave, ...] = ()
    """Earlier checkpoints of later steps than one from which a run has gone on."""
    write_id: str = field(default_factory=lambda: uuid4().hex)
    """Tells one write of the marker from all others."""

    def with_unfinished(self, save: UnfinishedSave) -> Self:
        """A marker to which a save that begins is added."""
        return self._changed(unfinished=(*self.unfinished, save))

    def without_unfinished(self, save_ids: set[str]) -> Self:
        """A marker from which saves are removed that do not end. Their writers cannot commit any more."""
        return self._changed(unfinished=tuple(one for one in self.unfinished if one.save_id not in save_ids))

    def committed(self, save: CommittedSave) -> Self:
        """A marker in which an unfinished save is the checkpoint."""
        return replace(self.without_unfinished({save.save_id}), current=save)

    def unnamed(self, save_ids: Iterable[str]) -> set[str]:
        """Returns the saves that the marker does not name. Their writers cannot commit them any more."""
        committed = (*self.set_aside, *filter(None, [self.current]))
        named = {save.save_id for save in committed} | {save.save_id for save in self.unfinished}
        return set(save_ids) - named

    def superseded(self) -> Self:
        """A marker whose checkpoint is set aside."""
        aside = self.set_aside if self.current is None else (*self.set_aside, self.current)
        return self._changed(current=None, set_aside=aside)

    def reinstated(self, save_id: str) -> Self:
        """A marker in which a save that was set aside is the checkpoint again, unless another one is."""
        found = [one for one in self.set_aside if one.save_id == save_id]
        if not found or self.current is not None:
            return self._changed()
        return self._changed(current=found[0], set_aside=tuple(one for one in self.set_aside if one not in found))

    def without_current(self) -> Self:
        """A marker without a checkpoint."""
        return self._changed(current=None)

    def _changed(self, **changes: Any) -> Self:
        return replace(self, write_id=uuid4().hex, **changes)

    def encode(self) -> bytes:
        """Serializes the contents."""
        return orjson.dumps(
            {
                "version": _VERSION,
                "write_id": self.write_id,
                "current": None if self.current is None else _described(self.current),
                "unfinished": list(map(list, self.unfinished)),
                "set_aside": list(map(_described, self.set_aside)),
            }
        )

    @classmethod
    def decode(cls, content: bytes, where: str) -> Self:
        """Parses a marker.

        Args:
            content: the object.
            where: its address, for errors.

        Raises:
            CheckpointError: it is damaged, or of another version.
        """
        try:
            found = orjson.loads(content)
            if found["version"] != _VERSION:
                raise CheckpointError(
                    f"{where}: must be a marker of version {_VERSION}, but is of {found['version']}: use a newer "
                    "Trackbed"
                )
            current = found["current"]
            return cls(
                None if current is None else _committed(current, where),
                tuple(UnfinishedSave(_id_of(save_id, where), str(writer)) for save_id, writer in found["unfinished"]),
                tuple(_committed(one, where) for one in found["set_aside"]),
                str(found["write_id"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{where}: must be a marker of a checkpoint, but cannot be read: {error}: remove that object, if no "
                "program saves there, to save there again"
            ) from error


def is_save_id(name: str) -> bool:
    """True for names of the folders of saves.

    >>> is_save_id("0123456789abcdef0123456789abcdef"), is_save_id("logs")
    (True, False)
    """
    return len(name) == 32 and set(name) <= set("0123456789abcdef")


def _described(save: CommittedSave) -> dict[str, Any]:
    files = [[name, found.num_bytes, found.crc] for name, found in save.files.items()]
    return {"save_id": save.save_id, "files": files}


def _committed(found: dict[str, Any], where: str) -> CommittedSave:
    files = {str(name): FileChecksum(int(num_bytes), int(crc)) for name, num_bytes, crc in found["files"]}
    for name, stored in files.items():
        if not 0 < len(name) <= _MOST_NAME_CHARS or "/" in name or name in (".", "..") or stored.num_bytes < 0:
            _refuse(where, f"a file {name[:80]!r} of {stored.num_bytes} bytes")
    return CommittedSave(_id_of(found["save_id"], where), files)


def _id_of(text: Any, where: str) -> str:
    if not isinstance(text, str) or not is_save_id(text):
        _refuse(where, f"the id {str(text)[:80]!r}")
    return text


def _refuse(where: str, found: str) -> NoReturn:
    raise CheckpointError(f"{where}: must name saves and files of a checkpoint, but has {found}")
