"""Blend file of the arguments of a Megatron-LM job."""

import argparse
import json
import os
import re
import shlex
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from typing import Final, NoReturn

from trackbed.blends.dataset_tables import path_of_pattern
from trackbed.blends.members import pair_ids
from trackbed.datasets.megatron_releases import COMPARED_WITH, check_release
from trackbed.errors import ArgumentError
from trackbed.files.stores import is_address
from trackbed.index.splits import get_blend_from_list
from trackbed.megatron.blend_arguments.tokenizer_arguments import comment_text, tokenizer_lines, toml_text

_WHERE: Final = "arguments of Megatron-LM"
_LEGACY_SPLIT: Final = "969, 30, 1"
"""Split of Megatron-LM when the job gives none."""
_PREFIX_LISTS: Final = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_SPLITS: Final = ("train", "valid", "test")
_FLAGS: Final = {
    "reset_position_ids": "reset_position_ids",
    "reset_attention_mask": "reset_attention_mask",
    "eod_mask_loss": "eod_mask_loss",
    "full_validation": "full_validation",
    "multiple_validation_sets": "multiple_validation_sets",
    "dataloader_fast_cache_load": "fast_cache_load",
    "dataloader_defer_npy_index_mmap": "defer_npy_index_mmap",
    "allow_ambiguous_pad_tokens": "allow_ambiguous_pad_tokens",
    "dataloader_inter_document_masking": "inter_document_masking",
}
"""Options by the flags that set them."""
_NOT_SAID: Final = {
    "per_dataset_sequences_path": "the counts of sequences are read from the files",
    "dataloader_type": "a blend file has the order of --dataloader-type single",
    "sft": "a blend file has no data for fine-tuning, and a job with `install()` needs the flag",
    "fim_data": "a blend file has no fill-in-the-middle, and a job with `install()` needs the flag",
    "phase_transition_iterations": "the sizes are those of one phase; give train and valid of all phases",
    "rampup_batch_size": "the sizes are those of global_batch_size; give valid, if the job evaluates at other steps",
    "skip_train": "the sizes are those of a job that trains; give valid and test",
}
"""Arguments about the data that a blend file has no key for, with what it does instead."""
_IS_NUMBER: Final = re.compile(r"[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?")
_SWITCHES: Final = (
    "mock_data",
    "sft",
    "fim_data",
    "skip_train",
    "no_mmap_bin_files",
    "no_create_attention_mask_in_dataloader",
)
_SIMILAR: Final = 0.85
_ALIKE: Final = ("--decoder-seq-length", "--encoder-seq-length", "--full-validation-step")
"""Arguments of Megatron-LM that are spelt almost as one about the data."""
_TOKENIZER_SWITCHES: Final = (
    "legacy_tokenizer",
    "tokenizer_sentencepiece_legacy",
    "tokenizer_hf_use_fast",
    "tokenizer_hf_include_special_tokens",
    "trust_remote_code",
    "tokenizer_hf_no_use_fast",
    "tokenizer_hf_no_include_special_tokens",
)
_KEEP_SPACES: Final = [f"--{no}-tokenizer-sentencepiece-ignore-extra-whitespaces" for no in ("no", "disable")]


class _Parser(argparse.ArgumentParser):
    """Parser that raises errors of this package."""

    def error(self, message: str) -> NoReturn:
        """Raises an error."""
        raise ArgumentError(f"{_WHERE}: {message}")


