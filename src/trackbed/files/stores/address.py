"""Addresses of objects: a scheme, a bucket or host, and a key."""

import re
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from trackbed.errors import ArgumentError

__all__ = ["SCHEMES", "Address", "is_address", "lost_address_hint", "parse_address", "secret_part"]

SCHEMES: Final = ("s3", "gs", "az", "http", "https", "file", "msc")
"""Schemes of addresses."""
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)

_LOST: Final = re.compile(rf"(?:^|/)({'|'.join(SCHEMES)}):/(?!/)")
"""Matches an address that lost a slash, also below a folder that it was taken to be relative to."""


class Address(NamedTuple):
    """Address of an object, or of a folder of objects."""

    text: str
    """The address as it was given."""
    scheme: str
    """One of `SCHEMES`."""
    bucket: str
    """Bucket, container, profile, or host with its port; empty for `file`."""
    key: str
    """Name of the object in its bucket, without a leading slash; of `file`, the absolute path."""

    @property
    def root(self) -> str:
        """Address of the bucket."""
        return f"{self.scheme}://{self.bucket}"


def is_address(name: object) -> bool:
    """True if a name is an address, and not a path.

    >>> [is_address(name) for name in ("s3://bucket/key", "a/b", "C:/a")]
    [True, False, False]
    """
    return _SCHEME.match(str(name)) is not None


def lost_address_hint(path: object) -> str:
    """Returns the end of an error message about a missing path: a hint if it was an address before `Path` changed it.

    >>> lost_address_hint("s3:/bucket/key")
    '; pass an address as a string: Path turns s3:// into s3:/'
    >>> lost_address_hint("data/s3/key")
    ''
    """
    found = _LOST.search(str(path))
    return f"; pass an address as a string: Path turns {found[1]}:// into {found[1]}:/" if found else ""


def secret_part(text: str) -> str | None:
    """Returns the name of the part of an address that may be a secret; None if it has none.

    Raises:
        ValueError: it cannot be read.

    >>> secret_part("s3://bucket/key"), secret_part("https://host/key?sig=abc")
    (None, 'query')
    """
    parts = urlsplit(text)
    found = (name for name in ("username", "password", "query", "fragment") if getattr(parts, name))
    return next(found, "query" if text.endswith("?") else "fragment" if text.endswith("#") else None)


def parse_address(text: str) -> Address:
    """Returns the parts of an address.

    A user, password, query or fragment may be a secret, so an address with one is not repeated in the error.

    Raises:
        ArgumentError: it has another scheme, no bucket, a port, a control character, an empty part, or one of these.

    >>> parse_address("s3://bucket/a/b.bin")[1:]
    ('s3', 'bucket', 'a/b.bin')
    >>> parse_address("file:///data/a.bin").key
    '/data/a.bin'
    """
    if any(character < " " for character in text):
        msg = f"an address must have no control characters, found {text!r}"
        raise ArgumentError(msg)
    try:
        parts, secret = urlsplit(text), secret_part(text)
    except ValueError as error:
        msg = "an address must be a scheme, a host and a key, found one that cannot be read (not repeated here)"
        raise ArgumentError(msg) from error
    if secret is not None:
        msg = (
            f"an address must have no user, password, query or fragment, found one with a {secret} (not repeated here)"
        )
        raise ArgumentError(msg)
    if parts.scheme not in SCHEMES or not text.startswith(f"{parts.scheme}:"):
        msg = f"{text}: the scheme must be one of {', '.join(SCHEMES)}, found {text.partition(':')[0]}"
        raise ArgumentError(msg)
    is_file = parts.scheme == "file"
    if bool(parts.netloc) is is_file or (is_file and not parts.path.startswith("/")):
        wanted = "file:///path" if is_file else f"{parts.scheme}://bucket/key"
        msg = f"{text}: an address must have the form {wanted}, found another"
        raise ArgumentError(msg)
    if ":" in parts.netloc and parts.scheme not in ("http", "https"):
        msg = f"{text}: an address must have no port, found one: servers are named by their endpoint"
        raise ArgumentError(msg)
    key = parts.path if is_file else parts.path.removeprefix("/")
    names = key.removeprefix("/").split("/") if is_file else key.split("/")
    wrong = [name for name in names[:-1] if not name] + [name for name in names if name in (".", "..")]
    if wrong:
        msg = f"{text}: a key must have no empty part, and none of '.' and '..', found {wrong[0]!r}"
        raise ArgumentError(msg)
    return Address(text, parts.scheme, parts.netloc, key)
