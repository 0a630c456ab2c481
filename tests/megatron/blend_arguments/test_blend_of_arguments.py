"""Blend files of the arguments of Megatron-LM jobs."""

import argparse
import base64
import contextlib
import importlib
import json
import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest

from tests.support.files.built_pair import build
from tests.support.files.tokenizer_files import write_plain_folder, write_sentencepiece
from tests.support.megatron_core.release import RELEASE
from trackbed.blends import measure_blend, read_blend_file
from trackbed.errors import ArgumentError
from trackbed.index import get_blend_from_list
from trackbed.megatron.blend_arguments.blend_of_arguments import blend_of_megatron_arguments

JOB = "--num-layers 12 --bf16 --seq-length 16 --train-iters 10 --global-batch-size 4 --eval-iters 2 --eval-interval 5"
TOKENIZER = "--tokenizer-type NullTokenizer --vocab-size 255"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        build(tmp_path / name, [[1] * 30] * 50, np.uint16)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(arguments, where="blend.toml", **options):
    """The configuration, and the sizes, that the written blend file gives."""
    text = blend_of_megatron_arguments(arguments, folder=where.rpartition("/")[0] or ".", **options)
    Path(where).write_text(text)
    blend = measure_blend(read_blend_file(where))
    return blend.config(), blend.sizes


@pytest.mark.parametrize("words", ["30 a 70 b", "0.125 c 3e-1 a 1 b", "a"])
def test_one_blend(words):
    size = JOB if " " in words else "--seq-length 16"
    config, sizes = config_of(f"--data-path {words} --split 98,1,1 {size} {TOKENIZER} --data-cache-path cc")
    assert config.blend == get_blend_from_list(words.split())
    assert (config.split, config.sequence_length, config.path_to_cache) == ("98,1,1", 16, "cc")
    # Megatron-LM: (train_iters // eval_interval + 1) * eval_iters * global_batch_size
    assert sizes == ((40, 3 * 2 * 4, 2 * 4) if " " in words else (None, None, None))
    assert config.tokenizer.vocab_size == 256


def test_the_split_of_a_job_without_one_is_that_of_megatron_lm():
    config, _ = config_of(f"--data-path 1 a 1 b {JOB} {TOKENIZER}")
    assert config.split == "969, 30, 1"


def test_a_blend_in_a_file(folder):
    (folder / "data.txt").write_text("30 a\n70 b\n")
    config, _ = config_of(f"--data-args-path data.txt --split 9,1 {JOB} {TOKENIZER}")
    assert config.blend == (["a", "b"], [30.0, 70.0])


def test_a_blend_per_split(folder):
    wanted = [(["a", "b"], [3.0, 7.0]), (["b", "a"], [1.0, 1.0]), (["a"], [5.0])]
    words = "--train-data-path 3 a 7 b --valid-data-path 1 b 1 a --test-data-path 5 a"
    assert config_of(f"{words} {JOB} {TOKENIZER}")[0].blend_per_split == wanted
    per_split = {"train": "3 a 7 b", "valid": ["1", "b", "1", "a"], "test": "5 a"}
    (folder / "split.json").write_text(json.dumps(per_split))
    assert config_of(f"--per-split-data-args-path split.json {JOB} {TOKENIZER}")[0].blend_per_split == wanted


def test_flags_become_options():
    flags = "--reset-position-ids --eod-mask-loss --num-dataset-builder-threads 3 --no-mmap-bin-files --seed 7"
    config, _ = config_of(f"--data-path 1 a 1 b --split 1 {JOB} {TOKENIZER} {flags}")
    assert (config.reset_position_ids, config.reset_attention_mask, config.eod_mask_loss) == (True, False, True)
    assert config.create_attention_mask
    bare = "--no-create-attention-mask-in-dataloader"
    assert not config_of(f"--data-path 1 a 1 b --split 1 {JOB} {TOKENIZER} {bare}")[0].create_attention_mask
    assert (config.num_dataset_builder_threads, config.mmap_bin_files, config.random_seed) == (3, False, 7)


def test_prefixes_are_those_of_the_working_directory_whatever_the_folder_of_the_file(folder):
    (folder / "sub").mkdir()
    config, _ = config_of(f"--data-path 1 a 1 {folder}/b --split 1 {JOB} {TOKENIZER}", "sub/blend.toml")
    assert config.blend[0] == ["a", str(folder / "b")]
    assert '"s3://bucket/a"' in blend_of_megatron_arguments("--data-path s3://bucket/a --split 1", folder="sub")


