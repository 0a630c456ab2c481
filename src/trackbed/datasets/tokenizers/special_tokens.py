"""Roles of special tokens, and their usual names.

A file that states the role of each special token is taken at its word. Others only list tokens; there the usual names
decide.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

__all__ = ["END_OF_DOCUMENT_TOKENS", "ROLES", "additional_ids", "end_of_document", "first_id", "usual_roles"]

END_OF_DOCUMENT_TOKENS: Final = ("<|endoftext|>", "<|end_of_text|>", "<eod>", "</s>")
"""Candidates for the default end-of-document token: the first one in the vocabulary is used."""

ROLES: Final = ("bos", "eos", "pad", "cls", "sep", "mask")
"""Roles that a special token may have, by the names of `MegatronTokenizer`."""

_USUAL_NAMES: Final = {
    "bos": ("<s>", "[BOS]", "<bos>", "<|begin_of_text|>", "<|startoftext|>"),
    "eos": ("</s>", "[EOS]", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
    "cls": ("[CLS]", "<cls>"),
    "sep": ("[SEP]", "<sep>"),
    "mask": ("[MASK]", "<mask>"),
}
# Padding is never guessed: a wrong guess would mask tokens out of the loss.
_OTHER_NAMES: Final = ("[PAD]", "<pad>", "[UNK]", "<unk>", *END_OF_DOCUMENT_TOKENS)


def first_id(candidates: Iterable[str], find: Callable[[str], int | None]) -> int | None:
    """Returns the id of the first candidate that `find` has an id for; None if it has none."""
    return next((found for token in candidates if (found := find(token)) is not None), None)


def end_of_document(find: Callable[[str], int | None], stated: Mapping[str, int]) -> int | None:
    """Returns the default id that ends a document: a usual token, or the end of a text, or the separator, or None.

    Args:
        find: function from a token to its id, or to None for what is not in the vocabulary.
        stated: id of each role that the file states.

    >>> end_of_document({"<eod>": 5}.get, {"eos": 1}), end_of_document({}.get, {"sep": 2})
    (5, 2)
    """
    usual = first_id(END_OF_DOCUMENT_TOKENS, find)
    return stated.get("eos", stated.get("sep")) if usual is None else usual


def usual_roles(find: Callable[[str], int | None]) -> dict[str, int]:
    """Returns the id of each role but padding, from the usual names.

    Args:
        find: function from a token to its id, or to None for what is no special token.

    >>> usual_roles({"[CLS]": 7, "<x>": 8}.get)
    {'cls': 7}
    """
    found = {role: first_id(names, find) for role, names in _USUAL_NAMES.items()}
    return {role: index for role, index in found.items() if index is not None}


def additional_ids(special: Mapping[str, int], *, taken: Iterable[int]) -> list[int]:
    """Returns the ids of special tokens without a role, in order.

    Args:
        special: id of each special token.
        taken: ids of tokens that have a role.

    >>> additional_ids({"<s>": 1, "<b>": 5, "<a>": 2, "<unk>": 0}, taken=[])
    [2, 5]
    """
    usual = {*_OTHER_NAMES, *(name for names in _USUAL_NAMES.values() for name in names)}
    left_out = set(taken)
    return sorted(index for token, index in special.items() if token not in usual and index not in left_out)