def _at_least(least: int) -> Callable[[str], int]:
    """Returns a type of arguments: whole numbers from `least` on."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, found {text}")
        return int(text)

    return number


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in _PREFIX_LISTS:
        parser.add_argument(f"--{name.replace('_', '-')}", nargs="*")
    for name in ("data-args-path", "per-split-data-args-path", "split", "data-cache-path", "tokenizer-type"):
        parser.add_argument(f"--{name}")
    for name in ("tokenizer-model", "object-storage-cache-path", "per-dataset-sequences-path", "dataloader-type"):
        parser.add_argument(f"--{name}")
    for name in ("vocab-file", "merge-file", "tokenizer-metadata", "tiktoken-pattern", "phase-transition-iterations"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--chat-template")
    for name in ("null-tokenizer-eod-id", "null-tokenizer-pad-id"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--tiktoken-num-special-tokens", type=int, default=1000)
    parser.add_argument("--tokenizer-special-tokens", nargs="+")
    parser.add_argument("--rampup-batch-size", nargs="*")
    for name in ("seq-length", "global-batch-size", "vocab-size"):
        parser.add_argument(f"--{name}", type=_at_least(1))
    for name in ("train-iters", "train-samples", "seed"):
        parser.add_argument(f"--{name}", type=_at_least(0))
    parser.add_argument("--eval-iters", type=_at_least(0), default=100)
    parser.add_argument("--eval-interval", type=_at_least(1), default=1000)
    parser.add_argument("--num-dataset-builder-threads", type=int)
    parser.add_argument("--mid-level-dataset-surplus", type=float)
    for name in (*_FLAGS, *_SWITCHES, *_TOKENIZER_SWITCHES):
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
    name = "tokenizer_sentencepiece_ignore_extra_whitespaces"
    parser.add_argument(*_KEEP_SPACES, dest=name, action="store_false")
    return parser


def blend_of_megatron_arguments(
    arguments: str, *, folder: str | os.PathLike[str] = ".", release: str = COMPARED_WITH[0]
) -> str:
    """Returns the text of a blend file that has the data of a Megatron-LM job. Reads no data.

    What the job does not give, and a blend file needs, is a comment in the text.

    Args:
        arguments: the job's arguments, as its shell script has them; those that do not concern the data are ignored.
        folder: folder that the blend file will lie in. Prefixes are relative to the working directory, as in the job.
        release: release of Megatron Core of the job, from 0.16 on.

    Raises:
        ArgumentError: the arguments contradict each other, or have no data.
        OSError: the file of `--data-args-path` or `--per-split-data-args-path` cannot be read.
    """
    check_release(release)
    parser, place = _parser(), _BlendFolder(Path(folder))
    given, others = parser.parse_known_args(shell_words(arguments, _WHERE))
    lines = [*_top(given, place), *_misspelt(others, parser), *_datasets(given, place), *_options(given, place)]
    return "\n".join([*lines, "", *tokenizer_lines(given, place.of, release)]) + "\n"


def _misspelt(others: Sequence[str], parser: _Parser) -> Iterator[str]:
    """Yields a comment for each argument that is none of those about the data, but almost."""
    known = list(parser._option_string_actions)  # noqa: SLF001  argparse has no other list of its flags
    for flag in (word.partition("=")[0] for word in others if word.startswith("--")):
        for near in get_close_matches(flag.replace("_", "-"), known, n=1, cutoff=_SIMILAR):
            if flag not in _ALIKE:
                yield f"# {comment_text(flag)} is not known here; did you mean {near}?"


class _BlendFolder:
    """Folder of the blend file.

    Args:
        folder: path relative to the working directory, or absolute.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, path: str) -> str:
        """Returns a path of the job relative to this folder; addresses and absolute paths as they are."""
        if is_address(path) or Path(path).is_absolute() or self._folder == Path():
            return path
        relative = os.path.relpath(path, self._folder)
        if (self._folder / relative).resolve() != Path(path).resolve():
            self._refuse(path)
        return relative

    def of_prefix(self, prefix: str) -> str:
        """Returns a prefix of the job relative to this folder, which the reader of the file names as the job does."""
        relative = self.of(prefix)
        if not is_address(prefix) and path_of_pattern(self._folder, relative) != prefix:
            self._refuse(prefix)
        return relative

    def _refuse(self, path: str) -> NoReturn:
        raise ArgumentError(
            f"{_WHERE}: {path!r} must have the same name in a blend file in {self._folder}, but has not: write the "
            "blend file into the working directory of the job"
        )


