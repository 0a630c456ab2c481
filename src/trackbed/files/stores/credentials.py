"""Credentials that obstore does not find by itself: profiles of boto3, and accounts that google-auth knows."""

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from trackbed.errors import ArgumentError

__all__ = ["credential_provider"]

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
    """Returns the provider that obstore needs for buckets of a scheme, or None if it finds the credentials by itself.

    Raises:
        ArgumentError: the library that knows the credentials is not installed, or does not find them.
    """
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
        msg = "boto3 must be installed to use AWS_PROFILE: pip install boto3"
        raise ArgumentError(msg) from None
    try:
        return library.Boto3CredentialProvider()
    except Exception as error:  # noqa: BLE001 - those of botocore, or a ValueError
        found = type(error).__name__
    if not profile:
        return None
    msg = f"AWS_PROFILE must name a profile with credentials, found {profile!r} without ({found})"
    raise ArgumentError(msg)


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
        msg = f"google-auth must be installed for credentials of type {kind!r}: pip install google-auth"
        raise ArgumentError(msg) from None
    try:
        return library.GoogleCredentialProvider()
    except Exception as error:  # noqa: BLE001 - those of google-auth, whose texts may repeat the file
        found = type(error).__name__
    msg = f"google-auth must read the credentials of type {kind!r}, found {found}"
    raise ArgumentError(msg)
