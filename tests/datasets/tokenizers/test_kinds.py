"""Tokenizers of every kind, opened by name: ids of their libraries, special tokens, offsets, and copies."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
import tokenizers

from tests.support.files.tokenizer_files import (
    PLUGIN,
    TEXTS,
    write_byt5_folder,
    write_contradicting_folder,
    write_llama_folder,
    write_plain_folder,
    write_sentencepiece,
    write_wordpiece,
)
from trackbed.datasets import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    MegatronIdentity,
    NullTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    TransformersTokenizer,
    WordPieceTokenizer,
    open_tokenizer,
)
from trackbed.errors import ArgumentError
from trackbed.preprocess import FlatTokenizer, open_fastest_tokenizer

ROLES = ("bos", "eos", "pad", "cls", "sep", "mask")
OPTIONS = {"lower": {"lower_case": True}, "json": {"pad_token": "<pad>"}}
CLASSES = {
    "json": HuggingFaceTokenizer,
    "plain": HuggingFaceTokenizer,
    "contradicting": HuggingFaceTokenizer,
    "llama": HuggingFaceTokenizer,
    "byt5": TransformersTokenizer,
    "cased": WordPieceTokenizer,
    "lower": WordPieceTokenizer,
    "unigram": SentencePieceTokenizer,
    "bpe": SentencePieceTokenizer,
    "tiktoken": TiktokenTokenizer,
    "bytes": ByteTokenizer,
    "null": NullTokenizer,
}
KINDS = sorted(CLASSES)
FOLDERS = ["plain", "contradicting", "llama", "byt5"]


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Name of a tokenizer of each kind."""
    folder = tmp_path_factory.mktemp("kinds")
    namespace = {}
    exec(PLUGIN, namespace)
    made = {
        "plain": write_plain_folder(folder / "plain"),
        "contradicting": write_contradicting_folder(folder / "contradicting"),
        "llama": write_llama_folder(folder / "llama"),
        "byt5": write_byt5_folder(folder / "byt5"),
        "cased": write_wordpiece(folder / "cased-vocab.txt", lower_case=False),
        "lower": write_wordpiece(folder / "vocab.txt", lower_case=True),
        "unigram": write_sentencepiece(folder / "unigram.model"),
        "bpe": write_sentencepiece(folder / "bpe.model", "bpe", byte_fallback=True),
    }
    json_file = folder / "own.json"
    tokenizers.Tokenizer.from_file(str(made["plain"] / "tokenizer.json")).save(str(json_file))
    library = tokenizers.Tokenizer.from_file(str(json_file))
    library.add_special_tokens(["<s>", "</s>", "[CLS]", "[SEP]", "[MASK]"])
    library.save(str(json_file))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiktoken.registry.ENCODINGS, "many", tiktoken.Encoding(**namespace["many"]()))
        yield {
            **{kind: str(path) for kind, path in made.items()},
            "json": str(json_file),
            "tiktoken": "tiktoken:many",
            "bytes": "bytes",
            "null": "null:1000",
        }


@pytest.fixture(scope="module")
def opened(names):
    return {kind: open_tokenizer(names[kind], **OPTIONS.get(kind, {})) for kind in KINDS}


def texts_for(kind):
    return ["5 7", " 1000\n0 ", ""] if kind == "null" else TEXTS


