"""The token that ends a document: stated roles come before spellings, and only special tokens count."""

import json
import os
import subprocess
import sys

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tests.support.files.tokenizer_files import byte_level_bpe, write_sentencepiece
from trackbed.blends.blend_file import TokenizerEntry
from trackbed.blends.tokenizer import make_tokenizer
from trackbed.datasets import TransformersTokenizer, open_tokenizer
from trackbed.datasets.tokenizers.special_tokens import END_OF_DOCUMENT_TOKENS, end_of_document
from trackbed.errors import ArgumentError
from trackbed.megatron.blend_arguments.blend_of_arguments import blend_of_megatron_arguments
from trackbed.preprocess import open_fastest_tokenizer

ROLES = ("<pad>", "<eos>", "<bos>")


def library_of(*, special=ROLES, ordinary=("<s>", "</s>")):
    library = byte_level_bpe(list(special))
    library.add_tokens([tokenizers.AddedToken(token, special=False) for token in ordinary])
    return library


def folder_of(path, library, **config):
    path.mkdir()
    library.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    return path


GEMMA = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}


def test_a_word_of_html_ends_no_document_where_the_folder_states_the_end(tmp_path):
    found = open_tokenizer(folder_of(tmp_path / "t", library_of(), **GEMMA))
    assert found.inv_vocab[found.eod] == "<eos>"
    assert found.eod == found.eos


def test_the_end_is_the_stated_one_for_the_fastest_library_too(tmp_path):
    found = open_fastest_tokenizer(str(folder_of(tmp_path / "t", library_of(), **GEMMA)))
    assert found.inv_vocab[found.eod] == "<eos>"


def test_the_end_is_the_stated_one_for_the_tokenizer_of_a_blend(tmp_path):
    found = make_tokenizer(TokenizerEntry(file=str(folder_of(tmp_path / "t", library_of(), **GEMMA))))
    assert found.inv_vocab[found.eod] == "<eos>"


@pytest.mark.parametrize("name", ["GemmaTokenizer", "LlamaTokenizer"])
def test_the_end_is_the_stated_one_in_a_folder_that_transformers_reads(tmp_path, name):
    folder = folder_of(tmp_path / "t", library_of(special=(*ROLES, "<unk>")), **GEMMA | {"tokenizer_class": name})
    (folder / "config.json").write_text("{}")
    found = open_tokenizer(folder)
    assert found.inv_vocab[found.eod] == "<eos>"


def test_the_end_that_only_the_older_file_of_special_tokens_states_is_taken(tmp_path):
    folder = folder_of(tmp_path / "t", library_of())
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<eos>"}))
    found = open_tokenizer(folder)
    assert found.inv_vocab[found.eod] == "<eos>"


def test_a_stated_end_comes_before_a_special_token_that_is_spelt_like_the_usual_one(tmp_path):
    library = library_of(special=(*ROLES, "</s>", "<s>"), ordinary=())
    found = open_tokenizer(folder_of(tmp_path / "t", library, **GEMMA))
    assert found.inv_vocab[found.eod] == "<eos>"


def test_a_stated_separator_comes_before_that_spelling_too(tmp_path):
    library = library_of(special=("[SEP]", "[CLS]", "</s>"), ordinary=())
    found = open_tokenizer(folder_of(tmp_path / "t", library, sep_token="[SEP]", cls_token="[CLS]"))
    assert found.inv_vocab[found.eod] == "[SEP]"


def test_a_chat_folder_ends_documents_with_its_special_end_of_text(tmp_path):
    library = library_of(special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    found = open_tokenizer(folder_of(tmp_path / "t", library, eos_token="<|im_end|>", pad_token="<|endoftext|>"))
    assert found.inv_vocab[found.eod] == "<|endoftext|>"


def test_an_end_of_text_that_is_an_ordinary_token_does_not_replace_the_stated_end(tmp_path):
    library = library_of(special=("<|im_end|>",), ordinary=("<|endoftext|>", "<eod>", "<|end_of_text|>"))
    found = open_tokenizer(folder_of(tmp_path / "t", library, eos_token="<|im_end|>"))
    assert found.inv_vocab[found.eod] == "<|im_end|>"


def test_a_stated_end_outside_ascii_is_taken(tmp_path):
    end = "<\uff5cend\u2581of\u2581sentence\uff5c>"
    found = open_tokenizer(folder_of(tmp_path / "t", library_of(special=(end,)), eos_token=end))
    assert found.inv_vocab[found.eod] == end


@pytest.mark.parametrize("more", [(), ("</s>",)])
def test_a_lone_file_whose_special_end_is_eos_ends_documents_with_it(tmp_path, more):
    library_of(special=(*ROLES, *more), ordinary=() if more else ("</s>",)).save(str(tmp_path / "t.json"))
    found = open_tokenizer(tmp_path / "t.json")
    assert found.inv_vocab[found.eod] == "<eos>"


def test_a_lone_file_whose_special_end_is_that_of_llama_2_ends_documents_with_it(tmp_path):
    library_of(special=("<unk>", "<s>", "</s>"), ordinary=()).save(str(tmp_path / "t.json"))
    found = open_tokenizer(tmp_path / "t.json")
    assert found.inv_vocab[found.eod] == "</s>"


def test_a_folder_that_states_no_end_ends_documents_with_a_special_token_of_a_usual_name(tmp_path):
    library = library_of(special=("<unk>", "<s>", "</s>"), ordinary=())
    found = open_tokenizer(folder_of(tmp_path / "t", library, unk_token="<unk>"))
    assert found.inv_vocab[found.eod] == "</s>"


def spelt_by_merges(path, *, end):
    """A file whose merges spell `</s>`, with an end token if `end` names one."""
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={"<": 0, "/": 1, "s": 2, ">": 3, "</": 4, "</s": 5, "</s>": 6, "a": 7},
            merges=[("<", "/"), ("</", "s"), ("</s", ">")],
        )
    )
    if end:
        library.add_special_tokens([end])
    library.save(str(path))
    return path


