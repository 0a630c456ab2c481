"""A WordPiece tokenizer of a generated vocabulary, as both libraries take it: only ids matter."""

from collections import OrderedDict

import numpy as np

SPECIAL = ("cls", "sep", "mask", "bos", "eos", "eod")


class WordPieceTokenizer:
    """Ids below `size` are words and their later pieces, in random order; special ones follow.

    Args:
        seed: seed of the vocabulary.
        size: number of ids that text has.
        continues: share of ids that continue a word.
        pad: the padding id; None for a tokenizer without one.
        sentinels: number of ids that stand for spans.
    """

    def __init__(self, *, seed, size, continues, pad, sentinels):
        rng = np.random.default_rng(seed)
        ids = rng.permutation(size).tolist()
        self.inv_vocab = {token: f"##{token}" if rng.random() < continues else f"w{token}" for token in ids}
        for number, name in enumerate(SPECIAL):
            setattr(self, name, size + number)
            self.inv_vocab[size + number] = f"[{name}]"
        first = size + len(SPECIAL)
        self.additional_special_tokens_ids = list(range(first, first + sentinels))
        self.inv_vocab.update((token, f"<{token}>") for token in self.additional_special_tokens_ids)
        self.vocab_size = len(self.inv_vocab)
        if pad is not None:
            self.pad = pad
        named = {"seed": seed, "size": size, "continues": continues, "pad": pad, "sentinels": sentinels}
        self.unique_identifiers = OrderedDict([("class", "WordPieceTokenizer"), *named.items()])