def _top(given: argparse.Namespace, folder: _BlendFolder) -> Iterator[str]:
    yield "version = 1"
    length = given.seq_length
    yield f"sequence_length = {length}" if length is not None else "# sequence_length = 4096    # --seq-length"
    if given.seed is not None:
        yield f"seed = {given.seed}"
    if not _has_per_split(given):
        yield f"split = {toml_text((given.split or _LEGACY_SPLIT).strip())}"
    elif given.split is not None:
        raise ArgumentError(f"{_WHERE}: must not have --split with a blend per split, found {given.split!r}")
    if given.data_cache_path is not None:
        yield f"cache = {toml_text(folder.of(given.data_cache_path))}"
    else:
        yield '# cache = "cache"    # --data-cache-path: give the job the same, or it does not find what build makes'
    yield _size(given)
    for name, instead in _NOT_SAID.items():
        if getattr(given, name) not in (None, False, "single"):
            yield f"# --{name.replace('_', '-')} stays a flag of the job: {instead}"


def _size(given: argparse.Namespace) -> str:
    fields = {
        "train": given.train_samples,
        "train_iters": given.train_iters if given.train_samples is None else None,
        "global_batch_size": given.global_batch_size,
    }
    if given.global_batch_size is not None and (given.train_iters, given.train_samples) != (None, None):
        if not given.full_validation:
            fields |= {"eval_interval": given.eval_interval, "eval_iters": given.eval_iters}
        return f"size = {{{', '.join(f'{key} = {value}' for key, value in fields.items() if value is not None)}}}"
    return (
        "# size = {train_iters = 100_000, global_batch_size = 512, eval_interval = 1000, eval_iters = 100}"
        "    # --train-iters or --train-samples, and --global-batch-size"
    )


def _has_per_split(given: argparse.Namespace) -> bool:
    return bool(
        given.per_split_data_args_path or any(getattr(given, f"{split}_data_path") is not None for split in _SPLITS)
    )


def _datasets(given: argparse.Namespace, folder: _BlendFolder) -> Iterator[str]:
    blends = _per_split(given) if _has_per_split(given) else {None: _blend(given)}
    entries = [
        (split, prefix, None if weights is None else weights[number])
        for split, words in blends.items()
        if words
        for prefixes, weights in [_prefixes_and_weights(words)]
        for number, prefix in enumerate(prefixes)
    ]
    if not entries:
        raise ArgumentError(f"{_WHERE}: must have --data-path, or another argument with prefixes, found none")
    seen: set[str] = set()
    pairs: set[tuple[str | None, Hashable]] = set()
    ids = pair_ids([prefix for _, prefix, _ in entries])
    for (split, prefix, weight), pair in zip(entries, ids, strict=True):
        name = Path(prefix).name if split in (None, "train") else f"{Path(prefix).name} ({split})"
        names = (name if number == 0 else f"{name} {number + 1}" for number in count())
        unique = next(one for one in names if one not in seen)
        seen.add(unique)
        yield "\n[[dataset]]"
        yield f"path = {toml_text(folder.of_prefix(prefix))}"
        if unique != Path(prefix).name:
            yield f"name = {toml_text(unique)}"
        if weight is not None:
            yield f"weight = {weight:g}" if float(f"{weight:g}") == weight else f"weight = {weight!r}"
        if (split, pair) in pairs:
            yield "repeated = true"
        pairs.add((split, pair))
        if split is not None:
            yield f"splits = [{toml_text(split)}]"


def _prefixes_and_weights(words: Sequence[str]) -> tuple[Sequence[str], Sequence[float] | None]:
    """Returns prefixes and weights. Of an odd number of words all are prefixes, as in Megatron-LM."""
    weights = [word for word in words if _IS_NUMBER.fullmatch(word) and not Path(f"{word}.idx").exists()]
    if len(words) % 2 and weights:
        text = " ".join(words[:6]) + (" ..." if len(words) > 6 else "")
        raise ArgumentError(f"{_WHERE}: every prefix must follow its weight, or none, found {text!r}")
    return (get_blend_from_list(words) if words else None) or ([], None)


def _blend(given: argparse.Namespace) -> Sequence[str] | None:
    if given.mock_data:
        raise ArgumentError(f"{_WHERE}: must name files, found --mock-data")
    if given.data_args_path is None:
        return given.data_path  # type: ignore[no-any-return]
    if given.data_path is not None:
        raise ArgumentError(f"{_WHERE}: must not have both --data-path and --data-args-path, found both")
    try:
        return Path(given.data_args_path).read_text(encoding="utf-8").split()
    except UnicodeDecodeError:
        raise ArgumentError(f"{given.data_args_path}: must be UTF-8, found other bytes") from None