def library_ids(kind, name):
    """Function from a text to the ids of its library."""
    if kind in FOLDERS:
        import transformers

        found = transformers.AutoTokenizer.from_pretrained(name)
        return lambda text: found(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    if kind in ("cased", "lower"):
        bert = tokenizers.BertWordPieceTokenizer.from_file(name, lowercase=kind == "lower")
        bert._tokenizer.encode_special_tokens = True
        return lambda text: bert.encode(text, add_special_tokens=False).ids
    if kind in ("unigram", "bpe"):
        return sentencepiece.SentencePieceProcessor(model_file=name).encode
    if kind == "json":
        file = tokenizers.Tokenizer.from_file(name)
        file.encode_special_tokens = True
        return lambda text: file.encode(text, add_special_tokens=False).ids
    return {
        "tiktoken": tiktoken.get_encoding("many").encode_ordinary,
        "bytes": lambda text: list(text.encode()),
        "null": lambda text: [int(word) for word in text.split()],
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_are_those_of_the_library(kind, names, opened):
    tokenizer, library = opened[kind], library_ids(kind, names[kind])
    assert type(tokenizer) is CLASSES[kind]
    wanted = [library(text) for text in texts_for(kind)]
    assert any(wanted)
    assert [tokenizer.tokenize(text).tolist() for text in texts_for(kind)] == wanted
    assert [list(ids) for ids in tokenizer.tokenize_batch(texts_for(kind))] == wanted
    assert tokenizer.vocab_size > max(index for ids in wanted for index in ids)


@pytest.mark.parametrize("kind", KINDS)
def test_the_vocabulary_is_built_once_and_is_its_own_inverse(kind, opened):
    tokenizer = opened[kind]
    assert tokenizer.inv_vocab is tokenizer.inv_vocab
    assert tokenizer.vocab is tokenizer.vocab
    assert max(tokenizer.inv_vocab) + 1 == tokenizer.vocab_size
    assert all(tokenizer.inv_vocab[index] == token for token, index in tokenizer.vocab.items())


@pytest.mark.parametrize(
    ("kind", "token"),
    [("cased", "[UNK]"), ("lower", "[UNK]"), ("unigram", "<unk>"), ("bpe", "<unk>"), ("byt5", "<unk>")],
)
def test_the_unknown_token_is_that_of_the_library(kind, token, opened):
    assert opened[kind].unknown_id == opened[kind].vocab[token]


@pytest.mark.parametrize("kind", ["json", "tiktoken", "bytes", "null"])
def test_tokenizers_that_cover_all_text_have_no_unknown_token(kind, opened):
    assert opened[kind].unknown_id is None


def test_the_unknown_token_of_a_unigram_model_of_hugging_face_is_read_from_its_file(tmp_path):
    model = tokenizers.models.Unigram([("a", -1.0), ("<unk>", -2.0), ("</s>", -3.0)], 1)
    tokenizers.Tokenizer(model).save(str(tmp_path / "t.json"))
    assert open_tokenizer(tmp_path / "t.json").unknown_id == 1


def test_pieces_inside_a_word_are_known_by_their_mark(opened):
    tokenizer = opened["cased"]
    pieces = [tokenizer.inv_vocab[index] for index in tokenizer.tokenize("supercalifragilistic fox").tolist()]
    assert any(piece.startswith("##") for piece in pieces)
    assert "".join(piece.removeprefix("##") for piece in pieces) == "supercalifragilisticfox"


@pytest.mark.parametrize(
    ("kind", "roles", "additional"),
    [
        ("json", {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
         ["<begin>", "<end>", "<x1>", "<x0>"]),
        ("plain", {"bos": "<begin>", "eos": "<end>", "pad": "<pad>"}, ["<x1>", "<x0>"]),
        ("contradicting", {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
         ["<extra_id_1>", "<extra_id_0>"]),
        ("byt5", {"eos": "</s>", "pad": "<pad>"}, [f"<extra_id_{n}>" for n in range(4)]),
        ("cased", {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}, ["<extra_id_1>", "<extra_id_0>"]),
        ("unigram", {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "cls": "<cls>", "mask": "<mask>"},
         ["<mask>", "<extra_id_1>", "<extra_id_0>"]),
        ("tiktoken", {"bos": "<s>", "eos": "<|endoftext|>", "cls": "<cls>", "sep": "<sep>", "mask": "<mask>"},
         ["<b>", "<a>"]),
        ("bytes", {}, None),
        ("null", {}, None),
    ],
)  # fmt: skip
def test_special_tokens_are_those_that_the_file_has(kind, roles, additional, opened):
    tokenizer = opened[kind]
    for role in ROLES:
        if role in roles:
            assert getattr(tokenizer, role) == tokenizer.vocab[roles[role]]
        else:
            with pytest.raises(NotImplementedError, match=f"{type(tokenizer).__name__} has no '{role}'"):
                getattr(tokenizer, role)
    if additional is None:
        with pytest.raises(NotImplementedError, match="has no 'additional_special_tokens_ids'"):
            _ = tokenizer.additional_special_tokens_ids
    else:
        assert tokenizer.additional_special_tokens_ids == [tokenizer.vocab[token] for token in additional]


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_has_the_special_tokens_that_transformers_finds(kind, names, opened):
    import transformers

    found = transformers.AutoTokenizer.from_pretrained(names[kind])
    for role in ROLES:
        wanted = getattr(found, f"{role}_token_id")
        if wanted is not None:
            assert getattr(opened[kind], role) == wanted
    with_a_role = {getattr(found, f"{role}_token_id") for role in (*ROLES, "unk")}
    wanted = [index for index in found.extra_special_tokens_ids if index not in with_a_role]
    assert opened[kind].additional_special_tokens_ids == wanted
    assert opened[kind].vocab == found.get_vocab()


@pytest.mark.parametrize(
    ("kind", "end"),
    [("json", "</s>"), ("plain", "<end>"), ("contradicting", "[SEP]"), ("lower", "[SEP]"), ("llama", "</s>"),
     ("tiktoken", "<|endoftext|>"), ("unigram", "</s>"), ("bytes", "<eod>"), ("null", "1000")],
)  # fmt: skip
def test_a_document_ends_with_the_usual_token_or_the_one_that_the_file_states(kind, end, opened):
    assert opened[kind].inv_vocab[opened[kind].eod] == end


def test_a_usual_end_of_a_document_comes_before_the_end_of_a_text(tmp_path):
    folder = write_plain_folder(tmp_path / "both")
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(folder / "tokenizer.json"))
    tokenizer = open_tokenizer(str(folder))
    assert tokenizer.inv_vocab[tokenizer.eod] == "<|endoftext|>"
    assert tokenizer.inv_vocab[tokenizer.eos] == "<end>"


@pytest.mark.parametrize(
    ("kind", "end", "padding"),
    [("json", "<end>", "<x1>"), ("plain", "<x0>", "<unk>"), ("byt5", "<extra_id_0>", "<extra_id_1>"),
     ("cased", "[MASK]", "[CLS]"), ("bpe", "<cls>", "<mask>"), ("tiktoken", "<a>", "<pad>")],
)  # fmt: skip
def test_the_end_of_a_document_and_padding_may_be_named(kind, end, padding, names):
    tokenizer = open_tokenizer(names[kind], eod_token=end, pad_token=padding)
    assert (tokenizer.inv_vocab[tokenizer.eod], tokenizer.inv_vocab[tokenizer.pad]) == (end, padding)
    for option in ("eod_token", "pad_token"):
        with pytest.raises(ArgumentError, match=r"must have .*'<nowhere>'"):
            open_tokenizer(names[kind], **{option: "<nowhere>"})


@pytest.mark.parametrize("kind", ["json", "plain", "contradicting", "byt5", "cased", "tiktoken"])
def test_special_tokens_in_a_text_are_ids_only_if_they_are_asked_for(kind, names, opened):
    tokenizer = open_tokenizer(names[kind], special_tokens=True)
    special = tokenizer.additional_special_tokens_ids[0] if kind != "cased" else tokenizer.sep
    text = f"a{tokenizer.inv_vocab[special]}b"
    assert special in tokenizer.tokenize(text)
    assert special not in opened[kind].tokenize(text)
    assert special in tokenizer.tokenize_batch([text])[0]
    assert tokenizer.fingerprint != opened[kind].fingerprint


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("byt5", "null")])
def test_offsets_are_the_characters_at_which_tokens_begin(kind, opened):
    tokenizer = opened[kind]
    for text in TEXTS:
        ids = tokenizer.tokenize(text).tolist()
        found = tokenizer.offsets(ids, text)
        assert len(found) == len(ids)
        assert found == sorted(found)
        assert all(0 <= start <= len(text) for start in found)
    text = "the fox, naïve"
    ids = tokenizer.tokenize(text).tolist()
    starts = tokenizer.offsets(ids, text)
    assert starts[0] == 0
    # A word begins where a token of its own begins: that of a space, or that of its first letter.
    assert any(start in (8, 9) for start in starts)


def test_offsets_of_a_folder_are_those_that_megatron_core_asks_transformers_for(names, opened):
    import transformers

    for kind in ("plain", "contradicting", "llama"):
        found = transformers.AutoTokenizer.from_pretrained(names[kind])
        for text in TEXTS:
            if any(token in text for token in found.all_special_tokens):
                continue
            encoded = found(text, add_special_tokens=False)
            wanted = [encoded.token_to_chars(at).start for at in range(len(encoded.input_ids))]
            assert opened[kind].offsets(encoded.input_ids, text) == wanted


def test_offsets_of_tiktoken_are_those_of_the_library(opened):
    library = tiktoken.get_encoding("many")
    for text in TEXTS:
        ids = library.encode_ordinary(text)
        assert opened["tiktoken"].offsets(ids, text) == library.decode_with_offsets(ids)[1]


def test_offsets_of_a_model_count_characters_of_the_text_itself(opened):
    tokenizer = opened["unigram"]
    ids = tokenizer.tokenize("  the  fox").tolist()
    starts = dict(
        zip(
            (tokenizer.inv_vocab[index].lstrip("\u2581") for index in ids),
            tokenizer.offsets(ids, "  the  fox"),
            strict=True,
        )
    )
    assert min(starts.values()) == 2
    # Other ids than the tokenizer gives for the text, which decode to it all the same.
    letters = [tokenizer.vocab["\u2581"], *(tokenizer.vocab[letter] for letter in "the")]
    assert letters != tokenizer.tokenize("the").tolist()
    assert tokenizer.offsets(letters, "the") == [0, 0, 1, 2]


@pytest.mark.parametrize("kind", ["json", "cased", "unigram", "null"])
def test_offsets_of_other_ids_are_refused(kind, opened):
    with pytest.raises(ArgumentError, match="offsets needs the ids of the text '7', found others"):
        opened[kind].offsets([1, 2, 1], "7")


def test_offsets_of_numbers_and_bytes(opened):
    assert opened["null"].offsets([5, 17], " 5  17") == [1, 4]
    assert opened["bytes"].offsets([*"aé".encode(), 256, 98], "aé<eod>b") == [0, 1, 1, 2, 7]
    with pytest.raises(NotImplementedError, match="TransformersTokenizer has no 'offsets'"):
        opened["byt5"].offsets([], "")


def test_copies_in_another_process_are_the_same(opened, tmp_path):
    """All kinds in one process, which knows nothing of the encoding, and imports transformers only for the last."""
    for tokenizer in opened.values():
        _ = tokenizer.inv_vocab  # built here, and not sent along
    last = sorted(opened, key=lambda kind: kind == "byt5")
    (tmp_path / "tokenizers.pickle").write_bytes(pickle.dumps({kind: pickle.dumps(opened[kind]) for kind in last}))
    program = """
import json, pickle, sys
texts = json.loads(sys.stdin.read())
found = {}
for kind, raw in pickle.loads(open("tokenizers.pickle", "rb").read()).items():
    if kind == "byt5":
        assert "transformers" not in sys.modules
    one = pickle.loads(raw)
    assert "inv_vocab" not in vars(one)
    ids = [one.tokenize(text).tolist() for text in texts[kind]]
    assert [list(map(int, part)) for part in one.tokenize_batch(texts[kind])] == ids
    identity = list(one.unique_identifiers.items())
    found[kind] = [ids, one.eod, one.vocab_size, one.fingerprint, len(one.inv_vocab), identity]
print(json.dumps(found))
"""
    asked = json.dumps({kind: texts_for(kind) for kind in KINDS})
    command = [sys.executable, "-W", "ignore", "-c", program]
    run = subprocess.run(command, input=asked, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    for kind, (ids, *others) in json.loads(run.stdout).items():
        one = opened[kind]
        assert ids == [one.tokenize(text).tolist() for text in texts_for(kind)]
        identity = json.loads(json.dumps(list(one.unique_identifiers.items())))
        assert others == [one.eod, one.vocab_size, one.fingerprint, len(one.inv_vocab), identity]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_takes_the_identity_of_a_megatron_tokenizer(kind, names):
    identity = MegatronIdentity("package.module.Class", "path", {"legacy": False})
    tokenizer = open_tokenizer(names[kind], megatron_identity=identity)
    assert list(tokenizer.unique_identifiers.items()) == [
        ("class", "package.module.Class"),
        ("tokenizer_path", "path"),
        ("legacy", "False"),
    ]
    assert json.loads(tokenizer.unique_description) == tokenizer.unique_identifiers


def test_the_identity_of_a_vocabulary_tells_whether_text_is_lower_cased(names):
    wanted = {"class": "WordPieceTokenizer", "tokenizer_path": [names["lower"]], "lower_case": "True"}
    assert open_tokenizer(names["lower"], lower_case=True).unique_identifiers == wanted
    fingerprints = {open_tokenizer(names["lower"], lower_case=flag).fingerprint for flag in (False, True)}
    assert len(fingerprints) == 2


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("cased", "lower")])
def test_lower_case_is_for_vocabularies_only(kind, names):
    with pytest.raises(ArgumentError, match=r"must be a WordPiece vocabulary .* with lower_case"):
        open_tokenizer(names[kind], lower_case=True)


