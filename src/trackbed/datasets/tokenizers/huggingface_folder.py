"""Tokenizer of a folder of Hugging Face files, as `transformers.AutoTokenizer` reads it.

The files of a folder may contradict each other, and transformers decides by the class that they name. It is imported
only where that could make a difference: a folder whose configuration states nothing but special tokens, all of which
`tokenizer.json` has, has the ids of `tokenizer.json`.
"""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tokenizers

from trackbed.datasets.extras import require
from trackbed.datasets.tokenizers.other_files import describe_folder
from trackbed.datasets.tokenizers.rust_libraries import one_core, panics_as_errors
from trackbed.datasets.tokenizers.sampling import switch_off_sampling, without_sampling
from trackbed.datasets.tokenizers.special_tokens import ROLES
from trackbed.errors import ArgumentError

_TEXTS: Final = 300
_PARTS: Final = 40
_WORDS: Final = (  # words, between spaces
    "the The THE cat don't WE'LL it's 's 'S def return x; std::vector<int> snake_case camelCase <div> &amp; "
    "http://a.b/c?d=e 0 7 42 2026 123456789 3.14 0x1F 1e-9 . , ... -- !? ({[ ]}) \" ' ` \\ / // /* */ # ## == != -> _ "
    # Accents in one and in two characters, ligatures, cases, quotes; digits of other scripts; scripts; emoji in parts.
    "na\u00efve e\u0301 \ufb01 \u00df \u0130 \u01c5 \u2019s \u0663 \u00bd \u2167 \u00b2 "
    "\u6771\u4eac \u3053\u3093\u306b\u3061\u306f \uc548\ub155 \u4e2d\u6587\u3002 \uff0c \u03b5\u03bb\u03bb "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd "
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 "
    "\U0001f642 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd"
)
_SPACES: Final = [*"   \t\n\r\v\f\u0085\u00a0\u2028\u3000", "  ", "   ", "\t\t", "\n\n", "\r\n"]
_RARE: Final = [*"\u200b\u200d\ufeff\ufffd\ue000\U0010fffd\x00\x7f\x1b"]
_LONG: Final = ["a" * 33, "=" * 70, "ab" * 40, " " * 33, "\n" * 9, "x" * 300]


def check_texts(tokenizer: Any) -> Iterator[str]:
    """Generates texts of many kinds for a tokenizer of `tokenizers`: a hundred kilobytes, the same on every call."""
    draw = random.Random(0)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    kinds = [*_WORDS.split(), *_SPACES * 3, *_RARE, *_LONG, *draw.sample(added, min(len(added), 20))]
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    yield ""
    for _ in range(_TEXTS):
        yield "".join(draw.choices(kinds, k=draw.randrange(1, _PARTS)))
        yield tokenizer.decode([draw.randrange(size) for _ in range(_PARTS)], skip_special_tokens=False)


_LIBRARY_FILE: Final = "tokenizer.json"
_CONFIG_FILE: Final = "tokenizer_config.json"
_OLDER_FILES: Final = ("config.json", "special_tokens_map.json", "added_tokens.json")  # transformers reads these too
_PLAIN_CLASSES: Final = ("PreTrainedTokenizerFast", "TokenizersBackend")
_ADDITIONAL: Final = ("extra_special_tokens", "additional_special_tokens")  # transformers 5, and before
_HARMLESS: Final = {
    *("tokenizer_class", "unk_token", "model_max_length", "max_length", "backend", "is_local", "local_files_only"),
    *("chat_template", "clean_up_tokenization_spaces", "model_input_names", "padding_side", "truncation_side"),
    *(f"{role}_token" for role in ROLES),
    *_ADDITIONAL,
}


class OnlyTransformersError(ArgumentError):
    """The tokenizer of a folder is one that only transformers can run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTokenizer:
    """Tokenizer of a folder."""

    library: tokenizers.Tokenizer
    """The tokenizer of the library `tokenizers` that gives its ids."""
    roles: Mapping[str, int]
    """Id of each of `ROLES` that the folder states."""
    additional: tuple[int, ...]
    """Ids of the special tokens without a role, in the folder's order."""


def read_folder(path: Path) -> FolderTokenizer:
    """Reads the tokenizer of a folder."""
    for entry in path.iterdir():
        if not (entry.is_file() or entry.is_dir() or not entry.exists()):
            raise ArgumentError(
                f"{entry}: a folder of a tokenizer must have regular files, found a pipe, a socket or a device"
            )
    plain = _read_plain(path)
    if plain is not None:
        return plain
    found = read_with_transformers(path)
    library = _library_of(found)
    if library is None:
        raise OnlyTransformersError(
            f"{path}: must be a tokenizer that the library tokenizers runs, found one that only transformers does"
        )
    return FolderTokenizer(library=library, roles=stated_roles(found), additional=stated_additional(found))


