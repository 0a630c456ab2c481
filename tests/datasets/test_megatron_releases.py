"""What differs between releases of Megatron Core; `tests/conformance` compares with the release that is installed."""

import pytest

from trackbed.datasets import BERTMaskedWordPieceDatasetConfig, MegatronIdentity, NullTokenizer
from trackbed.datasets.megatron_releases import COMPARED_WITH, check_release, use_release
from trackbed.errors import ArgumentError
from trackbed.megatron.blend_arguments.blend_of_arguments import blend_of_megatron_arguments


@pytest.mark.parametrize("release", ["0.15.3", "", "main", None])
def test_what_is_no_release_is_refused(release):
    with pytest.raises(ArgumentError, match=r"must be a version from 0\.16 on, found"):
        check_release(release)


def test_a_null_tokenizer_has_the_ids_of_its_release():
    old, new = NullTokenizer(100), NullTokenizer(100, release="0.19")
    assert (old.eod, old.vocab_size, new.eod, new.vocab_size) == (100, 101, 99, 100)
    with pytest.raises(ArgumentError, match="found 100"):
        new.tokenize("100")


def test_an_identity_is_made_of_a_release():
    found = MegatronIdentity.of("0.19.2", "folder", {"chat_template": None})
    assert list(found.unique_identifiers().values())[1:] == ["folder", "None"]
    with pytest.raises(ArgumentError):
        MegatronIdentity.of("0.1")


def test_berts_order_follows_the_release_that_is_replaced():
    order = BERTMaskedWordPieceDatasetConfig.__dataclass_fields__["bert_vocabulary_order"].default_factory
    assert order() == "listed"
    try:
        use_release("0.18.0")
        assert order() == "sorted"
    finally:
        use_release(COMPARED_WITH[0])


def tokenizer_of(arguments, release):
    text = blend_of_megatron_arguments(f"--data-path data --seq-length 8 {arguments}", release=release)
    return text[text.index("[tokenizer]") :].splitlines()[1:]


def test_a_jobs_tokenizer_is_written_as_its_release_names_it():
    null = "--tokenizer-type NullTokenizer --vocab-size 100"
    assert tokenizer_of(null, "0.16.1")[0] == 'file = "null:100"'
    assert tokenizer_of(null, "0.19.2")[0] == 'file = "null:99"'
    assert "options = {vocab_size = 100, pad_id = -1}" in tokenizer_of(null, "0.19.2")[1]
    ids = tokenizer_of(f"{null} --null-tokenizer-eod-id 3", "0.19.2")
    assert ids[:2] == ["eod = 3", "vocab_size = 100"]
    assert ids[2].endswith("options = {vocab_size = 100, eod_id = 3, pad_id = -1}}")
    folder = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model folder"
    assert "use_fast = false, trust_remote_code = false, include_special_tokens = false" in str(
        tokenizer_of(folder, "0.16.1")
    )
    for release, begin in (("0.17.1", '{vocab_file = "None"'), ("0.19.2", '{chat_template = "None", vocab_file')):
        found = str(tokenizer_of(folder, release))
        assert f"options = {begin}" in found
        assert "use_fast = true, trust_remote_code = false, include_special_tokens = true" in found
    pieces = str(tokenizer_of("--tokenizer-type Llama2Tokenizer --tokenizer-model m", "0.19.2"))
    assert 'options = {chat_template = "None", ignore_extra_whitespaces = true, legacy = false' in pieces
    kept = "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces"
    pieces = str(tokenizer_of(f"--tokenizer-type Llama2Tokenizer --tokenizer-model m {kept}", "0.19.2"))
    assert "ignore_extra_whitespaces = false" in pieces


def test_a_flag_of_newer_jobs_becomes_an_option():
    text = blend_of_megatron_arguments("--data-path data --dataloader-inter-document-masking", release="0.19")
    assert "inter_document_masking = true" in text