@pytest.mark.parametrize("option", [{"eod_token": "x"}, {"pad_token": "x"}, {"special_tokens": True}])
@pytest.mark.parametrize("name", ["bytes", "null:7"])
def test_tokenizers_without_tokens_refuse_their_names(name, option):
    with pytest.raises(
        ArgumentError, match=f"the tokenizer '{name}' must be used without options, .*{next(iter(option))}"
    ):
        open_tokenizer(name, **option)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("null:", "must have a decimal number N of ids, found ''"),
        ("null:1e9", "must have a decimal number N of ids, found '1e9'"),
        ("null:0", r"vocab_size must be in \[1, 2147483647\], found 0"),
        ("null:2147483648", r"vocab_size must be in \[1, 2147483647\], found 2147483648"),
        ("a.txt", "a.txt: a tokenizer file must exist, found none"),
        ("nowhere/", "nowhere: a tokenizer file must exist, found none"),
        ("gpt2", r"gpt2: a tokenizer file must exist, found none \(an encoding of tiktoken is named tiktoken:gpt2\)"),
    ],
)
def test_a_name_of_nothing_is_an_error_that_says_so(name, words):
    with pytest.raises(ArgumentError, match=words):
        open_tokenizer(name)


@pytest.mark.parametrize("text", ["5 -1", "1001", "7.5", "99999999999999999999", "five"])
def test_numbers_that_are_no_ids_are_refused(text, opened):
    with pytest.raises(ArgumentError, match=r"a text must be decimal numbers in \[0, 1000\], found"):
        opened["null"].tokenize(text)


