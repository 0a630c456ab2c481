"""Chat templates with marks, of the package trl, and conversations and a tokenizer for tests of them."""

import importlib.metadata
import re
from pathlib import Path

import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>")
MARKED = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}{{ message.content }}<|im_end|>{% endif %}

{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Template in the manner of ChatML, with marks around what the assistant has said and the token that ends it."""


def templates():
    """Returns the files of trl that have marks, by name."""
    files = [Path(file.locate()) for file in importlib.metadata.files("trl") or [] if file.suffix == ".jinja"]
    return {file.stem: file for file in files if re.search(r"\{%-?\s*generation\s*-?%\}", file.read_text("utf-8"))}


def write_tokenizer(path, *, prefix_space=False):
    """Writes a byte-level BPE with special tokens; with `prefix_space`, one that adds a space."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [file.read_text("utf-8") for file in templates().values()]
    library.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=1200, initial_alphabet=alphabet, special_tokens=list(SPECIAL), show_progress=False
        ),
    )
    library.save(str(path))
    return path


WORDS = st.sampled_from(
    ["a", "the cat", " sat", "\n", "\n\n", "  ", "é", "😀", "東京", "{x}", "it's", "<", "12", "\t", "e\u0301"]
)
TEXTS = st.lists(WORDS, max_size=8).map("".join)
"""Texts that begin and end with space at times, and have characters of several tokens."""


def conversations():
    """Conversations of users and assistants in turn, some with a system message."""
    turn = st.tuples(TEXTS, TEXTS)
    return st.tuples(st.none() | TEXTS, st.lists(turn, min_size=1, max_size=4)).map(_messages)


def _messages(drawn):
    system, turns = drawn
    messages = [] if system is None else [{"role": "system", "content": system}]
    for user, assistant in turns:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return messages