def _per_split(given: argparse.Namespace) -> Mapping[str | None, Sequence[str] | None]:
    if given.data_path is not None or given.data_args_path is not None:
        raise ArgumentError(f"{_WHERE}: must have one blend, or a blend per split, found both")
    if given.per_split_data_args_path is None:
        return {split: getattr(given, f"{split}_data_path") for split in _SPLITS}
    path = given.per_split_data_args_path
    rule = f"{path}: must be JSON with train, valid and test, each a text or a list of words"
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        given_words = {split: found[split] for split in _SPLITS}
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{rule}, found: {error!r}") from None
    words: dict[str | None, Sequence[str] | None] = {
        split: one.split() if isinstance(one, str) else one for split, one in given_words.items()
    }
    for split, one in words.items():
        if one is not None and not (isinstance(one, list) and all(isinstance(word, str) for word in one)):
            raise ArgumentError(f"{rule}, found {one!r} for {split}")
    return words


def _options(given: argparse.Namespace, folder: _BlendFolder) -> Iterator[str]:
    options: dict[str, object] = {name: "true" for flag, name in _FLAGS.items() if getattr(given, flag)}
    if not given.no_create_attention_mask_in_dataloader:
        options["create_attention_mask"] = "true"  # Megatron-LM's default
    options |= {"mmap_bin_files": "false"} if given.no_mmap_bin_files else {}
    for name in ("num_dataset_builder_threads", "mid_level_dataset_surplus"):
        if getattr(given, name) is not None:
            options[name] = getattr(given, name)
    if given.object_storage_cache_path is not None:
        options["object_storage_cache_path"] = toml_text(folder.of(given.object_storage_cache_path))
    if options:
        yield "\n[options]"
        yield from (f"{name} = {value}" for name, value in options.items())


_IS_SEVERAL: Final = re.compile(r"--\S+\s")
_IS_END: Final = re.compile(r"[|&;]+|\d*>+(&?\d)?\S*|<+[^>\s]*")
"""The word that ends a command in a shell. A token such as <unk> is none."""
_IS_START: Final = re.compile(r"\S")
_IS_WORD: Final = re.compile(r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])+""", re.DOTALL)
"""A word of a command line, with its quotes."""


def shell_words(arguments: str, where: str) -> list[str]:
    """Returns the words of a command line, up to the end of the command and without comments.

    Args:
        arguments: text of the command line.
        where: what it is, for errors.
    """
    if not arguments.isprintable() and any("\ud800" <= char <= "\udfff" for char in arguments):
        raise ArgumentError(f"{where}: must be UTF-8, found other bytes")
    words: list[str] = []
    for quoted in _quoted_words(arguments.replace("\\\n", " "), where):
        if _IS_END.fullmatch(quoted):
            break
        is_last = quoted.endswith(";") and not quoted.endswith("\\;")
        (word,) = shlex.split(quoted.removesuffix(";") if is_last else quoted)
        try:
            # Scripts keep several arguments in one variable, which a shell splits again.
            words += shlex.split(word) if _IS_SEVERAL.match(word) else [word]
        except ValueError as error:
            raise _not_quoted(where, str(error)) from None
        if is_last:
            break
    return words


def _quoted_words(text: str, where: str) -> Iterator[str]:
    """Yields the words with their quotes, as only a character without quotes ends a command or begins a comment."""
    position = 0
    while (start := _IS_START.search(text, position)) is not None:
        if start[0] == "#":
            position = text.find("\n", start.start())
            if position < 0:
                return
            continue
        word = _IS_WORD.match(text, start.start())
        if word is None or not (word.end() == len(text) or text[word.end()].isspace()):
            found = "No closing quotation"
            raise _not_quoted(where, found)
        yield word[0]
        position = word.end()


def _not_quoted(where: str, found: str) -> ArgumentError:
    return ArgumentError(f"{where}: must be quoted as in a shell, found: {found}")
