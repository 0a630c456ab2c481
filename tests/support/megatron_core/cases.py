"""Generated configurations: some pairs of files, and what is to be made of them."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from hypothesis import strategies as st

from tests.support.megatron_core.release import IS_NEWER
from trackbed.index import convert_split_vector_to_split_matrix, parse_and_normalize_split, split_range

VOCAB = 96
DEFAULT_TOKENIZER = "megatron.core.tokenizers.text.models.default_tokenizer.DefaultTokenizerText"
SPLITS = ("99,1,0", "969,30,1", "80,10,10", "1", "50,50", "0,1,0", "1,1,1", ".9,.05,.05", "33.3,33.3,33.4")


@dataclass(frozen=True)
class Data:
    """One pair."""

    seed: int
    documents: int
    longest: int
    empty: float
    """Share of the documents that have no token."""
    dtype: str

    def lengths(self) -> np.ndarray:
        """`[D]` tokens in each document."""
        rng = np.random.default_rng(self.seed)
        lengths = rng.integers(0, self.longest + 1, self.documents)
        return np.where(rng.random(self.documents) < self.empty, 0, lengths)

    def tokens(self, lengths: np.ndarray) -> np.ndarray:
        """All tokens: most documents end with the end-of-document token, some have it in the middle, too."""
        rng = np.random.default_rng(self.seed + 1)
        tokens = rng.integers(0, VOCAB, int(lengths.sum()))
        tokens[rng.random(len(tokens)) < 0.02] = VOCAB
        ends = np.cumsum(lengths)[lengths > 0] - 1
        tokens[ends[rng.random(len(ends)) < 0.9]] = VOCAB
        return tokens.astype(self.dtype)


@dataclass(frozen=True)
class Case:
    """Pairs, and the arguments that both libraries get."""

    data: tuple[Data, ...]
    sequence_length: int
    blends: tuple[tuple[tuple[int, ...], tuple[float, ...] | None] | None, ...]
    """One blend for all splits, or one for each: numbers of pairs, and weights or None."""
    split: str | None
    sizes: tuple[int | None, ...]
    tokenizer: str
    """`null`, or a Hugging Face file: `plain`, `padded`, or `ambiguous` where padding ends documents too."""
    options: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the pairs and the tokenizer with NumPy alone."""
        folder.mkdir(parents=True)
        for number, data in enumerate(self.data):
            lengths = data.lengths()
            borders = np.arange(len(lengths) + 1)
            write_pair(folder / str(number), data.tokens(lengths), lengths, borders)
        if self.tokenizer != "null":
            write_tokenizer(folder / "tokenizer")

    def request(self, folder: Path, cache: Path) -> dict[str, Any]:
        """The question to either library."""
        blends = [
            None if blend is None else ([str(folder / str(number)) for number in blend[0]], blend[1])
            for blend in self.blends
        ]
        chosen = {"blend": blends[0], "split": self.split} if self.split else {"blend_per_split": blends}
        common = {"sequence_length": self.sequence_length, "path_to_cache": str(cache), **self.options}
        return {
            "config": {**common, **chosen},
            "sizes": self.sizes,
            "tokenizer": {"kind": self.tokenizer, "path": str(folder / "tokenizer"), "vocab_size": VOCAB},
        }

    def __repr__(self) -> str:
        return json.dumps(asdict(self))


def write_pair(prefix: Path, tokens: np.ndarray, lengths: np.ndarray, borders: np.ndarray) -> None:
    """Write a pair with NumPy alone."""
    tokens.tofile(f"{prefix}.bin")
    code = {"uint16": 8, "int32": 4}[tokens.dtype.name]
    pointers = (np.cumsum(lengths) - lengths) * tokens.dtype.itemsize
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(b"MMIDIDX\0\0" + np.uint64(1).tobytes() + np.uint8(code).tobytes())
        file.write(np.array([len(lengths), len(borders)], dtype=np.uint64).tobytes())
        for part, dtype in ((lengths, "<i4"), (pointers, "<i8"), (borders, "<i8")):
            file.write(part.astype(dtype).tobytes())


def every_part(split: str, count: int) -> list[tuple[int, int]]:
    """Ranges of the elements that each split gets."""
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    return [split_range(bounds, count) for bounds in matrix if bounds is not None]