def test_files_that_are_no_vocabulary_are_errors_that_name_them(tmp_path):
    (tmp_path / "short.txt").write_text("[UNK]\n[CLS]\nthe\n")
    with pytest.raises(ArgumentError, match=r"short\.txt: a WordPiece vocabulary must have .*, found no \[SEP\]"):
        open_tokenizer(str(tmp_path / "short.txt"))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ArgumentError, match=r"binary\.txt: must be a WordPiece vocabulary, one piece a line"):
        open_tokenizer(str(tmp_path / "binary.txt"))


def test_a_folder_without_a_tokenizer_or_with_code_is_an_error_that_names_it(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArgumentError, match="empty: must be a folder with a tokenizer that transformers can read: "):
        open_tokenizer(str(tmp_path / "empty"))
    folder = write_plain_folder(tmp_path / "code")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["own.Own", "own.Own"]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "Own"}))
    (folder / "own.py").write_text("raise SystemExit('this must not run')")
    with pytest.raises(
        ArgumentError, match=r"code: must be a folder with a tokenizer that transformers can read: .*code"
    ):
        open_tokenizer(str(folder))


def test_transformers_is_imported_only_where_it_is_needed(names, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for kind in KINDS:
        if kind in ("contradicting", "llama", "byt5"):
            with pytest.raises(ArgumentError, match="the library transformers must be installed to use this"):
                open_tokenizer(names[kind])
        else:
            open_tokenizer(names[kind])


def test_a_folder_whose_library_file_is_contradicted_is_found_out(names):
    folder = names["contradicting"]
    alone = open_tokenizer(f"{folder}/tokenizer.json")
    assert alone.tokenize("The FOX").tolist() != open_tokenizer(folder).tokenize("The FOX").tolist()


def test_a_folder_is_as_fast_as_its_library_file(names, opened):
    fast = open_fastest_tokenizer(names["plain"])
    assert isinstance(fast, FlatTokenizer)
    assert fast.tokenize_batch(TEXTS) == opened["plain"].tokenize_batch(TEXTS)
    assert (fast.eod, fast.pad, fast.unique_identifiers) == (
        opened["plain"].eod,
        opened["plain"].pad,
        opened["plain"].unique_identifiers,
    )
    assert type(open_fastest_tokenizer(names["lower"], lower_case=True)) is WordPieceTokenizer


@pytest.mark.parametrize("name", ["", None, b"bytes", 5, "a\0b", "x" * 5000])
def test_what_cannot_be_a_name_is_refused(name):
    with pytest.raises(ArgumentError, match="must be a"):
        open_tokenizer(name)


def test_a_path_object_is_a_name(names):
    assert open_tokenizer(Path(names["lower"]), lower_case=True).vocab_size > 100


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "tokenizer.model"])
def test_a_pipe_in_a_folder_is_refused_at_once(name, names, tmp_path):
    folder = shutil.copytree(names["plain"], tmp_path / "folder")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    program = f"from trackbed.datasets import open_tokenizer; open_tokenizer({str(folder)!r})"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert f"{name}: a folder of a tokenizer must have regular files, found a pipe" in found.stderr


