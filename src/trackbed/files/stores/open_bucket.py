"""Opening buckets: endpoints, credentials and limits from the environment."""

import os
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from typing import Any, Final

from trackbed.errors import ArgumentError, StoreError
from trackbed.files.stores.address import Address
from trackbed.files.stores.bucket import Bucket
from trackbed.files.stores.obstore_bucket import ObstoreBucket
from trackbed.files.stores.redaction import redact
from trackbed.files.stores.retries import ATTEMPTS_IN_TIME, timeout_seconds

__all__ = ["endpoint_of", "open_bucket"]

_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_PREFIXES: Final = ("AWS_", "GOOGLE_", "AZURE_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_")
"""Variables that decide how a bucket is opened."""
_LONGEST_CONNECT_SECONDS: Final = 5.0


def endpoint_of(address: Address) -> str:
    """Returns the endpoint that the environment gives for an address, or nothing."""
    if address.scheme != "s3":
        return ""
    return next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")


def open_bucket(address: Address) -> Bucket:
    """Returns the bucket of an address; one is opened per bucket, environment and process.

    Raises:
        ArgumentError: a library that the address needs is not installed, or a setting cannot be used.
        StoreError: the bucket cannot be opened.
    """
    settings = tuple(sorted(item for item in os.environ.items() if item[0].upper().startswith(_PREFIXES)))
    try:
        library = import_module("obstore")
    except ImportError:
        msg = f"{address.text}: obstore must be installed to use object stores: pip install 'trackbed[s3]'"
        raise ArgumentError(msg) from None
    try:
        return _open(library, address.root, endpoint_of(address), timeout_seconds(), settings)
    except ArgumentError:
        raise
    except Exception as error:  # noqa: BLE001 - obstore's errors have no common class
        text = redact(" ".join(str(error).split("Debug source:")[0].split()))
    msg = f"{address.text}: the settings of the environment must open the bucket, found: {text}"
    raise StoreError(msg)


@lru_cache(maxsize=256)
def _open(library: Any, root: str, endpoint: str, seconds: float, _settings: tuple[tuple[str, str], ...]) -> Bucket:
    """Opens a bucket with a client that repeats nothing by itself, because its limits are not ours."""
    if root.startswith("file:"):
        return ObstoreBucket(library, library.store.from_url("file:///"))
    stall = seconds / ATTEMPTS_IN_TIME
    options: dict[str, Any] = {
        "client_options": {
            "connect_timeout": timedelta(seconds=min(stall, _LONGEST_CONNECT_SECONDS)),
            "read_timeout": timedelta(seconds=stall),
            "timeout": timedelta(seconds=seconds),
            "allow_http": root.startswith("http://") or endpoint.startswith("http://"),
        },
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=seconds)},
    }
    if endpoint:
        options["endpoint"] = endpoint
    return ObstoreBucket(library, library.store.from_url(root, **options))
