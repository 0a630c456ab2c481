"""Addresses of objects, the identity of what lies there, and the removal of secrets from texts about them."""

import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from trackbed.errors import ArgumentError, StoreError

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
        raise ArgumentError(f"an address must have no control characters, found {text!r}")
    try:
        parts, secret = urlsplit(text), secret_part(text)
    except ValueError as error:
        raise ArgumentError(
            "an address must be a scheme, a host and a key, found one that cannot be read (not repeated here)"
        ) from error
    if secret is not None:
        raise ArgumentError(
            f"an address must have no user, password, query or fragment, found one with a {secret} (not repeated here)"
        )
    if parts.scheme not in SCHEMES or not text.startswith(f"{parts.scheme}:"):
        raise ArgumentError(f"{text}: the scheme must be one of {', '.join(SCHEMES)}, found {text.partition(':')[0]}")
    is_file = parts.scheme == "file"
    if bool(parts.netloc) is is_file or (is_file and not parts.path.startswith("/")):
        wanted = "file:///path" if is_file else f"{parts.scheme}://bucket/key"
        raise ArgumentError(f"{text}: an address must have the form {wanted}, found another")
    if ":" in parts.netloc and parts.scheme not in ("http", "https"):
        raise ArgumentError(f"{text}: an address must have no port, found one: servers are named by their endpoint")
    key = parts.path if is_file else parts.path.removeprefix("/")
    names = key.removeprefix("/").split("/") if is_file else key.split("/")
    wrong = [name for name in names[:-1] if not name] + [name for name in names if name in (".", "..")]
    if wrong:
        raise ArgumentError(f"{text}: a key must have no empty part, and none of '.' and '..', found {wrong[0]!r}")
    return Address(text, parts.scheme, parts.netloc, key)


_MODIFIED: Final = "Last-Modified: "
_NO_TIME: Final = datetime.fromtimestamp(0, UTC)
"""Time that obstore gives if the server gave none."""


class ObjectStamp(NamedTuple):
    """Identity of an object: another object under the same address has another one."""

    size_bytes: int
    tag: str
    """`ETag`, or `Last-Modified` where there is no strong one."""


class ObjectVersion(NamedTuple):
    """Version of an object, which a conditional write compares: each write makes another one."""

    tag: str
    """`ETag`."""
    number: str | None
    """Generation, in the stores that have numbers."""


class ObjectRange(NamedTuple):
    """Range of the bytes of an object."""

    address: Address
    stamp: ObjectStamp
    """Identity of the object; another one under the address is an error."""
    start: int
    stop: int
    """Half-open, in bytes, within the object."""


def has_etag(stamp: ObjectStamp) -> bool:
    """True if the tag is an `ETag`, which a request can carry as its condition."""
    return not stamp.tag.startswith(_MODIFIED)


def stamp_of_metadata(metadata: Mapping[str, Any], address: Address) -> ObjectStamp:
    """Returns the stamp in the metadata of an answer."""
    tag, modified = metadata.get("e_tag"), metadata.get("last_modified")
    if not tag or tag.startswith("W/"):
        if modified is None or modified == _NO_TIME:
            raise StoreError(f"{address.text}: the server must give a strong ETag or Last-Modified, found neither")
        tag = _MODIFIED + modified.astimezone(UTC).isoformat()
    return ObjectStamp(int(metadata["size"]), str(tag))


_QUERY: Final = re.compile(r"(\w+://[^\s?#\"'<>]*)[?#][^\s\"'<>)]*")
_USER: Final = re.compile(r"(\w+://)[^\s/@\"']*@")
_SECRET_NAME: Final = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|SAS|CREDENTIAL|SIGNATURE|ACCOUNT", re.IGNORECASE)
_SHORTEST_SECRET: Final = 6
"""Characters from which on a value of the environment is looked for in texts."""


def redact(text: str) -> str:
    """Returns a text without queries and users of URLs, and without credentials of the environment.

    >>> redact("GET https://host/key?sig=abc failed")
    'GET https://host/key?... failed'
    """
    text = _USER.sub(r"\1", _QUERY.sub(r"\1?...", text))
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_SECRET and _SECRET_NAME.search(name):
            text = text.replace(value, f"${name}")
    return text
