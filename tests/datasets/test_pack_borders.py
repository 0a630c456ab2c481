"""Borders and masks of packs over an epoch: each token names its document and its place in it.

Shapes: D documents, T tokens of all of them.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from tests.support.files.blends import build, gpt_config
from tests.support.tiers import slow_but
from trackbed import BatchLoader
from trackbed.datasets import NullTokenizer
from trackbed.preprocess import inspect_pair
from trackbed.tokens import IndexedDatasetBuilder
from trackbed.tokens.trained_tokens import TrainedColumns

LENGTH = 128
FEW, MANY = 1_500, 100_000
DISTINCT = NullTokenizer(2**31 - 2)
SHARES = (0.0, 0.05, 0.5, 0.95, 1.0)


@dataclass(frozen=True)
class Corpus:
    """Two pairs of documents with the same lengths and masks.

    The tokens of the first one are 0, 1, 2, ..., so that each names its document and its place. About half of those of
    the second one are 0, which is its padding and the end of a document.
    """

    distinct: str
    alike: str
    alike_tokens: np.ndarray
    """`[T]` tokens of the second pair."""
    firsts: np.ndarray
    """`[D + 1]` first token of each document, and T."""
    is_trained: np.ndarray
    """`[T]` True for a trained token."""

    @property
    def document(self):
        """`[T]` document of each token."""
        return np.repeat(np.arange(len(self.firsts) - 1), np.diff(self.firsts))


class ZeroEnds(NullTokenizer):
    """Tokenizer whose end of a document is 0, as are padding and many tokens of the text."""

    eod = pad = property(lambda self: 0)


def write(prefix, tokens, lengths, is_trained, dtype):
    """Writes a pair with its mask."""
    is_first = np.zeros(len(tokens) + 1, dtype=bool)
    is_first[np.append(0, np.cumsum(lengths))] = True
    before = np.append(False, is_trained)
    begins = np.flatnonzero(is_trained & (~before[:-1] | is_first[:-1]))
    ends = np.flatnonzero(is_trained & (~np.append(is_trained, False)[1:] | is_first[1:]))
    document = np.repeat(np.arange(len(lengths)), lengths)[begins]
    starts = begins - np.append(0, np.cumsum(lengths))[document]
    runs = np.stack([starts, ends + 1 - begins], axis=1).astype(np.uint32)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype)
    builder.trained = TrainedColumns()
    builder.add_documents(tokens.astype(dtype), lengths)
    counts = np.bincount(document, minlength=len(lengths))
    builder.trained.add(counts, runs, lengths=lengths, where="mask")
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture(scope="module")
def corpus_of(tmp_path_factory):
    @cache
    def make(num_documents):
        folder, rng = tmp_path_factory.mktemp("borders"), np.random.default_rng(num_documents)
        lengths = rng.lognormal(np.log(25), 1.2, num_documents).astype(np.int32)
        lengths[rng.random(num_documents) < 0.02] = 0
        lengths[rng.random(num_documents) < 0.02] = 1
        lengths[rng.random(num_documents) < 0.02] = LENGTH + 1
        lengths[:2] = 5 * LENGTH, LENGTH + 2
        firsts = np.append(0, np.cumsum(lengths, dtype=np.int64))
        shares = np.repeat(rng.choice(SHARES, num_documents), lengths)
        is_trained = rng.random(firsts[-1]) < shares
        distinct = write(folder / "distinct", np.arange(firsts[-1]), lengths, is_trained, np.int32)
        alike_tokens = rng.integers(0, 2, firsts[-1])
        alike = write(folder / "alike", alike_tokens, lengths, is_trained, np.uint16)
        return Corpus(distinct, alike, alike_tokens, firsts, is_trained)

    return make


def epoch_of(prefix, layout, *, tokenizer=DISTINCT, **options):
    """The batches of an epoch, of all packs, through the loader."""
    common = {"split": "1", "order": "packed", "sequence_length": LENGTH, "tokenizer": tokenizer, **options}
    config = gpt_config(None, blend=([prefix], None), **common)
    size = len(build(config, [None] * 3)[0])
    data = build(config, (size, 0, 0))[0]
    loader = BatchLoader(data, batch_size=61, layout=layout, drop_last=False, rank=0, num_ranks=1)
    return [{name: tensor.clone() for name, tensor in batch.items()} for batch in loader]


def flat(batches, name):
    """A tensor of all places of an epoch."""
    return torch.cat([batch[name].reshape(-1) for batch in batches]).numpy()


def borders_of(batches, layout):
    """First place of each segment of an epoch, and the number of places."""
    found, start = [], 0
    for batch in batches:
        rows = batch["cu_seqlens_padded"].reshape(1 if layout else len(batch["tokens"]), -1).numpy().astype(np.int64)
        for row in rows:
            found.append(start + row[:-1])
            start += row[-1]
    # Rows are filled up with the last border, which is the first place of the next row.
    return np.unique(np.append(np.concatenate(found), start))


def kept_places(corpus, long):
    """`[T]` True for each token that is a label in every epoch."""
    lengths, document = np.diff(corpus.firsts), corpus.document
    place = np.arange(len(document)) - corpus.firsts[document]
    kept = place > 0
    if long == "cut":
        kept &= place <= LENGTH
    elif long == "drop":
        kept &= lengths[document] <= LENGTH + 1
    return kept


def check_epoch(corpus, batches, layout, long, multiple):
    """Checks all labels, inputs, positions and masks of an epoch."""
    tokens, labels, is_padding = (flat(batches, name) for name in ("tokens", "labels", "padding_mask"))
    borders = borders_of(batches, layout)
    assert borders[-1] == len(tokens)
    assert not (borders % multiple).any()
    own = np.flatnonzero(~is_padding)
    kept = kept_places(corpus, long)
    # Each token that is not a document's first, nor cut or left out, is a label exactly once.
    assert np.array_equal(np.sort(labels[own]), np.flatnonzero(kept))
    # The input at its place is the token before it, of its own document ...
    assert np.array_equal(tokens[own] + 1, labels[own])
    assert np.array_equal(corpus.document[tokens[own]], corpus.document[labels[own]])
    # ... and before that are all others of the document, or of its piece, from the first place of the segment on.
    starts = np.repeat(borders[:-1], np.diff(borders))
    place = np.arange(len(tokens)) - starts
    assert np.array_equal(flat(batches, "position_ids"), place)
    first = tokens[starts[own]]
    assert np.array_equal(tokens[own], first + place[own])
    of_piece = first - corpus.firsts[corpus.document[first]]
    assert not (of_piece % LENGTH).any()
    assert long == "split" or not of_piece.any()
    assert is_padding[starts[own]].sum() == 0
    # The loss mask is that of the label, and its sum is what `inspect` counts without what is cut or left out.
    wanted = np.zeros(len(tokens), dtype=bool)
    wanted[own] = corpus.is_trained[labels[own]]
    mask = flat(batches, "loss_mask")
    assert np.array_equal(mask, wanted.astype(np.float32))
    counts = inspect_pair(corpus.distinct).trained
    is_first = np.zeros(len(kept), dtype=bool)
    is_first[corpus.firsts[:-1][np.diff(corpus.firsts) > 0]] = True
    left_out = int((corpus.is_trained & ~kept & ~is_first).sum())
    assert mask.sum(dtype=np.float64) == counts.tokens - counts.first_tokens - left_out
    assert sum(int(batch["num_trained_tokens"].sum()) for batch in batches) == mask.sum(dtype=np.float64)
    assert left_out > 0 or long == "split"


CASES = [
    (size, *options)
    for size in (FEW, MANY)
    for options in product((None, "thd"), ("split", "cut", "drop"), (None, 700), (1, 2, 16), (None, 3))
]
FAST = [
    (FEW, None, "split", None, 2, None),
    (FEW, "thd", "split", 700, 1, 3),
    (FEW, "thd", "cut", None, 16, None),
    (FEW, None, "drop", 700, 16, 3),
]


@pytest.mark.parametrize(("size", "layout", "long", "window", "multiple", "most"), slow_but(FAST, CASES))
def test_each_trained_token_is_a_label_once_behind_its_own_documents_prefix(
    corpus_of, size, layout, long, window, multiple, most
):
    corpus = corpus_of(size)
    options = {"pack_long": long, "pack_window": window, "pack_multiple": multiple, "pack_most_documents": most}
    check_epoch(corpus, epoch_of(corpus.distinct, layout, **options), layout, long, multiple)


@pytest.mark.parametrize(("size", "layout"), slow_but([(FEW, "thd")], product((FEW, MANY), (None, "thd"))))
@pytest.mark.parametrize("long", ["split", "cut", "drop"])
def test_ends_of_documents_and_padding_in_the_text_change_nothing(corpus_of, size, layout, long):
    corpus = corpus_of(size)
    options = {"pack_long": long, "pack_multiple": 4}
    wanted = epoch_of(corpus.distinct, layout, **options)
    found = epoch_of(corpus.alike, layout, tokenizer=ZeroEnds(2), **options)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert list(one) == list(other)
        own = ~other["padding_mask"].numpy()
        for name in one:
            if name in ("tokens", "labels"):
                assert np.array_equal(one[name].numpy()[own], corpus.alike_tokens[other[name].numpy()[own]])
            else:
                assert torch.equal(one[name], other[name]), name
