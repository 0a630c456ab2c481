"""Settings with which a library draws the tokens of a text at random, for the training of robust models.

A corpus is tokenised once: the same text must have the same tokens in every run, in every worker, and after a kill.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers

from trackbed.datasets.tokenizers.rust_libraries import panics_as_errors
from trackbed.errors import ArgumentError

logger = logging.getLogger(__name__)

_LIBRARY_SETTINGS: Final = ("dropout", "alpha", "nbest_size")  # BPE, and the two of Unigram
_SENTENCEPIECE_SETTINGS: Final = ("enable_sampling", "alpha", "nbest_size")
_TEXT: Final = (
    "The quick brown fox jumps over the lazy dog, while internationalisation and characteristically uncharacteristic "
    "antidisestablishmentarianism are tokenised reproducibly. def function(argument): return argument + 1234567890 "
) * 8


def switch_off_sampling(library: tokenizers.Tokenizer, *, where: str | Path) -> None:
    """Switches off what makes a tokenizer of the library random, with a warning.

    Args:
        library: the tokenizer, which is changed.
        where: its file, for the message.
    """
    model = library.model
    for name in _LIBRARY_SETTINGS:
        value = getattr(model, name, None)
        if value:
            setattr(model, name, None)
            logger.warning(
                "%s: %s %.6g of its model is switched off: the same text must have the same tokens in every run",
                where,
                name,
                value,
            )


def without_sampling(settings: Mapping[str, Any], *, where: str | Path) -> dict[str, Any] | None:
    """Returns settings of a SentencePiece processor without sampling, with a warning; None if there is none.

    Args:
        settings: keyword arguments of the processor.
        where: the tokenizer's folder, for the message.
    """
    if not settings.get("enable_sampling"):
        return None
    logger.warning(
        "%s: enable_sampling of sp_model_kwargs is switched off: the same text must have the same tokens in every run",
        where,
    )
    return {name: value for name, value in settings.items() if name not in _SENTENCEPIECE_SETTINGS}


def check_repeatable(encode: Callable[[list[str]], Any], texts: Sequence[str] = (_TEXT,), *, where: str | Path) -> None:
    """Checks that texts have the same tokens each time.

    Args:
        encode: function from texts to their tokens, which must be arrays or lists of numbers. Where it fails, nothing
            is checked.
        texts: the texts.
        where: the tokenizer, for the message.

    Raises:
        ArgumentError: they have not.
    """
    try:
        with panics_as_errors():
            first, second = (_plain(encode(list(texts))) for _ in range(2))
    except Exception as error:  # noqa: BLE001  tokenizers raise any exception; the texts of the corpus decide
        logger.debug("%s: not checked for sampling: %s", where, error)
        return
    if first != second:
        raise ArgumentError(
            f"{where}: the same text must have the same tokens each time, found different ones: switch off the "
            "sampling of the tokenizer"
        )


def _plain(found: Any) -> Any:
    """Returns arrays, tuples and lists of them as lists."""
    if isinstance(found, (list, tuple)):
        return [_plain(part) for part in found]
    return found.tolist() if hasattr(found, "tolist") else found
