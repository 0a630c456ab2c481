"""Documents of sentences: what `preprocess` writes with a splitter."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.files import punkt_model
from tests.support.tiers import with_files
from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.errors import FormatError
from trackbed.preprocess import PreprocessConfig, open_splitter, preprocess
from trackbed.tokens import IndexedDataset, verify_content

SCRIPTS = [
    "Dr. Smith left at 5 p.m. on Main St. and went home! Did he? “Yes,” she said.\n\nA new one",
    "私は行く。「はい。いいえ」と言う\uff01 本当\uff1f",
    "Он ушёл. «Куда?» \u0422. \u0435. домой… Да!",
    "ذهب الرجل. أين؟ إلى البيت؛ ثم عاد.",
    "यह एक वाक्य है। दूसरा भी॥ क्या?",
    "สวัสดี ครับ. እነልህ። \u1200፡ለ អ។ မ။ 🙂! e\u0301. İi.",
]


@st.composite
def texts(draw):
    """Pieces of sentences in several scripts, with white space of any kind between them."""
    pieces = []
    for _ in range(draw(st.integers(0, 6))):
        script = draw(st.sampled_from(SCRIPTS))
        start = draw(st.integers(0, len(script)))
        pieces.append(script[start : start + draw(st.integers(0, 60))])
        pieces.append(draw(st.sampled_from(["", " ", "\n\n", "\t", "\xa0", "\u3000", "\u2028", "\x85", "\r\n"])))
    return "".join(pieces)


def write_lines(path, *documents):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")


def run(folder, *, splitter="sentencex", **options):
    config = PreprocessConfig(
        inputs=(folder / "a.jsonl",), output=str(folder / "made"), **{"workers": 1, "append_eod": True, **options}
    )
    return preprocess(config, ByteTokenizer(), splitter=open_splitter(splitter))


def documents_of(prefix):
    """The texts of the sentences of each document, read as bytes."""
    dataset = IndexedDataset(str(prefix))
    borders = dataset.document_indices.tolist()
    texts = [ByteTokenizer().detokenize(tokens) for tokens in dataset[:]]
    return [texts[start:stop] for start, stop in itertools.pairwise(borders)]


def test_each_sentence_is_a_sequence_of_its_document(tmp_path):
    write_lines(tmp_path / "a.jsonl", "Mr. Smith left.  It rained!", "One.", "A B\n\nC went. Did it?")
    report = run(tmp_path)
    assert documents_of(tmp_path / "made_text_sentence") == [
        ["Mr. Smith left.", "It rained!<eod>"],
        ["One.<eod>"],
        ["A B", "C went.", "Did it?<eod>"],
    ]
    (output,) = report.outputs
    assert output.prefix == str(tmp_path / "made_text_sentence")
    assert (output.documents, output.sequences, output.dropped) == (3, 6, 0)
    assert verify_content(output.prefix).tokens == output.tokens


@with_files
@given(documents=st.lists(texts(), min_size=1, max_size=5), language=st.sampled_from(["en", "ja", "ru", "hi"]))
def test_sentences_join_to_their_text_but_for_white_space_between_them(tmp_path, documents, language):
    write_lines(tmp_path / "a.jsonl", *documents)
    run(tmp_path, splitter=f"sentencex:{language}", append_eod=False, allow_empty=True)
    found = documents_of(tmp_path / "made_text_sentence")
    wanted = [text for text in documents if text.strip()]
    assert len(found) == len(wanted)
    for sentences, text in zip(found, wanted, strict=True):
        end = 0
        for sentence in sentences:
            start = text.index(sentence, end)
            assert not text[end:start].strip()
            end = start + len(sentence)
        assert not text[end:].strip()


class WithoutVowels(ByteTokenizer):
    """Gives texts of vowels no tokens."""

    fingerprint = "without vowels"

    def tokenize_batch(self, texts):
        return [[number for number in text.encode() if chr(number) not in "aeiou. "] for text in texts]


class AtStops:
    """Splits at every full stop."""

    def split(self, text):
        if "refused" in text:
            raise RuntimeError("refused")
        return [f"{part}." for part in text.split(".")[:-1]]


@pytest.mark.parametrize("append_eod", [False, True])
def test_sentences_without_tokens_are_dropped_and_the_end_token_joins_the_last_of_the_others(tmp_path, append_eod):
    write_lines(tmp_path / "a.jsonl", "ab.e.cd.ou.", "a.e.", "", "no stop", "i.xyz.")
    config = PreprocessConfig(
        inputs=(tmp_path / "a.jsonl",), output=str(tmp_path / "made"), workers=1, append_eod=append_eod
    )
    report = preprocess(config, WithoutVowels(), splitter=AtStops())
    end = "<eod>" if append_eod else ""
    assert documents_of(tmp_path / "made_text_sentence") == [["b", f"cd{end}"], [f"xyz{end}"]]
    assert (report.outputs[0].documents, report.outputs[0].sequences, report.outputs[0].dropped) == (2, 3, 3)


def test_a_text_that_the_splitter_refuses_is_a_bad_record_and_its_neighbours_are_not(tmp_path):
    write_lines(tmp_path / "a.jsonl", "bc.", "refused.", "d.f.")
    config = PreprocessConfig(inputs=(tmp_path / "a.jsonl",), output=str(tmp_path / "made"), workers=1)
    with pytest.raises(FormatError, match=r"a\.jsonl:2: the splitter must accept the text, found an error: refused"):
        preprocess(config, ByteTokenizer(), splitter=AtStops())
    skipping = PreprocessConfig(inputs=(tmp_path / "a.jsonl",), output=str(tmp_path / "made"), workers=1, skip_bad=True)
    assert preprocess(skipping, ByteTokenizer(), splitter=AtStops()).bad == 1
    assert documents_of(tmp_path / "made_text_sentence") == [["bc."], ["d.", "f."]]


@pytest.mark.parametrize("splitter", ["sentencex", "punkt"])
def test_the_bytes_are_the_same_for_any_number_of_workers(tmp_path, splitter):
    if splitter == "punkt":
        splitter = f"punkt:{punkt_model.write(punkt_model.train(), tmp_path / 'model')}"
    write_lines(tmp_path / "a.jsonl", *(punkt_model.made_up_text(seed, seed % 20) for seed in range(60)))
    files = []
    for workers, chunk_bytes in ((1, 1 << 20), (2, 3000), (3, 9000)):
        run(tmp_path, splitter=splitter, workers=workers, chunk_bytes=chunk_bytes)
        files.append([(tmp_path / f"made_text_sentence.{end}").read_bytes() for end in ("bin", "idx", "trackbed.json")])
    assert files[0] == files[1] == files[2]
    assert len(documents_of(tmp_path / "made_text_sentence")) == 57


def test_a_pair_of_sentences_does_not_replace_one_of_documents(tmp_path):
    write_lines(tmp_path / "a.jsonl", "One. Two.")
    config = PreprocessConfig(inputs=(tmp_path / "a.jsonl",), output=str(tmp_path / "made"), workers=1)
    preprocess(config, ByteTokenizer())
    run(tmp_path)
    names = {path.name.split(".")[0] for path in tmp_path.iterdir()}
    assert names == {"a", "made_text_document", "made_text_sentence"}


def test_the_tokens_are_those_of_whole_documents_but_for_white_space(tmp_path):
    write_lines(tmp_path / "a.jsonl", *(punkt_model.made_up_text(seed, 40) for seed in range(50)))
    run(tmp_path)
    sentences = np.fromfile(tmp_path / "made_text_sentence.bin", dtype=np.uint16)
    preprocess(
        PreprocessConfig(inputs=(tmp_path / "a.jsonl",), output=str(tmp_path / "made"), workers=1, append_eod=True),
        ByteTokenizer(),
    )
    documents = np.fromfile(tmp_path / "made_text_document.bin", dtype=np.uint16)
    spaces = [ord(" "), ord("\n")]
    assert np.array_equal(sentences[~np.isin(sentences, spaces)], documents[~np.isin(documents, spaces)])
