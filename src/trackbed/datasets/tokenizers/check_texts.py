"""Texts of many kinds, with which two implementations of one tokenizer are compared."""

import random
from collections.abc import Iterator
from typing import Any, Final

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