def read_with_transformers(path: Path) -> Any:
    """Returns the tokenizer of a folder as transformers reads it, without running code from the folder."""
    library = require("transformers", where=path)
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        with panics_as_errors():
            tokenizer = library.AutoTokenizer.from_pretrained(str(path), **options)
            settings = None if tokenizer.is_fast else without_sampling(_processor_settings(tokenizer), where=path)
            if settings is not None:
                tokenizer = library.AutoTokenizer.from_pretrained(str(path), sp_model_kwargs=settings, **options)
    except Exception as error:
        # The cause may be any of the files, each with exceptions of another library.
        other = describe_folder(path)
        reason = " ".join(str(error).split()) if other is None else f"found {other}"
        raise ArgumentError(
            f"{path}: must be a folder with a tokenizer that transformers can read: {reason}"
        ) from error
    if tokenizer.is_fast:
        switch_off_sampling(tokenizer.backend_tokenizer, where=path)
    return tokenizer


def _processor_settings(found: Any) -> Mapping[str, Any]:
    """Returns the settings of the SentencePiece processor of a tokenizer; none if it has no such processor."""
    return getattr(found, "sp_model_kwargs", None) or {}


def stated_roles(found: Any) -> dict[str, int]:
    """Returns the id of each of `ROLES` that a tokenizer of transformers has."""
    ids = {role: getattr(found, f"{role}_token_id") for role in ROLES}
    return {role: int(index) for role, index in ids.items() if index is not None}


def stated_additional(tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids of the special tokens without a role of a tokenizer of transformers.

    transformers 5 lists the tokens of `tokenizer.json` and of SentencePiece models among them, with a role or without.
    """
    named = next((getattr(tokenizer, name) for name in reversed(_ADDITIONAL) if hasattr(tokenizer, name)), None) or []
    ids = [int(tokenizer.convert_tokens_to_ids(str(token))) for token in named]
    taken = {*stated_roles(tokenizer).values(), tokenizer.unk_token_id}
    return tuple(index for index in ids if index not in taken)


def _library_of(tokenizer: Any) -> tokenizers.Tokenizer | None:
    """Returns a copy of the tokenizer that transformers runs, if it gives the same ids without transformers."""
    if not tokenizer.is_fast:
        return None
    copy = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    with one_core():  # threads of the library would not survive a fork
        try:
            with panics_as_errors():
                texts = list(check_texts(copy))
                copied = [one.ids for one in copy.encode_batch_fast(texts, add_special_tokens=False)]
                wanted = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        except Exception:  # noqa: BLE001  one of the texts fails, with any error: only transformers can say why
            return None
    return copy if copied == wanted else None


def _read_plain(path: Path) -> FolderTokenizer | None:
    """Returns the tokenizer of a folder that transformers is not needed for; None if it is."""
    if any((path / name).exists() for name in _OLDER_FILES):
        return None
    try:
        config = json.loads((path / _CONFIG_FILE).read_text(encoding="utf-8"))
        raw = (path / _LIBRARY_FILE).read_text(encoding="utf-8")
        fields = json.loads(raw)
        with panics_as_errors():
            library = tokenizers.Tokenizer.from_str(raw)
    except Exception:  # noqa: BLE001  transformers reports what is wrong with the files
        return None
    if not _is_plain(config) or _may_change(fields):
        return None
    special = {token.content: index for index, token in library.get_added_tokens_decoder().items() if token.special}
    roles = {role: _content(config[f"{role}_token"]) for role in ROLES if config.get(f"{role}_token") is not None}
    additional = [_content(token) for name in _ADDITIONAL for token in config.get(name) or []]
    unknown = [_content(config["unk_token"])] if config.get("unk_token") is not None else []
    if any(token not in special for token in (*roles.values(), *additional, *unknown)):
        return None  # transformers adds it
    return FolderTokenizer(
        library=library,
        roles={role: special[str(token)] for role, token in roles.items()},
        additional=tuple(special[str(token)] for token in additional if token not in (*roles.values(), *unknown)),
    )


def _is_plain(config: Any) -> bool:
    """True if a configuration states nothing but special tokens, and settings that no id depends on."""
    return (
        isinstance(config, dict)
        and config.get("tokenizer_class") in _PLAIN_CLASSES
        and config.keys() <= _HARMLESS
        and all(isinstance(config.get(name) or [], list) for name in _ADDITIONAL)
        and not all(config.get(name) for name in _ADDITIONAL)
    )


def _may_change(fields: dict[str, Any]) -> bool:
    """True if a version of transformers may change what `tokenizer.json` states: a leading space, or padding."""
    return fields.get("padding") is not None or '"add_prefix_space": true' in json.dumps(fields.get("pre_tokenizer"))


def _content(token: Any) -> str | None:
    """Returns the text of a special token, which is stated as a string or as a table; None if it is neither."""
    found = token.get("content") if isinstance(token, dict) and token.get("__type") == "AddedToken" else token
    return found if isinstance(found, str) else None
