"""Roles of special tokens, and their usual names.

A file that states the role of each special token is taken at its word. Others only list tokens; there the usual names
decide. A usual name counts only for a special token: `</s>` is also the end of struck-out text in HTML.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

_BEFORE_STATED: Final = ("<|endoftext|>", "<|end_of_text|>", "<eod>")  # the stated end of a text may be that of a turn
_AFTER_STATED: Final = ("[EOS]", "<eos>", "</s>")

END_OF_DOCUMENT_TOKENS: Final = (*_BEFORE_STATED, *_AFTER_STATED)
"""Special tokens that end documents by default, in order; the roles that a file states come before the last three."""

ROLES: Final = ("bos", "eos", "pad", "cls", "sep", "mask")
"""Roles that a special token may have, by the names of `MegatronTokenizer`."""

_USUAL_NAMES: Final = {
    "bos": ("<s>", "[BOS]", "<bos>", "<|begin_of_text|>", "<|startoftext|>"),
    "eos": (*_AFTER_STATED, "<|end_of_text|>", "<|endoftext|>"),
    "cls": ("[CLS]", "<cls>"),
    "sep": ("[SEP]", "<sep>"),
    "mask": ("[MASK]", "<mask>"),
}
# Padding is never guessed: a wrong guess would mask tokens out of the loss.
_OTHER_NAMES: Final = ("[PAD]", "<pad>", "[UNK]", "<unk>", *_BEFORE_STATED)


def first_id(candidates: Iterable[str], find: Callable[[str], int | None]) -> int | None:
    """Returns the id of the first candidate that `find` has an id for; None if it has none."""
    return next((found for token in candidates if (found := find(token)) is not None), None)


def end_of_document(find: Callable[[str], int | None], stated: Mapping[str, int]) -> int | None:
    """Returns the default id that ends a document, or None.

    The first that there is of: a special token such as `<|endoftext|>`; the stated end of a text; the stated separator;
    a special token such as `<eos>` or `</s>`.

    Args:
        find: function from a token to its id, or to None for what is no special token.
        stated: id of each role that the file states.

    >>> end_of_document({"<eod>": 5}.get, {"eos": 1}), end_of_document({"</s>": 5}.get, {"sep": 2})
    (5, 2)
    """
    usual = first_id(_BEFORE_STATED, find)
    found = stated.get("eos", stated.get("sep")) if usual is None else usual
    return first_id(_AFTER_STATED, find) if found is None else found


def no_end_of_document(special: Iterable[str], find: Callable[[str], int | None]) -> str:
    """Returns what must hold and what was found, for a tokenizer without a default end-of-document token.

    Args:
        special: the special tokens.
        find: function from a token to its id, or to None for what is not in the vocabulary.

    >>> no_end_of_document(["<x>"], {"</s>": 5}.get).partition("; ")[2]
    "'</s>' is an ordinary token here; its special tokens: '<x>'"
    """
    wanted = ", ".join(map(repr, END_OF_DOCUMENT_TOKENS))
    listed = ", ".join(map(repr, special)) or "none"
    ordinary = next((token for token in END_OF_DOCUMENT_TOKENS if find(token) is not None), None)
    hint = "" if ordinary is None else f"; {ordinary!r} is an ordinary token here"
    return (
        f"the tokenizer must have one of {wanted} as a special token, or be given eod_token (--eod-token){hint}; "
        f"its special tokens: {listed}"
    )


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
