"""Files of tokenizers of every kind, trained on the repository's own text and on words of many scripts."""

import json
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support import ROOT

SCRIPTS = [
    "The quick brown fox don't stop: it's 3.14!",
    "Straße naïve élan ÀÉÎ İstanbul",
    "Привет, мир! Ελληνικά",
    "東京 こんにちは 中文。안녕하세요",
    "مرحبا שלום नमस्ते สวัสดี",
    "👩‍👩‍👧 🇩🇪 🙂",
]
TEXTS = [
    *SCRIPTS,
    "",
    " leading and  double  spaces ",
    "lines\n\nof\r\ntext\tand tabs",
    "<s> </s> [CLS] [SEP] [MASK] <|endoftext|> <extra_id_0> ##ing",
    "e\u0301 \ufb01 \u200b \u00a0 x",
    "supercalifragilistic" * 20,
]
"""Texts whose ids are compared for every tokenizer."""

SENTINELS = ["<extra_id_1>", "<extra_id_0>"]

PLUGIN = """
def many():
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks[b"th"], ranks[b"the"] = 256, 257
    names = ["<s>", "<|endoftext|>", "<b>", "<cls>", "<sep>", "<mask>", "<pad>", "<a>"]
    specials = {name: 258 + number for number, name in enumerate(names)}
    return {"name": "many", "pat_str": r" ?\\w+|\\s+|.", "mergeable_ranks": ranks, "special_tokens": specials}

ENCODING_CONSTRUCTORS = {"many": many}
"""
"""A plugin of tiktoken's with the encoding `many`, as the text of a module."""


def training_text() -> list[str]:
    """Lines of the repository's own text, and words of many scripts."""
    readme = ROOT / "README.md"
    return [*readme.read_text(encoding="utf-8").splitlines(), *SCRIPTS * 3]


def write_sentencepiece(path: Path, model_type: str = "unigram", **options: object) -> Path:
    """A model of SentencePiece with padding, a `<cls>` and user-defined symbols; `path` ends in `.model`."""
    chosen = {"pad_id": 3, "control_symbols": ["<cls>"], "user_defined_symbols": ["<mask>", *SENTINELS], **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(training_text()),
        model_prefix=str(path.with_suffix("")),
        model_type=model_type,
        vocab_size=600,
        minloglevel=2,
        **chosen,
    )
    return path


def write_wordpiece(path: Path, *, lower_case: bool) -> Path:
    """A vocabulary of WordPiece, one piece a line."""
    trained = tokenizers.BertWordPieceTokenizer(lowercase=lower_case)
    trained.train_from_iterator(training_text(), vocab_size=900, show_progress=False)
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().get)
    path.write_text("".join(f"{piece}\n" for piece in [*pieces, *SENTINELS]), encoding="utf-8")
    return path


def byte_level_bpe(special: list[str]) -> tokenizers.Tokenizer:
    """A byte-level BPE of the library's."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(training_text(), trainer)
    return library


def write_plain_folder(folder: Path) -> Path:
    """A folder whose `tokenizer.json` alone decides the ids."""
    folder.mkdir()
    byte_level_bpe(["<unk>", "<pad>", "<begin>", "<end>", "<x1>", "<x0>"]).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "TokenizersBackend",
        "bos_token": "<begin>",
        "eos_token": {"__type": "AddedToken", "content": "<end>", "special": True},
        "pad_token": "<pad>",
        "extra_special_tokens": ["<x1>", "<x0>"],
        "model_max_length": 1000,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_contradicting_folder(folder: Path) -> Path:
    """A folder whose configuration has transformers make other ids than `tokenizer.json` says."""
    folder.mkdir()
    write_wordpiece(folder / "vocab.txt", lower_case=True)
    library = tokenizers.Tokenizer(models.WordPiece.from_file(str(folder / "vocab.txt"), unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=False)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"])
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True, "additional_special_tokens": SENTINELS})
    )
    return folder


def write_byt5_folder(folder: Path) -> Path:
    """A folder of a tokenizer that transformers has in Python only."""
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer", "extra_ids": 4}))
    return folder


def write_llama_folder(folder: Path) -> Path:
    """A folder with nothing but a model of SentencePiece, which transformers converts."""
    folder.mkdir()
    write_sentencepiece(folder / "tokenizer.model", "bpe", byte_fallback=True, control_symbols=[])
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    )
    return folder
