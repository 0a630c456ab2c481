"""Messages about files that are no tokenizer of the kind that their name says: what they are, and what to give."""

import base64
import binascii
import json
import re
from pathlib import Path
from typing import Any, Final

_SCHEMES: Final = ("https:", "http:", "hf:")
_FILE_SUFFIXES: Final = (".json", ".model", ".txt")
_HUB_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")
_HEAD_BYTES: Final = 4096
_MOST_BYTES: Final = 256 << 20
_CONFIGURATION: Final = ("tokenizer_class", "model_max_length", "architectures", "model_type", "eos_token", "bos_token")
_STATED: Final = ("tokenizer.json", "tokenizer_config.json", "config.json")
_MODELS: Final = ("tokenizer.model", "spiece.model")
_GPT2_CONFIGURATION: Final = '{"tokenizer_class": "GPT2Tokenizer"}'
_TEKKEN: Final = "a tokenizer in Mistral's tekken format, which is not read: give tokenizer.json of the same model"


def missing_tokenizer(path: Path) -> str:
    """Returns a message about a file or folder that is not there.

    >>> missing_tokenizer(Path("some/model")).partition("; ")[2]
    'a tokenizer of the Hugging Face hub must be downloaded first: hf download some/model --local-dir FOLDER'
    """
    msg = f"{path}: a tokenizer file must exist, found none"
    is_word = len(path.parts) == 1 and not path.suffix
    if is_word:
        msg += f" (an encoding of tiktoken is named tiktoken:{path})"
    name = str(path) if is_word else "/".join(path.parts[-2:])
    is_named = _HUB_NAME.fullmatch(name) and path.suffix not in _FILE_SUFFIXES and not path.parent.exists()
    if is_word or is_named or path.parts[0] in _SCHEMES:
        way = f"hf download {name if is_word or is_named else 'NAME'} --local-dir FOLDER"
        msg += f"; a tokenizer of the Hugging Face hub must be downloaded first: {way}"
    return msg


def describe_other(path: Path) -> str | None:
    """Returns what a file holds in the place of the tokenizer that its name promises, and a next step; None if unknown.

    Args:
        path: a file that is there.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if not head:
        return "an empty file"
    if head.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS: fetch the file itself with git lfs pull"
    if _has_ranks(head):
        return (
            "ranks of tiktoken, as Llama 3 has them: give the model's folder or file of Hugging Face tokenizers "
            "(tokenizer.json), or make a plugin of tiktoken with them and name it tiktoken:NAME"
        )
    is_piece = head[:1] == head[2:3] == b"\x0a" and b"\x15" in head[:64]  # a message of a piece and its score
    if is_piece and path.suffix != ".model":
        return "what looks like a model of SentencePiece: give it a name that ends in .model"
    if head.startswith(b"#version"):
        return "the merges of a BPE: give tokenizer.json of the same model"
    return _describe_json(path) if head.lstrip()[:1] == b"{" else None


def _describe_json(path: Path) -> str | None:
    """Does the same for a file of JSON."""
    if path.stat().st_size > _MOST_BYTES:
        return None
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    vocabulary = fields.get("vocab")
    if (
        isinstance(vocabulary, list)
        and vocabulary
        and isinstance(vocabulary[0], dict)
        and "token_bytes" in vocabulary[0]
    ):
        return _TEKKEN
    if "model" not in fields and any(name in fields for name in _CONFIGURATION):
        return "the configuration of a tokenizer or model: give its folder, or tokenizer.json"
    if len(fields) > 1 and all(isinstance(value, int) for value in fields.values()):
        return (
            "a vocabulary without merges, as GPT-2's vocab.json is: give tokenizer.json of the same model, or a folder "
            f"with vocab.json, merges.txt and a tokenizer_config.json such as {_GPT2_CONFIGURATION}"
        )
    return None


def describe_folder(path: Path) -> str | None:
    """Returns what a folder lacks that transformers cannot read, and a next step; None if nothing is known to be wrong.

    Args:
        path: a folder.
    """
    names = {entry.name for entry in path.iterdir()}
    if not names & {*_STATED} and {"vocab.json", "merges.txt"} <= names:
        return (
            "vocab.json and merges.txt alone, which do not say of which class they are: write a tokenizer_config.json "
            f"beside them, such as {_GPT2_CONFIGURATION}"
        )
    for name in _MODELS:
        if name in names and "tokenizer.json" not in names and (found := describe_other(path / name)) is not None:
            return f"a {name} that holds {found}"
    if "tekken.json" in names and not names & {"tokenizer.json", "tokenizer.model"}:
        return _TEKKEN
    if not names & {*_STATED, *_MODELS, "vocab.json", "vocab.txt"}:
        return f"none of the files of a tokenizer, such as {', '.join(_STATED[:2])}: give the folder that has them"
    return None


def _has_ranks(head: bytes) -> bool:
    """True if the first lines are tokens in base64, each with its rank."""
    lines = head.split(b"\n")[:-1][:8]
    try:
        pairs = [(base64.b64decode(token, validate=True), int(rank)) for token, rank in map(bytes.split, lines)]
    except (ValueError, binascii.Error):
        return False
    return bool(pairs) and [rank for _, rank in pairs] == list(range(pairs[0][1], pairs[0][1] + len(pairs)))