def test_comments_and_ends_are_those_of_a_shell():
    text = "--data-path a # not b --seed 7\n# --seed 8\n--seq-length 32   # don't --seq-length 64\n"
    found = tomllib.loads(
        blend_of_megatron_arguments(f"{text}--split '9,1' --tokenizer-special-tokens '|' \";\" --seed 9")
    )
    assert (found["sequence_length"], found["seed"], found["split"]) == (32, 9, "9,1")
    assert [one["path"] for one in found["dataset"]] == ["a"]
    for end in ("; --seed 7", "| tee --seed 7", "> log --seed 7", "&& x --seed 7"):
        assert "seed" not in tomllib.loads(blend_of_megatron_arguments(f"--data-path a {end}"))
    with pytest.raises(ArgumentError, match="must be quoted as in a shell, found: No closing quotation"):
        blend_of_megatron_arguments("--data-path 'a")


@pytest.mark.parametrize("prefix", ["./a", "sub/../b", ".//a"])
def test_a_prefix_that_would_get_another_name_is_refused(prefix, folder):
    """The names of the job's indices depend on its spelling, which a file in the working directory keeps."""
    (folder / "sub").mkdir()
    config, _ = config_of(f"--data-path 1 {prefix} 1 c --split 1 {JOB} {TOKENIZER}")
    assert config.blend[0] == [prefix, "c"]
    with pytest.raises(ArgumentError, match="write the blend file into the working directory of the job"):
        blend_of_megatron_arguments(f"--data-path {prefix}", folder="sub")


def test_a_folder_from_which_a_path_leads_elsewhere_is_refused(folder):
    (folder / "else" / "conf").mkdir(parents=True)
    (folder / "conf").symlink_to("else/conf")
    for arguments in ("--data-path a", f"--data-path {folder}/a --data-cache-path cache"):
        with pytest.raises(ArgumentError, match="must have the same name in a blend file in conf, but has not"):
            blend_of_megatron_arguments(arguments, folder="conf")
    with pytest.raises(ArgumentError, match="write the blend file into the working directory"):
        blend_of_megatron_arguments("--data-path a", folder="..")


@pytest.mark.parametrize("eos", ["<end>", {"content": "<end>", "lstrip": False}])
def test_documents_end_with_the_token_that_the_jobs_tokenizer_ends_texts_with(folder, eos):
    (folder / "model").mkdir()
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    text = blend_of_megatron_arguments("--data-path a --tokenizer-type HuggingFaceTokenizer --tokenizer-model model")
    found = tomllib.loads(text)["tokenizer"]
    assert (found["file"], found["eod_token"]) == ("model", "<end>")


def test_arguments_without_a_key_are_comments():
    flags = "--per-dataset-sequences-path x.json --dataloader-type cyclic --sft --dataloader-fast-cache-load"
    text = blend_of_megatron_arguments(f"--data-path a {flags}")
    assert "fast_cache_load = true" in text
    for name in ("per-dataset-sequences-path", "dataloader-type", "sft"):
        assert f"# --{name} stays a flag of the job: " in text
    assert "dataloader-type" not in blend_of_megatron_arguments("--data-path a --dataloader-type single")


