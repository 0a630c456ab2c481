"""fastokens and `tokenizers` write the same bytes for the texts of the standard library."""

import json
import sysconfig
from pathlib import Path

import pytest

from trackbed.datasets.tokenizers.fastokens import FastTokenizer
from trackbed.preprocess import (
    PreprocessConfig,
    TrainingConfig,
    open_fastest_tokenizer,
    open_tokenizer,
    preprocess,
    train_tokenizer,
)
from trackbed.tokens import verify_content

SPECIAL = "<|endoftext|>"


def write_corpus(path, size_bytes):
    """Writes files of the standard library as records; every third one contains a special token as text."""
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for number, source in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.[ptr][yxs]*"))):
            try:
                text = source.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if number % 3 == 0:
                middle = len(text) // 2
                text = f"{text[:middle]}{SPECIAL}{text[middle:]} {SPECIAL}"
            file.write(json.dumps({"text": text}) + "\n")
            written += len(text)
            if written >= size_bytes:
                return


@pytest.mark.parametrize("size_bytes", [300_000, pytest.param(30_000_000, marks=pytest.mark.slow)])
def test_both_libraries_make_the_same_pair_of_real_texts(tmp_path, size_bytes):
    corpus = tmp_path / "corpus.jsonl"
    write_corpus(corpus, size_bytes)
    config = TrainingConfig(inputs=(corpus,), vocab_size=2000 if size_bytes < 1_000_000 else 32_000)
    tokenizer = str(train_tokenizer(config, tmp_path / "tokenizer.json").path)
    for special_tokens in (False, True):
        made = []
        for name, opens in (("slow", open_tokenizer), ("fast", open_fastest_tokenizer)):
            opened = opens(tokenizer, special_tokens=special_tokens)
            assert isinstance(opened, FastTokenizer) is (name == "fast")
            config = PreprocessConfig(inputs=(corpus,), output=str(tmp_path / name), append_eod=True, workers=2)
            report = preprocess(config, opened)
            verify_content(report.outputs[0].prefix)
            made.append([Path(f"{report.outputs[0].prefix}{end}").read_bytes() for end in (".bin", ".idx")])
        assert made[0] == made[1]
