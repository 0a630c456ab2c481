"""Table of the tokenizer in a blend file of the arguments of a Megatron-LM job."""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from trackbed.datasets import MegatronIdentity
from trackbed.datasets.megatron_releases import has_chat_template, has_flags_that_switch_off, last_null_id
from trackbed.files.stores import is_address

_SENTENCEPIECE: Final = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_TIKTOKEN_SPECIAL: Final = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
"""Special tokens of a `TikTokenizer`, which have the ids from 0 on, if the job gives none."""
_TIKTOKEN_IDS: Final = 2**17
"""Number of ids of a `TikTokenizer`, if the job gives none."""
_NULL_PAD: Final = -1
"""Padding of a `NullTokenizer`, if the job gives none."""
_GPT2_END: Final = "<|endoftext|>"


def tokenizer_lines(given: argparse.Namespace, named: Callable[[str], str], release: str) -> Iterator[str]:
    """Yields the lines of the table of the tokenizer, or a comment if a blend file cannot name it.

    Args:
        given: arguments of the job.
        release: release of Megatron Core of the job.
        named: returns the path that the blend file has for one of the job.
    """
    kind, model = given.tokenizer_type, given.tokenizer_model
    known: list[str] = []
    if kind == "NullTokenizer" and given.vocab_size is not None:
        known = _null_ids(given, release)
    elif kind == "TikTokenizer" and model is not None:
        known = _tiktoken_ids(given)
    elif kind == "GPT2BPETokenizer":
        known = _gpt2_ids(given.vocab_file)
    elif kind in ("HuggingFaceTokenizer", *_SENTENCEPIECE) and model is not None:
        is_there = is_address(model) or Path(model).exists()
        hint = "" if is_there else "    # no such file or folder: for a name of a hub, write the folder of a copy here"
        known = [f"file = {toml_text(named(model))}{hint}"]
        if kind == "HuggingFaceTokenizer" and (eos := _eos_token(model)) is not None:
            known.append(f"eod_token = {toml_text(eos)}")
    if not known:
        found = f"{kind or 'none'} {model or ''}".strip()
        yield f"# [tokenizer]    # the job has: {comment_text(found)}"
        if kind == "GPT2BPETokenizer" and given.vocab_file is not None:
            yield f"# {comment_text(given.vocab_file)} cannot be read here: where it can be, its ids are stated"
        yield '# file = "tokenizer.json"    # of the same vocabulary'
        if kind == "GPT2BPETokenizer" and not _is_unknown(given):
            yield f"# megatron = {_identity(given, release)}"
        return
    yield "[tokenizer]"
    yield from known
    if _is_unknown(given):
        yield "# megatron = {...}    # not known with --legacy-tokenizer and --tokenizer-metadata"
    else:
        yield f"megatron = {_identity(given, release)}"


def _null_ids(given: argparse.Namespace, release: str) -> list[str]:
    """Returns the ids of a `NullTokenizer`, whose last one ends a document unless the job says another."""
    last, end = last_null_id(release, given.vocab_size), given.null_tokenizer_eod_id
    return [f'file = "null:{last}"'] if end in (None, last) else [f"eod = {end}", f"vocab_size = {last + 1}"]


def _tiktoken_ids(given: argparse.Namespace) -> list[str]:
    """Returns the ids of a `TikTokenizer`, which have an order of their own; none if a special token is missing."""
    special = given.tokenizer_special_tokens or list(_TIKTOKEN_SPECIAL)
    if not {"</s>", "<pad>"} <= set(special):
        return []
    size = given.vocab_size or _TIKTOKEN_IDS
    ids = {"eod": special.index("</s>"), "pad": special.index("<pad>"), "vocab_size": size}
    return [f"{name} = {value}" for name, value in ids.items()]


