"""What fastokens makes of a file of `tokenizers` is what `tokenizers` makes of it."""

import json
import os
import pickle
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from trackbed.datasets.tokenizers.fastokens import FastTokenizer, UnsuitableError
from trackbed.datasets.tokenizers.huggingface import HuggingFaceTokenizer
from trackbed.datasets.tokenizers.huggingface_folder import check_texts

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<pad>"]
CORPUS = [*check_texts(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))] + [
    "the cat sat on the mat and then the dog"
] * 200


def words(kind):
    if kind == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(Regex(CL100K), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def save(folder, kind, normalizer=None):
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = words(kind)
    library.decoder = decoders.ByteLevel()
    if normalizer is not None:
        library.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    library.add_tokens(["http://"])
    path = folder / f"{kind}.json"
    library.save(str(path))
    return path


@pytest.fixture(scope="module", params=["gpt2", "cl100k"])
def file(request, tmp_path_factory):
    return save(tmp_path_factory.mktemp("fast"), request.param)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "special"])
def both(request, file):
    """The tokenizer and the quick one, of which special tokens in a text are ids or not."""
    slow = HuggingFaceTokenizer(file, special_tokens=request.param)
    return slow, FastTokenizer(slow)


PIECES = st.one_of(
    st.sampled_from(
        [*SPECIAL, "<|endoftext", "|>", "http://", "the", " cat", "\n", "\r\n", "  ", "\t", "'ll", "12345"]
    ),
    st.text(max_size=12),
    st.text(alphabet=" \n\r\t\u00a0\u2028x'", max_size=12),
)


@given(texts=st.lists(st.lists(PIECES, max_size=12).map("".join), max_size=6))
def test_ids_are_equal_text_by_text(both, texts):
    slow, fast = both
    wanted = [list(ids) for ids in slow.tokenize_batch(texts)]
    assert fast.tokenize_batch(texts) == wanted
    ids, offsets = fast.tokenize_flat(texts)
    assert ids.tolist() == [token for document in wanted for token in document]
    assert [stop - start for start, stop in pairwise(offsets)] == [len(one) for one in wanted]


def test_special_tokens_in_a_text_are_ids_only_where_they_are_asked_for(file):
    for special_tokens in (False, True):
        fast = FastTokenizer(HuggingFaceTokenizer(file, special_tokens=special_tokens))
        (ids,) = fast.tokenize_batch(["the<|endoftext|>cat"])
        assert (fast.eod in ids) is special_tokens


def test_all_else_is_as_with_the_other_library(both):
    slow, fast = both
    assert (fast.eod, fast.vocab_size, fast.vocab) == (slow.eod, slow.vocab_size, slow.vocab)
    assert fast.unique_identifiers == slow.unique_identifiers
    assert fast.detokenize(fast.tokenize("the cat 東京")) == "the cat 東京"


def test_a_copy_from_another_process_gives_the_same_ids(both):
    _, fast = both
    texts = ["a <|endoftext|> b", "", "東京 http://x"]
    copy = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(fast))))
    assert copy.tokenize_batch(texts) == fast.tokenize_batch(texts)
    assert [copy.tokenize(text).tolist() for text in texts] == copy.tokenize_batch(texts)
    assert (copy.fingerprint, copy.vocab_size) == (fast.fingerprint, fast.vocab_size)


def test_a_file_that_the_other_library_cannot_read_is_refused(tmp_path):
    path = tmp_path / "words.json"
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.save(str(path))
    with pytest.raises(UnsuitableError, match="fastokens"):
        FastTokenizer(HuggingFaceTokenizer(path))


def test_a_file_of_which_the_other_library_makes_other_ids_is_refused(file, monkeypatch):
    # The same file for both, one token of which has another number for fastokens.
    import fastokens

    read = fastokens.Tokenizer.from_json_str

    def swapped(raw):
        fields = json.loads(raw)
        vocab = fields["model"]["vocab"]
        one, two = list(vocab)[-2:]
        vocab[one], vocab[two] = vocab[two], vocab[one]
        return read(json.dumps(fields))

    class Swapping:
        from_json_str = staticmethod(swapped)

    monkeypatch.setattr(fastokens, "Tokenizer", Swapping)
    with pytest.raises(UnsuitableError, match=r"fastokens finds other ids than tokenizers: in .* at token \d+"):
        FastTokenizer(HuggingFaceTokenizer(file))


def test_normalizers_are_used_or_the_file_is_refused(tmp_path):
    for number, normalizer in enumerate([normalizers.NFC(), normalizers.Lowercase(), normalizers.NFKC()]):
        (tmp_path / str(number)).mkdir()
        path = save(tmp_path / str(number), "gpt2", normalizer)
        try:
            fast = FastTokenizer(HuggingFaceTokenizer(path))
        except UnsuitableError:
            continue
        texts = ["E\u0301COLE \ufb01n", "\uff21\uff22"]
        assert fast.tokenize_batch(texts) == [list(ids) for ids in HuggingFaceTokenizer(path).tokenize_batch(texts)]


def test_a_process_that_tokenises_does_so_on_one_core(file):
    program = """
import sys
from pathlib import Path
from trackbed.datasets import HuggingFaceTokenizer
from trackbed.datasets.tokenizers.fastokens import FastTokenizer
FastTokenizer(HuggingFaceTokenizer(sys.argv[1])).tokenize_batch(["some words " * 1000] * 200)
print(*[path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")])
"""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_THREADS")}
    command = [sys.executable, "-c", program, str(file)]
    threads = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert "python" in threads
    assert "fastokens" not in threads