def test_what_the_job_does_not_give_is_a_comment():
    text = blend_of_megatron_arguments("--data-path 1 a 1 a --tokenizer-type GPT2BPETokenizer")
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert [line.split()[1] for line in comments] == [
        *("sequence_length", "cache", "size", "[tokenizer]", "file", "megatron")
    ]
    assert "the job has: GPT2BPETokenizer" in text
    assert 'name = "a 2"' in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--mock-data", "must name files, found --mock-data"),
        ("--seq-length 8", "must have --data-path, or another argument with prefixes, found none"),
        ("--data-path a --data-args-path b", "must not have both --data-path and --data-args-path"),
        ("--data-path a --train-data-path b", "must have one blend, or a blend per split, found both"),
        ("--train-data-path a --split 9,1", "must not have --split with a blend per split"),
        ("--data-path 3 a x b", "in place of weights"),
        ("--data-path 'a", "must be quoted as in a shell, found: No closing quotation"),
        ("--data-path a --seq-length many", "must be a whole number of at least 1, found many"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments, words):
    with pytest.raises(ArgumentError) as caught:
        blend_of_megatron_arguments(arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize("words", ["30 a 70", "a 70 b", "0.5"])
def test_weights_without_prefixes_are_refused(words):
    with pytest.raises(ArgumentError, match="every prefix must follow its weight, or none, found"):
        blend_of_megatron_arguments(f"--data-path {words} {JOB}")


def test_what_is_lost_or_misspelt_is_said():
    words = "--data-path a --split 1 --seq-lenght 16 --fim-data --fim-rate 0.5 --decoder-seq-length 8 --skip-train"
    words += " --rampup-batch-size 1 1 10 --allow-ambiguous-pad-tokens"
    text = blend_of_megatron_arguments(f"{words} --data_cache_path cc --train-iters 10 --global-batch-size 4")
    lines = [line for line in text.splitlines() if line.startswith("# --")]
    assert "\nallow_ambiguous_pad_tokens = true\n" in text
    assert lines == [
        "# --fim-data stays a flag of the job: a blend file has no fill-in-the-middle, and a job with `install()` "
        "needs the flag",
        "# --rampup-batch-size stays a flag of the job: the sizes are those of global_batch_size; "
        "give valid, if the job evaluates at other steps",
        "# --skip-train stays a flag of the job: the sizes are those of a job that trains; give valid and test",
        "# --seq-lenght is not known here; did you mean --seq-length?",
        "# --data_cache_path is not known here; did you mean --data-cache-path?",
    ]


def test_a_tokenizer_of_a_hub_is_said_to_need_a_download(folder):
    job = f"--data-path a --split 1 {JOB} --tokenizer-type HuggingFaceTokenizer --tokenizer-model"
    assert "for a name of a hub, write the folder of a copy here" in blend_of_megatron_arguments(
        f"{job} meta-llama/Llama-3"
    )
    (folder / "tok").mkdir()
    assert "hub" not in blend_of_megatron_arguments(f"{job} tok")


@pytest.mark.parametrize(
    ("words", "same_as"),
    [
        ("--data-path a \\\n --seed 3", "--data-path a --seed 3"),
        ("# the data\n--data-path a  \n# the seed\n--seed 3", "--data-path a --seed 3"),
        ('"--data-path a" "--seed 3"', "--data-path a --seed 3"),
        ("--data-path a --seed 3 2>&1 | tee log.txt", "--data-path a --seed 3"),
        ("--data-path a --seed 3; echo b", "--data-path a '--seed' 3"),
        ("--data-path a --seed=3 > log", "--data-path a --seed 3"),
    ],
)
def test_a_piece_of_a_script_is_read_as_a_shell_would(words, same_as):
    assert blend_of_megatron_arguments(words) == blend_of_megatron_arguments(same_as)


@pytest.mark.parametrize(
    "name", ["c#_text", "a b", 'quo"te', "tab\tbed", "del\x7f", "über", "back\\slash", "new\nline"]
)
def test_a_path_of_any_characters_is_valid_toml(name):
    text = blend_of_megatron_arguments(f"--data-path {shlex.quote(name)} --seed 7")
    table = tomllib.loads(text)
    assert (table["dataset"][0]["path"], table["seed"]) == (name, 7)


def test_a_comment_does_not_leave_its_line():
    text = blend_of_megatron_arguments("--data-path a --tokenizer-type $'X' 'Y' --tokenizer-model 'm\n[[dataset]]'")
    assert len(tomllib.loads(text)["dataset"]) == 1


def test_names_of_datasets_are_never_the_same():
    text = blend_of_megatron_arguments("--data-path x/a y/a 'z/a 2' w/a")
    names = [one.get("name", one["path"].rpartition("/")[2]) for one in tomllib.loads(text)["dataset"]]
    assert names == ["a", "a 2", "a 2 2", "a 3"]


@pytest.mark.parametrize(
    "found", [b'{"train": [1], "valid": [], "test": []}', b'{"train": {}, "valid": "", "test": ""}', b"[]"]
)
def test_a_file_of_something_else_is_refused(folder, found):
    (folder / "data.json").write_bytes(found)
    with pytest.raises(ArgumentError, match=r"data.json: must be JSON with train, valid and test"):
        blend_of_megatron_arguments("--per-split-data-args-path data.json")


def test_bytes_that_are_no_utf_8_are_refused(folder):
    (folder / "data.txt").write_bytes(b"a\xff")
    with pytest.raises(ArgumentError, match=r"data.txt: must be UTF-8"):
        blend_of_megatron_arguments("--data-args-path data.txt")
    with pytest.raises(ArgumentError, match="must be UTF-8, found other bytes"):
        blend_of_megatron_arguments("--data-path a\udcff")


DEFAULTS = {
    "vocab_file": None,
    "merge_file": None,
    "vocab_size": None,
    "tokenizer_special_tokens": None,
    "tokenizer_metadata": None,
    "tiktoken_pattern": None,
    "tiktoken_num_special_tokens": 1000,
    "tokenizer_sentencepiece_legacy": False,
    "tokenizer_hf_use_fast": False,
    "tokenizer_hf_include_special_tokens": False,
    "trust_remote_code": False,
    # Since core_v0.17:
    "metadata_path": None,
    "pad_vocab_size": False,
    "chat_template": None,
    "tokenizer_hf_no_use_fast": False,
    "tokenizer_hf_no_include_special_tokens": False,
    "tokenizer_sentencepiece_ignore_extra_whitespaces": True,
    "null_tokenizer_pad_id": -1,
}
"""Megatron-LM's defaults of the arguments of tokenizers, at core_v0.16.1 and core_v0.19.0."""


def build_tokenizer_of_megatron():
    """The function that makes a job's tokenizer, which lies elsewhere since 0.17."""
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.import_module("megatron.core.tokenizers.utils.build_tokenizer").build_tokenizer
    return pytest.importorskip("megatron.core.tokenizers.text.utils.build_tokenizer").build_tokenizer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "job",
    [
        "--tokenizer-type NullTokenizer --vocab-size 255",
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model spiece.model",
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model spiece.model --tokenizer-sentencepiece-legacy",
        "--tokenizer-type Llama2Tokenizer --tokenizer-model spiece.model",
        "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model spiece.model",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model model",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model model --tokenizer-hf-use-fast --trust-remote-code",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model model --tokenizer-special-tokens '<a>' '<b>'",
    ],
)
def test_the_tokenizer_has_the_identity_of_the_jobs(job, folder):
    build_tokenizer = build_tokenizer_of_megatron()
    write_sentencepiece(folder / "spiece.model")
    write_plain_folder(folder / "model")
    config, _ = config_of(f"--data-path a --split 1 --seq-length 16 {job}", release=RELEASE)
    theirs = build_tokenizer(_tokenizer_arguments(job)).unique_identifiers
    assert list(config.tokenizer.unique_identifiers.items()) == list(theirs.items())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "job",
    [
        "--tokenizer-type GPT2BPETokenizer --vocab-file gpt2/vocab.json --merge-file gpt2/merges.txt",
        "--tokenizer-type TikTokenizer --tokenizer-model ranks.json --vocab-size 1256 --tiktoken-pattern v2",
        "--tokenizer-type TikTokenizer --tokenizer-model ranks.json --vocab-size 300 --tiktoken-pattern v1"
        " --tiktoken-num-special-tokens 44"
        " --tokenizer-special-tokens '<pad>' '<unk>' '<s>' '</s>' '<mask>' '<cls>' '<sep>'",
    ],
)
def test_a_tokenizer_of_files_that_trackbed_does_not_read_is_stated_by_its_ids(job, folder):
    build_tokenizer = build_tokenizer_of_megatron()
    write_gpt2(folder / "gpt2")  # found before that of the hub
    ranks = [
        {"rank": number, "token_bytes": base64.b64encode(bytes([number])).decode(), "token_str": "?"}
        for number in range(256)
    ]
    (folder / "ranks.json").write_text(json.dumps(ranks))
    ours = config_of(f"--data-path a --split 1 {JOB} {job}", release=RELEASE)[0].tokenizer
    theirs = build_tokenizer(_tokenizer_arguments(job))
    assert list(ours.unique_identifiers.items()) == list(theirs.unique_identifiers.items())
    assert (ours.eod, ours.vocab_size) == (theirs.eod, theirs.vocab_size)
    if "TikTokenizer" in job:
        assert ours.pad == theirs.pad