def _gpt2_ids(vocab_file: str | None) -> list[str]:
    """Returns the ids in a vocabulary file of GPT-2's kind; none if it cannot be read or lacks the end of a text."""
    try:
        vocabulary = json.loads(Path(vocab_file or "").read_text(encoding="utf-8"))
        return [f"eod = {int(vocabulary[_GPT2_END])}", f"vocab_size = {len(vocabulary)}"]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _is_unknown(given: argparse.Namespace) -> bool:
    """True if other classes than Megatron Core's may be used."""
    return given.legacy_tokenizer or given.tokenizer_metadata is not None


def _identity(given: argparse.Namespace, release: str) -> str:
    """Returns the identity of the job's tokenizer, with which it looks for indices in the cache.

    As in `build_tokenizer` of megatron-core 0.16.1 and 0.19.2.
    """
    paths = {"NullTokenizer": None, "GPT2BPETokenizer": "GPT2BPETokenizer"}
    found = paths.get(given.tokenizer_type, given.tokenizer_model)
    path = "" if found is None else f"path = {toml_text(found)}, "
    of_job = _options_of_release(given, release)
    options = ", ".join(f"{key} = {_value(value)}" for key, value in of_job.items())
    class_path = MegatronIdentity.of(release).class_path
    return f"{{class = {toml_text(class_path)}, {path}options = {{{options}}}}}"


def _tokenizer_options(given: argparse.Namespace) -> dict[str, object]:
    kind, special = given.tokenizer_type, given.tokenizer_special_tokens
    if kind == "NullTokenizer":
        return {"vocab_size": given.vocab_size}
    if kind in _SENTENCEPIECE:
        return {"legacy": given.tokenizer_sentencepiece_legacy, "special_tokens": special}
    if kind == "TikTokenizer":
        options = {"pattern": given.tiktoken_pattern, "vocab_size": given.vocab_size}
        given_ones = {key: value for key, value in options.items() if value}
        return {**given_ones, "num_special_tokens": given.tiktoken_num_special_tokens, "special_tokens": special}
    files = {"vocab_file": given.vocab_file, "merges_file": given.merge_file}
    added = {"additional_special_tokens": special or []}
    return {
        **(added | files if kind == "GPT2BPETokenizer" else files | added),  # their order counts
        "use_fast": given.tokenizer_hf_use_fast,
        "trust_remote_code": given.trust_remote_code,
        "include_special_tokens": given.tokenizer_hf_include_special_tokens,
    }


def _options_of_release(given: argparse.Namespace, release: str) -> dict[str, object]:
    """Options as a release has them."""
    options = _tokenizer_options(given)
    if "use_fast" in options and has_flags_that_switch_off(release):
        options["use_fast"] = not given.tokenizer_hf_no_use_fast
        options["include_special_tokens"] = not given.tokenizer_hf_no_include_special_tokens
    if not has_chat_template(release) or given.tokenizer_type == "GPT2BPETokenizer":
        return options
    if given.tokenizer_type == "NullTokenizer":
        end, pad = given.null_tokenizer_eod_id, given.null_tokenizer_pad_id
        return options | ({} if end is None else {"eod_id": end}) | {"pad_id": _NULL_PAD if pad is None else pad}
    template: dict[str, object] = {"chat_template": given.chat_template}
    if given.tokenizer_type in _SENTENCEPIECE:
        template["ignore_extra_whitespaces"] = given.tokenizer_sentencepiece_ignore_extra_whitespaces
    return template | options


def _value(value: object) -> str:
    """A value in TOML; None, which TOML does not have, as the text that stands for it in an identity."""
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value) if isinstance(value, (bool, int)) else toml_text(str(value))


def _eos_token(folder: str) -> str | None:
    """Returns the token that ends a text, and in Megatron-LM a document; None if nothing says it."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            found = json.loads((Path(folder) / name).read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError):
            continue
        token = found.get("content") if isinstance(found, dict) else found
        if isinstance(token, str):
            return token
    return None


def toml_text(value: str) -> str:
    """Returns a string as TOML writes it."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def comment_text(text: str) -> str:
    """Returns a text for a comment, whose line it must not leave."""
    return "".join(char if char.isprintable() else " " for char in text)
