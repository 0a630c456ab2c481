import os
import pickle
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.files import punkt_model
from trackbed.errors import ArgumentError
from trackbed.preprocess import open_splitter

MARKS = ". ! ? ... … 。 \uff01 ؟ । \u06d4 ። ။ ។ \" ' “ ” « » 「 」 ( ) [ ]"
WORDS = "a B Mr. e.g. U.S. 3.14 1. http://a.b/c?d é e\u0301 ß İ 🙂 東京 ไทย ب א"
NARROW = [" ", "  ", "\n", "\n\n", "\r\n", "\t", "\x0b", "\x1c"]
WIDE = ["\x85", "\xa0", "\u1680", "\u2003", "\u2028", "\u202f", "\u3000"]
PIECES = st.sampled_from([*MARKS.split(" "), *WORDS.split(" "), *NARROW, *WIDE, "\x00", "\ufeff", "\u200b"])
TEXTS = st.lists(PIECES | st.text(max_size=4), max_size=60).map("".join)


@pytest.fixture(scope="session")
def parameters():
    return punkt_model.train()


@pytest.fixture(scope="session")
def model(parameters, tmp_path_factory):
    return punkt_model.write(parameters, tmp_path_factory.mktemp("punkt") / "english")


def gaps(text, sentences):
    """Returns what lies before, between and behind the sentences, which must be found in order."""
    found, end = [], 0
    for sentence in sentences:
        start = text.index(sentence, end)
        found.append(text[end:start])
        end = start + len(sentence)
    return [*found, text[end:]]


@pytest.mark.parametrize("language", ["en", "fr", "ru", "ja", "ar", "hi", "th"])
@given(text=TEXTS)
def test_only_white_space_is_left_out(language, text):
    sentences = open_splitter(f"sentencex:{language}").split(text)
    assert not "".join(gaps(text, sentences)).strip()
    assert all(sentence == sentence.strip() != "" for sentence in sentences)


@given(text=TEXTS)
def test_punkt_leaves_out_white_space_only(model, text):
    sentences = open_splitter(f"punkt:{model}").split(text)
    assert not "".join(gaps(text, sentences)).strip()


# Of these the library of version 1.0.32 cuts a character in two, and fails.
@pytest.mark.parametrize("space", ["\x85", "\xa0", "\u2003", "\u2028", "\u3000"])
@pytest.mark.parametrize("language", ["en", "hi", "ja", "kk"])
def test_white_space_of_several_bytes_is_as_good_as_a_space(space, language):
    split = open_splitter(f"sentencex:{language}").split
    text = "\u060c B. Smith left!  A\u3002J. It? :-)"
    assert split(text.replace(" ", space)) == [one.replace(" ", space) for one in split(text)]


def test_sentences_of_a_long_text_are_those_of_its_paragraphs():
    split = open_splitter().split
    paragraphs = [
        f"Dr. No. {number} met Mr. {'X' * (number % 90)}. {'Word ' * (number % 70)}went. It rained!"
        for number in range(500)
    ]
    one_by_one = [sentence for paragraph in paragraphs for sentence in split(paragraph)]
    assert len(one_by_one) > 1000
    assert split("\n\n".join(paragraphs)) == one_by_one
    assert split(" ".join(paragraphs)) == one_by_one


@pytest.mark.parametrize("spaces", ["\n\n", " ", "\u3000", "\n\n \n\n"])
def test_long_white_space_is_left_out(spaces):
    text = f"{spaces * 6000}It went.{spaces * 6000}He left.{spaces * 6000}"
    assert open_splitter().split(text) == ["It went.", "He left."]


