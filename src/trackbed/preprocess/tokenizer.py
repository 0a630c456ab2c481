"""Opening the fastest library for a tokenizer."""

import logging
from pathlib import Path

from trackbed.datasets.tokenizers.fastokens import FastTokenizer, UnsuitableError
from trackbed.datasets.tokenizers.huggingface import HuggingFaceTokenizer
from trackbed.datasets.tokenizers.kinds import AnyTokenizer, is_path, open_tokenizer

logger = logging.getLogger(__name__)


def open_fastest_tokenizer(
    name: str, *, lower_case: bool = False, eod_token: str | None = None, special_tokens: bool = False
) -> AnyTokenizer:
    """Opens a tokenizer with the fastest library that produces the same ids as that of `open_tokenizer`.

    For files and folders of Hugging Face `tokenizers`, uses fastokens if it is installed, can read the file, and
    produces the same ids as `tokenizers` on texts of many kinds; this check takes a second. Otherwise logs a warning
    with the reason.

    Args:
        name: as for `open_tokenizer`.
        lower_case: as for `open_tokenizer`.
        eod_token: as for `open_tokenizer`.
        special_tokens: as for `open_tokenizer`.

    Raises:
        ArgumentError: as `open_tokenizer`.
    """
    opened = open_tokenizer(name, lower_case=lower_case, eod_token=eod_token, special_tokens=special_tokens)
    if not isinstance(opened, HuggingFaceTokenizer):
        return opened
    try:
        return FastTokenizer(opened)
    except UnsuitableError as error:
        logger.warning("%s: using tokenizers instead of the much faster fastokens: %s", name, error)
    return opened


def absolute_name(name: str) -> str:
    """Returns the name of the same tokenizer for a process in another folder.

    >>> absolute_name("bytes")
    'bytes'
    """
    return str(Path(name).absolute()) if is_path(name) else name
