"""The secret that the ranks of one user share: a file that only that user can read."""

import os
import secrets
import stat
from pathlib import Path
from typing import Final

from trackbed.errors import FormatError
from trackbed.files import claim, flush_to_disk, open_regular, partial_name

SECRET_BYTES: Final = 32
_MODE: Final = 0o600


def secret_path(cache: Path) -> Path:
    """Place of this user's secret in a cache folder, which users may share."""
    return cache / ".trackbed" / f"secret-{os.getuid()}"


def shared_secret(path: Path) -> bytes:
    """Read the secret from `path`, and create it first if there is none.

    Several processes may do so at once, on any host: the file appears whole, and all return the same.

    Returns:
        `SECRET_BYTES` bytes.
    """
    if not path.exists():
        _create(path)
    with open(open_regular(path)[0], "rb") as file:  # noqa: PTH123  a descriptor
        status = os.fstat(file.fileno())
        text = file.read(2 * SECRET_BYTES + 2)
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise FormatError(
            f"{path}: only its owner may have access to the secret, found mode {mode:04o}; remove it and start again"
        )
    try:
        secret = bytes.fromhex(text.decode())
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise FormatError(
            f"{path}: a secret has {2 * SECRET_BYTES} hexadecimal digits, found something else; remove it, start again"
        )
    return secret


def _create(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / partial_name(path.name)
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES).hex().encode() + b"\n")
        flush_to_disk(partial)
        claim(str(partial), str(path))
    finally:
        partial.unlink(missing_ok=True)