@pytest.mark.parametrize("length", [7000, 9000, 20_000])
def test_paragraphs_behind_a_long_sentence_are_found(length):
    long = "word " * (length // 5)
    paragraphs = [f"{long}end.", "a", "b", "New one.", "<xml/>"]
    for number in range(40):  # the library of version 1.0.32 drops some line ends of texts of 8 KiB and more
        text = "\n\n".join(["x" * number + "y", *paragraphs * 3])
        assert not "".join(gaps(text, open_splitter().split(text))).strip()


def test_a_sentence_may_be_longer_than_the_window():
    long = "word " * 10_000 + "end."
    assert open_splitter().split(f"Short. {long} Short. {long}") == ["Short.", long, "Short.", long]


@pytest.mark.parametrize(
    "piece",
    ["\u300c\u306f\u3044\u3002\u3044\u3044\u3048\u300d\u3002\u8a00\u8449\u3002", "\u201cYes. No. Word. ", "\xaba. "],
)
def test_quotation_marks_in_a_long_paragraph_take_no_quadratic_time(piece):
    split = open_splitter().split
    split(piece)  # compiles the expressions of the library
    start = time.process_time()
    sentences = split(piece * 15_000)  # the library alone takes 20 s for the first
    assert time.process_time() - start < 5
    assert len(sentences) > 10_000


@pytest.mark.parametrize("name", ["sentencex", "sentencex:de", "punkt"])
def test_a_splitter_can_be_sent_to_a_worker(name, model):
    opened = open_splitter(f"punkt:{model}" if name == "punkt" else name)
    again = pickle.loads(pickle.dumps(opened))
    assert again.fingerprint == opened.fingerprint
    assert again.split("Dr. Smith left. However it rained.") == ["Dr. Smith left.", "However it rained."]


def test_the_fingerprint_knows_library_language_and_model(model, parameters, tmp_path):
    other = punkt_model.write(parameters, tmp_path / "other")
    same = open_splitter(f"punkt:{other}").fingerprint
    (other / "abbrev_types.txt").write_text("dr")
    names = ["sentencex", "sentencex:fr", f"punkt:{model}", f"punkt:{other}"]
    found = [open_splitter(name).fingerprint for name in names]
    assert same == found[2]
    assert len(set(found)) == 4
    assert found[1].startswith("sentencex 1.")
    assert found[1].endswith(" fr")


def test_languages_have_rules_of_their_own():
    text = "Le roi M. Dupont parle. Fin."
    assert open_splitter("sentencex:fr").split(text) != open_splitter("sentencex:en").split(text)


@pytest.mark.parametrize(
    "text", ["", "  \n ", "  Dr. Smith left. \n\nHe (Mr. Brown.) stayed!  However vol. 3 went.\n ", "x. Y"]
)
def test_punkts_sentences_are_those_of_nltk(model, parameters, text):
    assert open_splitter(f"punkt:{model}").split(text) == punkt_model.tokenizer(parameters).tokenize(text)


def test_the_model_counts(model, tmp_path, parameters):
    other = punkt_model.write(parameters, tmp_path / "other")
    for name in ("abbrev_types.txt", "collocations.tab"):
        (other / name).write_text("")
    text = "Today Dr. Smith left."
    assert open_splitter(f"punkt:{model}").split(text) == [text]
    assert open_splitter(f"punkt:{other}").split(text) == ["Today Dr.", "Smith left."]


@pytest.mark.parametrize("name", ["", "sentencex:", "punkt", "punkt:", "nltk", "Sentencex", "blingfire:x"])
def test_other_names_are_refused(name):
    with pytest.raises(ArgumentError, match="a splitter must be sentencex, sentencex:LANGUAGE or punkt:FOLDER, found"):
        open_splitter(name)


@pytest.mark.parametrize("language", ["e", "english", "en_", "../en"])
def test_what_is_no_code_of_a_language_is_refused(language):
    with pytest.raises(ArgumentError, match="the language must be a code such as en or pt-br, found"):
        open_splitter(f"sentencex:{language}")


@pytest.mark.parametrize(("name", "library"), [("sentencex", "sentencex"), ("punkt", "nltk")])
def test_a_missing_library_is_an_error_that_says_what_to_install(monkeypatch, model, name, library):
    monkeypatch.setitem(sys.modules, library, None)
    how = r"must be installed to use this \(pip install '\.\[sentences\]' in Trackbed's clone\)"
    with pytest.raises(ArgumentError, match=f"--splitter {name}: the library {library} {how}"):
        open_splitter(name if name == "sentencex" else f"punkt:{model}")


class Program:
    """An object whose pickle makes a folder when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("loaded",)


def test_a_pickle_is_refused_and_not_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "english.pickle"
    path.write_bytes(pickle.dumps(Program()))
    with pytest.raises(
        ArgumentError, match=r"english\.pickle: a Punkt model must be a folder with .*a pickle is not loaded"
    ):
        open_splitter(f"punkt:{path}")
    assert not (tmp_path / "loaded").exists()


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("abbrev_types.txt", None, r"must be a folder with collocations\.tab, .*, found no abbrev_types\.txt"),
        ("abbrev_types.txt", b"a\xff", r"abbrev_types\.txt: .* must be UTF-8"),
        ("collocations.tab", b"a\tb\nc", r"collocations\.tab:2: a line must have two values .*, found 'c'"),
        ("ortho_context.tab", b"a\t1\nb\tx", r"ortho_context\.tab:2: flags must be a number, found 'x'"),
        ("ortho_context.tab", b"a\t1\t2", r"ortho_context\.tab:1: a line must have two values"),
    ],
)
def test_a_damaged_model_is_an_error_that_names_file_and_line(parameters, tmp_path, name, content, found):
    folder = punkt_model.write(parameters, tmp_path / "model")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ArgumentError, match=found):
        open_splitter(f"punkt:{folder}")
