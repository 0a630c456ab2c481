"""Pairs of sentences against those of Megatron's tool: nltk and Megatron Core's builder in their own process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.files import punkt_model
from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.preprocess import PreprocessConfig, open_splitter, preprocess

PROGRAM = """
import json, sys
import nltk
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

data, lines, prefix, append_eod = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] == "True"
nltk.data.path.insert(0, data)
punkt = nltk.load("nltk:tokenizers/punkt/english.pickle")  # which nltk takes for the folder of the text files
builder = IndexedDatasetBuilder(prefix + ".bin", dtype=DType.optimal_dtype(257))
for line in open(lines, encoding="utf-8"):
    text = json.loads(line)["text"]
    tokens, lengths = [], []
    for first in range(0, len(text), 1_000_000):
        for sentence in punkt.tokenize(text[first : first + 1_000_000]):
            if sentence:
                tokens += sentence.encode()
                lengths.append(len(sentence.encode()))
    if append_eod:
        tokens.append(256)
        lengths[-1] += 1
    builder.add_document(tokens, lengths)
builder.finalize(prefix + ".idx")
"""


@pytest.mark.slow
@pytest.mark.parametrize("append_eod", [True, False])
def test_with_a_punkt_model_the_pair_has_the_bytes_of_megatrons(tmp_path, append_eod):
    model = punkt_model.write(punkt_model.train(), tmp_path / "data" / "tokenizers" / "punkt_tab" / "english")
    texts = [punkt_model.made_up_text(seed, 1 + seed % 40) for seed in range(60)]
    texts += [
        "  Dr. Smith left. \n\nHe (Mr. Brown.) stayed!  However vol. 3 went.\n ",
        "One",
        "Is it? “Yes.” 東京。 A.\xa0B.",
    ]
    texts.append(punkt_model.made_up_text(99, 25_000))
    assert len(texts[-1]) > 1_000_000
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    oracle = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        PROGRAM,
        tmp_path / "data",
        lines,
        tmp_path / "theirs",
        str(append_eod),
    ]
    subprocess.run([*map(str, oracle)], check=True, timeout=300)
    config = PreprocessConfig(inputs=(lines,), output=str(tmp_path / "ours"), append_eod=append_eod, workers=1)
    preprocess(config, ByteTokenizer(), splitter=open_splitter(f"punkt:{model}"))
    for end in ("bin", "idx"):
        theirs = Path(f"{tmp_path}/theirs.{end}").read_bytes()
        assert Path(f"{tmp_path}/ours_text_sentence.{end}").read_bytes() == theirs