def test_an_empty_model_and_a_byte_order_mark_are_named(names, tmp_path):
    (tmp_path / "empty.model").write_bytes(b"")
    with pytest.raises(ArgumentError, match=r"empty.model: must be a model of SentencePiece, found an empty file"):
        open_tokenizer(str(tmp_path / "empty.model"))
    vocabulary = Path(names["cased"]).read_text()
    (tmp_path / "vocab.txt").write_text(vocabulary, encoding="utf-8-sig")
    with pytest.raises(ArgumentError, match="must begin with a piece, found a byte order mark"):
        open_tokenizer(str(tmp_path / "vocab.txt"))


def test_ids_that_are_not_there_are_named(opened):
    model = opened["unigram"]
    for use in (model.detokenize, lambda ids: model.offsets(ids, "a")):
        with pytest.raises(ArgumentError, match=rf"ids must be in \[0, {model.vocab_size}\), found 99999"):
            use([99999])
    with pytest.raises(ArgumentError, match="offsets needs the ids of the text"):
        opened["bytes"].offsets([1, 2], "ab")


@pytest.mark.parametrize("kind", KINDS)
def test_the_vocabulary_is_in_the_order_of_ids(kind, opened):
    for one in (opened[kind], pickle.loads(pickle.dumps(opened[kind]))):
        assert list(one.inv_vocab) == sorted(one.inv_vocab)
        assert set(one.vocab.values()) == set(one.inv_vocab)


def test_a_vocabulary_without_capital_letters_asks_for_lower_case(names, tmp_path, caplog):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhouse\n##s\n")
    open_tokenizer(str(tmp_path / "vocab.txt"))
    assert "no piece has a capital letter: lower_case (--lower-case) should be given" in caplog.text
    caplog.clear()
    open_tokenizer(str(tmp_path / "vocab.txt"), lower_case=True)
    open_tokenizer(names["cased"])
    assert not caplog.text