def write_tokenizer(folder: Path) -> None:
    """A Hugging Face tokenizer whose ids are the words `0` to `95`, `</s>` and `<pad>`."""
    folder.mkdir()
    vocabulary = {**{str(number): number for number in range(VOCAB)}, "</s>": VOCAB, "<pad>": VOCAB + 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>", "<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def identity(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Path and keyword arguments with which Megatron Core makes this tokenizer, unless the request states them."""
    if "identity" in tokenizer:
        return tokenizer["identity"]
    if tokenizer["kind"] == "null":
        return {"path": None, "options": {"vocab_size": tokenizer["vocab_size"] + IS_NEWER}}
    pad = {
        "plain": {},
        "padded": {"pad_token": "<pad>"},
        "ambiguous": {"pad_token": "</s>"},
        "common": {"pad_token": "7"},
    }
    return {"path": tokenizer["path"], "options": {"eos_token": "</s>", "use_fast": True, **pad[tokenizer["kind"]]}}


@st.composite
def cases(draw: st.DrawFn, *, options: st.SearchStrategy[dict[str, Any]] | None = None) -> Case:
    """Any of the forms that a configuration can have."""
    sequence_length = draw(st.sampled_from([2, 3, 7, 16, 64, 129, 512]) | st.integers(2, 512))
    one_size = st.builds(
        Data,
        seed=st.integers(0, 2**31),
        documents=st.integers(1, 30) | st.integers(30, 400) | st.just(2000),
        longest=st.sampled_from([sequence_length, 3 * sequence_length, 1 + sequence_length // 2]),
        empty=st.sampled_from([0.0, 0.1, 0.5]),
        dtype=st.sampled_from(["uint16", "int32"]),
    )
    data = tuple(draw(st.lists(one_size, min_size=1, max_size=draw(st.sampled_from([1, 2, 4, 12])))))
    per_split = draw(st.sampled_from([False, False, True]))
    blends = tuple(draw(_blend(len(data), optional=per_split)) for _ in range(3 if per_split else 1))
    split = None if per_split else draw(st.sampled_from(SPLITS))
    if all(blend is None for blend in blends):
        blends, split = (((0,), None),), "1"
    # Asking for samples of nothing hangs the oracle, and starting it again takes long: a few such cases are enough.
    if draw(st.integers(0, 24)) != 17:
        data = tuple(one if one.lengths().any() else replace(one, documents=50, empty=0.0) for one in data)
        if split and not _every_part_has_tokens(split, data, blends[0][0]):
            split = "1"
    sizes = tuple(draw(_size(data, _blend_of(blends, number), sequence_length)) for number in range(3))
    chosen = draw(options if options is not None else flags())
    if per_split and split is None and options is None and draw(st.booleans()):
        chosen = {**chosen, "multiple_validation_sets": True}
    return Case(
        data=data,
        sequence_length=sequence_length,
        blends=blends,
        split=split,
        sizes=sizes,
        tokenizer=draw(st.sampled_from(["null", "null", "plain", "padded", "ambiguous", "common"])),
        options=chosen,
    )


def flags() -> st.SearchStrategy[dict[str, Any]]:
    """Every flag that shapes a sample, and those that must not."""
    return st.fixed_dictionaries(
        {
            "random_seed": st.sampled_from([0, 1, 1234, 2**32 - 1]) | st.integers(0, 2**32 - 1),
            "reset_position_ids": st.booleans(),
            "reset_attention_mask": st.booleans(),
            "eod_mask_loss": st.booleans(),
            "create_attention_mask": st.booleans(),
            "drop_last_partial_validation_sequence": st.booleans(),
            "add_extra_token_to_sequence": st.sampled_from([True, True, False]),
            "mid_level_dataset_surplus": st.sampled_from([0.005, 0.005, 0.0, 0.05]),
            "allow_ambiguous_pad_tokens": st.booleans(),
            "num_dataset_builder_threads": st.sampled_from([1, 2]),
            "mmap_bin_files": st.sampled_from([True, True, False]),
            **({"inter_document_masking": st.booleans()} if IS_NEWER else {}),
        }
    )


def _blend(num_pairs: int, *, optional: bool) -> st.SearchStrategy[Any]:
    numbers = st.lists(st.integers(0, num_pairs - 1), min_size=1, max_size=num_pairs, unique=True).map(tuple)
    if not optional:
        numbers = st.just(tuple(range(num_pairs)))
    weight = st.floats(0.01, 1) | st.integers(1, 100) | st.just(1.0)
    with_weights = numbers.flatmap(
        lambda chosen: st.lists(weight, min_size=len(chosen), max_size=len(chosen)).map(lambda w: (chosen, tuple(w)))
    )
    either = with_weights | with_weights | numbers.map(lambda chosen: (chosen, None))
    return either | st.none() if optional else either


def _blend_of(blends: tuple[Any, ...], number: int) -> Any:
    return blends[number] if len(blends) > 1 else blends[0]


def _size(data: tuple[Data, ...], blend: Any, sequence_length: int) -> st.SearchStrategy[int | None]:
    """None, nothing, or what up to 20 epochs can give."""
    if blend is None:
        return st.sampled_from([None, 0, 5])
    numbers, weights = blend
    epoch = sum(int(data[number].lengths().sum()) for number in numbers) // sequence_length + 1
    number = st.integers(1, 20).flatmap(lambda epochs: st.integers(0, min(epochs * epoch, 3000)))
    small = st.integers(0, 5)
    return number | small if weights is not None else st.none() | number | small


def _every_part_has_tokens(split: str, data: tuple[Data, ...], numbers: tuple[int, ...]) -> bool:
    known = [data[number].lengths() for number in numbers]
    return all(lengths[start:stop].sum() for lengths in known for start, stop in every_part(split, len(lengths)))
