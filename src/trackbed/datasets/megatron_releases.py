"""What differs between releases of Megatron Core, as far as Trackbed is concerned."""

from collections.abc import Mapping
from typing import Final, Literal

from packaging.version import InvalidVersion, Version

from trackbed.errors import ArgumentError

COMPARED_WITH: Final = ("0.16.1", "0.19.2")
"""Releases that tests compare Trackbed with."""
_current: list[str] = [COMPARED_WITH[0]]
_OLDEST: Final = Version("0.16")
_WITH_LAST_ID: Final = Version("0.18")
"""First release whose `NullTokenizer` has its end within its vocabulary, and whose BERT sorts ids."""


def check_release(release: str) -> Version:
    """Returns a release as a version. A candidate such as "0.18.0rc0" counts as its release.

    Raises:
        ArgumentError: it is none, or older than 0.16.
    """
    try:
        version = Version(Version(release).base_version)
    except (InvalidVersion, TypeError):
        version = Version("0")
    if version < _OLDEST:
        raise ArgumentError(f"a release of Megatron Core must be a version from {_OLDEST} on, found {release!r}")
    return version


def is_newer_than_compared(release: str) -> bool:
    """True for a release behind those that tests compare Trackbed with.

    >>> [is_newer_than_compared(release) for release in ("0.19", "0.19.5", "0.20.0rc1")]
    [False, False, True]
    """
    return check_release(release).release[:2] > Version(COMPARED_WITH[-1]).release[:2]


def use_release(release: str) -> None:
    """Makes a release that of defaults in this process: `install()` takes the place of that one."""
    _current[0] = release


def default_vocabulary_order() -> Literal["listed", "sorted"]:
    """Order of the ids from which BERT's random tokens are drawn, in the release that `use_release` has named."""
    return "sorted" if check_release(_current[0]) >= _WITH_LAST_ID else "listed"


def lists_common_state() -> bool:
    """True if the common state is one of a checkpoint's objects in the release that `use_release` has named."""
    return check_release(_current[0]) >= Version("0.19")


def last_null_id(release: str, vocab_size: int) -> int:
    """Returns the last id of Megatron Core's `NullTokenizer`, which ends a document.

    >>> last_null_id("0.16.1", 100), last_null_id("0.19.2", 100)
    (100, 99)
    """
    return vocab_size - 1 if check_release(release) >= _WITH_LAST_ID else vocab_size


def has_flags_that_switch_off(release: str) -> bool:
    """True if tokenizers of a release are fast and have special tokens unless a flag says otherwise."""
    return check_release(release) >= Version("0.17")


def has_chat_template(release: str) -> bool:
    """True if tokenizers of a release are given a chat template, and have it in their identity."""
    return check_release(release) >= Version("0.18")


def option_of_releases(release: str, identity: Mapping[str, object]) -> str | None:
    """Says which option an identity of a tokenizer must have, or must not, in a release; None if it fits.

    Args:
        release: release of Megatron Core.
        identity: the identifiers of the tokenizer.

    >>> option_of_releases("0.19", {"class": "...", "tokenizer_path": "llama", "use_fast": "True"})
    "'chat_template'"
    >>> option_of_releases("0.16.1", {"class": "...", "tokenizer_path": None, "vocab_size": "8", "pad_id": "-1"})
    "no 'pad_id'"
    """
    options = set(identity) - {"class", "tokenizer_path"}
    if options and options <= {"vocab_size", "eod_id", "pad_id"}:
        option = "pad_id"  # of a `NullTokenizer`
    elif options & {"use_fast", "legacy"} and identity.get("tokenizer_path") != "GPT2BPETokenizer":
        option = "chat_template"  # of tokenizers of Hugging Face and of SentencePiece
    else:
        return None
    is_wanted = has_chat_template(release)
    return None if (option in options) == is_wanted else f"{'' if is_wanted else 'no '}{option!r}"


def plans_layouts_elsewhere(release: str) -> bool:
    """True if the optimizer plans the layout of the buffers, and gives it to the wrapper of a release.

    >>> [plans_layouts_elsewhere(release) for release in ("0.17.1", "0.18.0rc0", "0.18.2")]
    [False, True, True]
    """
    return Version(Version(release).base_version) >= Version("0.18")
