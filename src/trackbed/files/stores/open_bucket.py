"""Opening buckets: endpoints, credentials and limits from the environment."""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from trackbed.errors import ArgumentError
from trackbed.files.stores.address import Address, redact
from trackbed.files.stores.bucket import Bucket, WritableBucket
from trackbed.files.stores.msc import MscBucket, equivalent_address
from trackbed.files.stores.obstore_bucket import ObstoreBucket
from trackbed.files.stores.requests import ATTEMPTS_IN_TIME
from trackbed.files.stores.time_limit import timeout_seconds

_Bucket = TypeVar("_Bucket")

_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_PREFIXES: Final = (
    "AWS_",
    "GOOGLE_",
    "AZURE_",
    "MSC_",
    "HOME",
    "XDG_CONFIG",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "SSL_CERT_",
)
"""Variables that decide how a bucket is opened."""
_WRITABLE: Final = ("s3", "gs", "az", "file")
_LONGEST_CONNECT_SECONDS: Final = 5.0


def endpoint_of(address: Address) -> str:
    """Returns the endpoint that the environment gives for an address, or nothing.

    Raises:
        ArgumentError: it is no URL of a server, or has a user, password, query or fragment, and is not repeated.
    """
    if address.scheme != "s3":
        return ""
    name = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    if name is None:
        return ""
    endpoint = os.environ[name]
    try:
        parts = urlsplit(endpoint)
        is_plain = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        has_secret = any((parts.username, parts.password, parts.query, parts.fragment))
    except ValueError:
        is_plain = has_secret = False
    if has_secret or not is_plain or not endpoint.isprintable() or " " in endpoint:
        found = "one with a user, password, query or fragment" if has_secret else "another"
        raise ArgumentError(
            f"{name} must be the URL of a server, such as https://s3.example.org, found {found} (not repeated here)"
        )
    return endpoint


def open_bucket(address: Address) -> Bucket:
    """Returns the bucket of an address; one is opened per bucket, environment and process."""
    if address.scheme != "msc":
        return _open_with_obstore(address)
    library = _import("multistorageclient")
    if library is None:
        instead = equivalent_address(address)
        msg = f"{address.text}: multi-storage-client must be installed for msc: pip install multi-storage-client"
        raise ArgumentError(f"{msg}; {instead} is the same object" if instead else msg)
    return _opened(address, partial(_open_profile, library, address.bucket, _settings()))


def _open_with_obstore(address: Address) -> ObstoreBucket:
    library = _import("obstore")
    if library is None:
        raise ArgumentError(
            f"{address.text}: obstore must be installed to use object stores: pip install '.[s3]' in Trackbed's clone"
        )
    return _opened(address, partial(_open, library, address.root, endpoint_of(address), timeout_seconds(), _settings()))


def _opened(address: Address, open_one: Callable[[], _Bucket]) -> _Bucket:
    try:
        return open_one()
    except ArgumentError as error:
        text = str(error)
    except Exception as error:  # noqa: BLE001 - the libraries' errors have no common class
        found = redact(" ".join(str(error).split("Debug source:")[0].split()))
        text = f"the environment must have the settings for this bucket, found: {found}"
    raise ArgumentError(f"{address.text}: {text}")


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


def _settings() -> tuple[tuple[str, str], ...]:
    return tuple(sorted(item for item in os.environ.items() if item[0].upper().startswith(_PREFIXES)))


def open_writable_bucket(address: Address) -> WritableBucket:
    """Returns the bucket of an address that can be written; see `open_bucket`."""
    check_writable(address)
    return _open_with_obstore(address)


def check_writable(address: Address) -> None:
    """Checks that objects can be written under an address."""
    if address.scheme not in _WRITABLE:
        known = ", ".join(_WRITABLE)
        raise ArgumentError(
            f"{address.text}: an address to write to must have one of the schemes {known}, found {address.scheme}"
        )