def test_without_its_vocabulary_gpt2s_tokenizer_is_a_comment():
    text = blend_of_megatron_arguments("--data-path a --tokenizer-type GPT2BPETokenizer --vocab-file none.json")
    assert "tokenizer" not in tomllib.loads(text)
    assert "# megatron = {" in text


def write_gpt2(folder):
    """A tokenizer of GPT-2's kind with 257 ids, of which the last one ends a text."""
    from tokenizers.pre_tokenizers import ByteLevel

    folder.mkdir()
    letters = sorted(ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<|endoftext|>"}))


def _tokenizer_arguments(job):
    """The arguments of a job as `build_tokenizer` takes them."""
    parser = argparse.ArgumentParser()
    for name in ("vocab-size", "tiktoken-num-special-tokens"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--tokenizer-special-tokens", nargs="+")
    for name in ("tokenizer-type", "tokenizer-model", "vocab-file", "merge-file", "tiktoken-pattern"):
        parser.add_argument(f"--{name}")
    for name in ("tokenizer-sentencepiece-legacy", "tokenizer-hf-use-fast", "trust-remote-code"):
        parser.add_argument(f"--{name}", action="store_true")
    given = parser.parse_args(shlex.split(job), argparse.Namespace(**DEFAULTS))
    given.special_tokens = given.tokenizer_special_tokens  # its name since core_v0.17
    return given


@pytest.mark.parametrize("other", ["--legacy-tokenizer", "--tokenizer-metadata metadata.json"])
def test_another_class_of_tokenizer_is_not_guessed(other, folder):
    write_sentencepiece(folder / "spiece.model")
    job = f"--data-path a --tokenizer-type SentencePieceTokenizer --tokenizer-model spiece.model {other}"
    assert tomllib.loads(blend_of_megatron_arguments(job))["tokenizer"] == {"file": "spiece.model"}
