"""Generated configurations of masked datasets: some pairs of documents of sentences, and what is to be made of them."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.support.megatron_core.cases import SPLITS, every_part, write_pair
from tests.support.megatron_core.word_piece_tokenizer import SPECIAL

LONG = 512


@dataclass(frozen=True)
class Corpus:
    """One pair."""

    seed: int
    documents: int
    most_sentences: int
    longest: int
    dtype: str

    def sentences(self) -> list[np.ndarray]:
        """Tokens in each sentence of each document."""
        rng = np.random.default_rng(self.seed)
        counts = rng.integers(0, self.most_sentences + 1, self.documents)
        lengths = [rng.integers(0, self.longest + 1, count) for count in counts]
        return [np.where(rng.random(len(one)) < 0.1, 0, one) for one in lengths]

    def is_eligible(self, document: np.ndarray, least: int) -> bool:
        """True if samples can be cut from the document."""
        return len(document) >= max(least, 1) and (len(document) == 1 or document.max() <= LONG)


@dataclass(frozen=True)
class MaskedCase:
    """Pairs, and the arguments that both libraries get."""

    model: str
    """`bert` or `t5`."""
    corpora: tuple[Corpus, ...]
    weights: tuple[float, ...] | None
    split: str
    sizes: tuple[int | None, ...]
    tokenizer: dict[str, Any]
    options: dict[str, Any]

    @property
    def least(self) -> int:
        """Fewest sentences of a sample."""
        return 2 if self.options.get("classification_head") else 1

    def write(self, folder: Path) -> None:
        """Write the pairs with NumPy alone."""
        folder.mkdir(parents=True)
        for number, corpus in enumerate(self.corpora):
            documents = corpus.sentences()
            lengths = np.concatenate([*documents, np.zeros(0, dtype=np.int64)]).astype(np.int64)
            rng = np.random.default_rng(corpus.seed + 1)
            tokens = rng.integers(0, self.tokenizer["size"], int(lengths.sum()))
            borders = np.cumsum([0, *map(len, documents)])
            write_pair(folder / str(number), tokens.astype(corpus.dtype), lengths, borders)

    def request(self, folder: Path, cache: Path) -> dict[str, Any]:
        """The question to either library."""
        prefixes = [str(folder / str(number)) for number in range(len(self.corpora))]
        chosen = {"blend": (prefixes, self.weights), "split": self.split, "path_to_cache": str(cache)}
        return {
            "model": self.model,
            "config": {**self.options, **chosen},
            "sizes": self.sizes,
            "tokenizer": {"kind": "word pieces", **self.tokenizer},
        }

    def __repr__(self) -> str:
        return json.dumps(asdict(self))


@st.composite
def masked_cases(draw: st.DrawFn, model: str) -> MaskedCase:
    """Any of the forms that a configuration of BERT or T5 can have."""
    number = draw(st.sampled_from([1, 1, 2, 4]))
    corpus = st.builds(
        Corpus,
        seed=st.integers(0, 2**31),
        documents=st.integers(1, 30) | st.integers(1, 500),
        most_sentences=st.sampled_from([1, 2, 6, 40]),
        longest=st.sampled_from([5, 40, 200, 700]),
        dtype=st.sampled_from(["uint16", "int32"]),
    )
    options = {
        "random_seed": draw(st.sampled_from([0, 1, 1234, 2**31 - 2]) | st.integers(0, 2**31 - 2)),
        "masking_probability": draw(st.sampled_from([0.15, 0.15, 0.01, 0.5, 0.99]) | st.floats(0.01, 0.99)),
        "short_sequence_probability": draw(st.sampled_from([0.0, 0.1, 1.0]) | st.floats(0, 1)),
        "masking_max_ngram": draw(st.sampled_from([1, 3]) | st.integers(1, 10)),
        "masking_do_full_word": draw(st.booleans()),
        "masking_use_longer_ngrams": draw(st.booleans()),
        **draw(st.sampled_from([(False, False), (True, False), (False, True)]).map(_distribution)),
        "allow_ambiguous_pad_tokens": draw(st.booleans()),
    }
    least = (4 if model == "bert" else 3) + int(options["short_sequence_probability"] > 0)
    length = max(least, draw(st.sampled_from([8, 64, 128, 512]) | st.integers(8, 512) | st.just(3)))
    options["sequence_length"] = length
    spans = int(options["masking_probability"] * length)
    if model == "bert":
        options["classification_head"] = draw(st.booleans())
    else:
        options["sequence_length_decoder"] = 1 + 2 * spans if draw(st.integers(0, 9)) else max(1, spans)
    size = draw(st.sampled_from([12, 300, 3000]))
    case = MaskedCase(
        model=model,
        corpora=tuple(draw(st.lists(corpus, min_size=number, max_size=number))),
        weights=draw(st.lists(st.floats(0.1, 1), min_size=number, max_size=number).map(tuple)),
        split=draw(st.sampled_from(SPLITS)),
        sizes=draw(st.lists(st.integers(0, 300) | st.integers(0, 3000), min_size=3, max_size=3).map(tuple)),
        tokenizer={
            "seed": draw(st.integers(0, 2**31)),
            "size": size,
            "continues": draw(st.sampled_from([0.0, 0.3, 0.9])),
            "pad": draw(st.sampled_from([None, 0, 1, 5, size + len(SPECIAL) - 1, size + 100])),
            "sentinels": spans + 1 if draw(st.integers(0, 9)) else max(1, spans // 2),
        },
        options=options,
    )
    # Without a document that gives a sample the oracle hangs, and starting it again takes long.
    return case if _has_samples(case) else replace(case, corpora=tuple(map(_rich, case.corpora)), split="1")


def _distribution(chosen: tuple[bool, bool]) -> dict[str, bool]:
    return {"masking_do_permutation": chosen[0], "masking_use_geometric_distribution": chosen[1]}


def _rich(corpus: Corpus) -> Corpus:
    return replace(corpus, documents=50, most_sentences=40, longest=min(corpus.longest, 200))


def _has_samples(case: MaskedCase) -> bool:
    for corpus in case.corpora:
        documents = corpus.sentences()
        for start, stop in every_part(case.split, len(documents)):
            if not any(corpus.is_eligible(document, case.least) for document in documents[start:stop]):
                return False
    return True