@lru_cache(maxsize=256)
def _open(
    library: Any, root: str, endpoint: str, seconds: float, _settings: tuple[tuple[str, str], ...]
) -> ObstoreBucket:
    """Opens a bucket. The client for reads repeats nothing by itself, because its limits are not ours.

    That for uploads repeats the requests of each part: an attempt has half of the time, and the last one starts in the
    first half.
    """
    if root.startswith("file:"):
        files = library.store.from_url("file:///")
        return ObstoreBucket(library, files, lambda: files)
    stall = seconds / ATTEMPTS_IN_TIME
    connect = timedelta(seconds=min(stall, _LONGEST_CONNECT_SECONDS))
    client = {
        "connect_timeout": connect,
        "allow_http": root.startswith("http:") or endpoint.startswith("http://"),
    }
    provider = credential_provider(root.split(":", maxsplit=1)[0])
    location = {"endpoint": endpoint} if endpoint else {}
    if provider is not None:
        location["credential_provider"] = provider

    def open_uploads() -> Any:
        half = timedelta(seconds=seconds / 2)
        retries = {"max_retries": 10, "retry_timeout": half, "backoff": {"max_backoff": half / 4}}
        return library.store.from_url(
            root, client_options={**client, "timeout": half}, retry_config=retries, **location
        )

    times = {"read_timeout": timedelta(seconds=stall), "timeout": timedelta(seconds=seconds)}
    retries = {"max_retries": 0}
    store = library.store.from_url(root, client_options={**client, **times}, retry_config=retries, **location)
    return ObstoreBucket(library, store, open_uploads)


@lru_cache(maxsize=256)
def _open_profile(library: Any, profile: str, _: tuple[tuple[str, str], ...]) -> MscBucket:
    return MscBucket(library, library.StorageClient(library.StorageClientConfig.from_file(profile=profile)))


_OWN_AWS: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_SKIP_SIGNATURE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
)
"""Variables of which each suffices for obstore."""
_OWN_GOOGLE_TYPES: Final = ("service_account", "authorized_user")
"""Types of credential files that obstore reads."""


def credential_provider(scheme: str) -> Any:
    """Returns the provider of credentials that obstore needs for a scheme, or None if it finds them by itself."""
    if scheme == "s3":
        return _aws()
    return _google() if scheme == "gs" else None


def _aws() -> Any:
    profile = os.environ.get("AWS_PROFILE")
    if not profile and (any(os.environ.get(name) for name in _OWN_AWS) or not _has_aws_files()):
        return None
    try:
        library = import_module("obstore.auth.boto3")
    except ImportError:
        if not profile:
            return None  # without boto3, the host's role
        raise ArgumentError("boto3 must be installed to use AWS_PROFILE: pip install boto3") from None
    try:
        return library.Boto3CredentialProvider()
    except Exception as error:  # noqa: BLE001 - those of botocore, or a ValueError
        found = type(error).__name__
    if not profile:
        return None
    raise ArgumentError(f"AWS_PROFILE must name a profile with credentials, found {profile!r} without ({found})")


def _has_aws_files() -> bool:
    names = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
    return any(Path(os.environ.get(name) or usual).expanduser().is_file() for name, usual in names.items())


def _google() -> Any:
    usual = "~/.config/gcloud/application_default_credentials.json"
    path = Path(os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or usual).expanduser()
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("type")
    except (OSError, ValueError, AttributeError):
        return None
    if kind in _OWN_GOOGLE_TYPES:
        return None
    try:
        library = import_module("obstore.auth.google")
    except ImportError:
        raise ArgumentError(
            f"google-auth must be installed for credentials of type {kind!r}: pip install google-auth"
        ) from None
    try:
        return library.GoogleCredentialProvider()
    except Exception as error:  # noqa: BLE001 - those of google-auth, whose texts may repeat the file
        found = type(error).__name__
    raise ArgumentError(f"google-auth must read the credentials of type {kind!r}, found {found}")
