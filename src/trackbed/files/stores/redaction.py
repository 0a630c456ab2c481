"""Removal of secrets from texts of other libraries."""

import os
import re
from typing import Final

__all__ = ["redact"]

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