def test_a_token_that_merges_spell_ends_no_document(tmp_path):
    found = open_tokenizer(spelt_by_merges(tmp_path / "t.json", end="<eos>"))
    assert (found.eod, found.tokenize("</s>").tolist()) == (8, [6])


def test_without_a_special_end_the_error_names_the_ordinary_token_and_the_option(tmp_path):
    found = open_tokenizer(spelt_by_merges(tmp_path / "t.json", end=None))
    with pytest.raises(ArgumentError, match=r"given eod_token \(--eod-token\); '</s>' is an ordinary token here; its"):
        _ = found.eod
    assert open_tokenizer(tmp_path / "t.json", eod_token="</s>").eod == 6


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_blend_file_of_a_job_names_the_end_that_the_folder_states(tmp_path, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / file).write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    job = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model ./t --seq-length 8 --data-path x --train-samples 4"
    found = blend_of_megatron_arguments(job)
    assert 'eod_token = "<|im_end|>"' in found


def test_a_tokenizer_that_only_transformers_runs_takes_the_stated_end(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 0, "eos_token": "<eos>", "added_tokens_decoder": {}}
        )
    )
    found = open_tokenizer(tmp_path)
    assert isinstance(found, TransformersTokenizer)
    assert found.inv_vocab[found.eod] == "<eos>"


def test_a_sentencepiece_model_without_an_end_takes_no_piece_that_it_has_learnt(tmp_path):
    model = write_sentencepiece(
        tmp_path / "a.model", "bpe", eos_id=-1, pad_id=-1, user_defined_symbols=["<eos>", "</s>"]
    )
    found = open_tokenizer(model)
    assert found.inv_vocab[found.eod] == "<eos>"


def test_a_sentencepiece_model_takes_the_end_that_it_states_before_a_symbol_of_html(tmp_path):
    model = write_sentencepiece(
        tmp_path / "a.model", "bpe", eos_piece="<eos>", user_defined_symbols=["</s>", "<s>"], bos_id=-1
    )
    found = open_tokenizer(model)
    assert found.inv_vocab[found.eod] == "<eos>"


def test_an_encoding_of_tiktoken_ends_documents_with_a_special_token_alone(tmp_path, monkeypatch):
    import tiktoken
    from tiktoken import registry

    ranks = {**{bytes([byte]): byte for byte in range(256)}, b"<|endoftext|>": 256}
    found = {"ordinary": {}, "both": {"<|endoftext|>": 257}}
    for name, special in found.items():
        encoding = tiktoken.Encoding(name, pat_str=r".", mergeable_ranks=ranks, special_tokens=special)
        monkeypatch.setitem(registry.ENCODINGS, name, encoding)
    assert open_tokenizer("tiktoken:both").eod == 257
    with pytest.raises(ArgumentError, match=r"'<\|endoftext\|>' is an ordinary token here"):
        _ = open_tokenizer("tiktoken:ordinary").eod


def test_the_command_ends_documents_with_the_token_that_the_folder_states(tmp_path):
    folder_of(tmp_path / "t", library_of(), **GEMMA)
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n')
    command = "from trackbed.cli.main import main; main()"
    words = ["preprocess", "a.jsonl", "--tokenizer", "t", "--output", "a", "--append-eod", "--workers", "1"]
    subprocess.run(
        [sys.executable, "-c", command, *words], cwd=tmp_path, check=True, capture_output=True, env=os.environ
    )
    from trackbed.tokens import IndexedDataset

    assert int(IndexedDataset(str(tmp_path / "a_text_document"))[0][-1]) == 1


@given(
    special=st.dictionaries(st.sampled_from([*END_OF_DOCUMENT_TOKENS, "<x>"]), st.integers(0, 99)),
    stated=st.dictionaries(st.sampled_from(["eos", "sep"]), st.integers(100, 199)),
)
def test_a_stated_role_loses_only_to_a_special_token_that_cannot_be_a_word_of_html(special, stated):
    found = end_of_document(special.get, stated)
    usual = [special[token] for token in END_OF_DOCUMENT_TOKENS[:3] if token in special]
    if stated:
        assert found == (usual[0] if usual else stated.get("eos", stated.get("sep")))
    else:
        assert found == next((special[token] for token in END_OF_DOCUMENT_TOKENS if token in special), None)
