from dataclasses import fields
from pathlib import Path

import pytest
import tiktoken

from tests.support.files.tokenizer_files import PLUGIN, write_plain_folder, write_sentencepiece, write_wordpiece
from trackbed.blends import SizeEntry, StatedTokenizer, parse_count, read_blend_file
from trackbed.blends.read import OPTIONS
from trackbed.blends.tokenizer import make_tokenizer
from trackbed.datasets import (
    ByteTokenizer,
    GPTDatasetConfig,
    HuggingFaceTokenizer,
    MegatronIdentity,
    NullTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    WordPieceTokenizer,
)
from trackbed.errors import ArgumentError, BlendFileError
from trackbed.index import Split

GROUP = "a list of at least one string, or the path of a list of shards (.toml)"
WHOLE = """\
version = 1
sequence_length = 8
split = "9,1"
seed = 5
order = "instant"
cache = "indices"

[size]
train = 100
valid = 10

[[dataset]]
path = "data/web.bin"
weight = 1

[[dataset]]
name = "code"
group = ["/abs/a", "b-*"]
weight = 0.5
max_epochs = 2

[[stage]]
from_token = 81
weights = {code = 1}

[options]
shuffle_block = 4
"""


def read(tmp_path, text):
    path = tmp_path / "blend.toml"
    path.write_text(text)
    return read_blend_file(path)


def problems(tmp_path, text):
    """Returns the problems of a text, without the path."""
    with pytest.raises(BlendFileError) as caught:
        read(tmp_path, text)
    start = f"{tmp_path}/blend.toml:"
    assert all(problem.startswith(start) for problem in caught.value.problems)
    assert str(caught.value).splitlines() == list(caught.value.problems)
    return [problem.removeprefix(start) for problem in caught.value.problems]


def test_all_settings_of_a_file_are_read(tmp_path):
    found = read(tmp_path, WHOLE)
    web, code = found.datasets
    assert (found.seed, found.sequence_length, found.order, found.split) == (5, 8, "instant", "9,1")
    assert found.cache == str(tmp_path / "indices")
    assert found.sizes == SizeEntry(train=100, valid=10)
    assert (web.name, web.kind, web.patterns, web.amount) == ("web", "path", (str(tmp_path / "data/web.bin"),), 1.0)
    assert (code.name, code.kind, code.patterns) == ("code", "group", ("/abs/a", str(tmp_path / "b-*")))
    assert (code.measure, code.amount, code.max_epochs) == ("weight", 0.5, 2)
    assert [(stage.first_sample, stage.weights) for stage in found.stages] == [(11, (("code", 1.0),))]
    assert found.options["shuffle_block"] == 4
    assert found.options["eod_mask_loss"] is False


def test_paths_stay_relative_where_the_files_own_is(tmp_path, monkeypatch):
    (tmp_path / "blend.toml").write_text(WHOLE)
    monkeypatch.chdir(tmp_path)
    assert read_blend_file("blend.toml").datasets[0].patterns == ("data/web.bin",)
    monkeypatch.chdir("/")
    assert read_blend_file(Path("..") / tmp_path / "blend.toml").cache == str(tmp_path / "indices")


def test_a_path_through_the_files_folder_is_named_without_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("conf", "other/place"):
        Path(folder).mkdir(parents=True)
    Path("link").symlink_to("other/place")
    text = WHOLE.replace("data/web.bin", "../data/web")
    for folder, expected in (("conf", "data/web"), ("other/place", "other/data/web"), ("link", "link/../data/web")):
        (Path(folder) / "blend.toml").write_text(text)
        assert read_blend_file(f"{folder}/blend.toml").datasets[0].patterns == (expected,)


@pytest.mark.parametrize("with_mask", [False, True])
def test_a_mask_that_is_reset_and_not_made_is_said(with_mask, tmp_path, caplog):
    mask = "create_attention_mask = true\n" if with_mask else ""
    found = read(tmp_path, f"{WHOLE}reset_attention_mask = true\n{mask}")
    assert found.options["reset_attention_mask"]
    said = "options.reset_attention_mask has no effect without create_attention_mask" in caplog.text
    assert said == (not with_mask)


def job(tmp_path, size):
    """Returns the sizes that a `[size]` table gives."""
    sizes = read(tmp_path, WHOLE.replace("train = 100\nvalid = 10\n", size)).sizes
    return [sizes.of(split) for split in Split]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("train_iters = 100\nglobal_batch_size = 4\neval_interval = 30\neval_iters = 2", [400, 32, 8]),
        ("train_iters = 90\nglobal_batch_size = 4\neval_interval = 30\neval_iters = 2", [360, 32, 8]),
        ("train = 402\nglobal_batch_size = 4\neval_interval = 30\neval_iters = 2", [402, 32, 8]),
        ("train_tokens = '1.6K'\nvalid = 3\ntest = 4", [200, 3, 4]),
        ("train_tokens = 1601\nvalid = 0", [201, 0, None]),
    ],
)
def test_sizes_are_stated_in_samples_in_tokens_or_as_a_megatron_job_does(tmp_path, size, expected):
    assert job(tmp_path, size) == expected


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("version = 1", "version = 2", ["1: version must be one of 1, found 2"]),
        ("version = 1", "", ["1: version must be given: one of 1"]),
        ("seed = 5", "seed = 4294967296", ["4: seed must be a whole number in [0, 2**32), found 4294967296"]),
        ("seed = 5", "sed = 5", ["4: unknown key 'sed'; did you mean 'seed'?"]),
        ("order = ", "order = 1 #", ["5: order must be one of 'megatron', 'balanced', 'instant', 'packed', found 1"]),
        ('"9,1"', '"9,x,1,1"', ["3: split must be up to three numbers that are not all 0, such as '98,1,1', found "]),
        ("weight = 0.5", "weight = true", ["19: dataset.weight must be a finite number of at least 0, found true"]),
        ("weight = 0.5", "weight = nan", ["19: dataset.weight must be a finite number of at least 0, found nan"]),
        ("weight = 0.5", "", ["16: dataset.weight must be given if other datasets of train have a weight, "]),
        ("weight = 0.5", "ratio = 2", ["19: dataset.ratio must be omitted if other datasets of train have weights, "]),
        ("weight = 0.5", "weight = 1\nratio = 2", ["20: dataset.ratio must be omitted with dataset.weight, found"]),
        ("max_epochs = 2", "max_epochs = 0", ["20: dataset.max_epochs must be a finite number above 0, found 0"]),
        (
            "max_epochs = 2",
            "split = '9,1'",
            ["20: unknown key 'dataset.split'; 'split' is a key of the whole file; wri"],
        ),
        ("max_epochs = 2", "max_epoch = 2", ["20: unknown key 'dataset.max_epoch'; did you mean 'dataset.max_ep"]),
        (
            "path =",
            "glob = 'x'\npath =",
            ["13: dataset.glob must be the only one of path, glob and group, found path and"],
        ),
        ("path =", "#", ["12: dataset.path must be the only one of path, glob and group, found none"]),
        ('name = "code"', 'name = "web"', ["12: dataset.name must be unique among", "17: dataset.name must be"]),
        ('["/abs/a", "b-*"]', "[]", [f"18: dataset.group must be {GROUP}, found []"]),
        ("weight = 0.5", "weight = 1\ndivide = 'equally'", ["20: dataset.divide must be combined with the weight of"]),
        ("max_epochs", "splits = ['train']\nmax_epochs", ["20: dataset.splits must be omitted if split divides"]),
        ('split = "9,1"', "", ["1: split must be given, such as '98,1,1', or splits in every dataset, found neith"]),
        ("{code = 1}", "{cod = 1}", ["24: unknown key 'stage.weights.cod'; did you mean 'stage.weights.code'?"]),
        ("{code = 1}", "{code = 0}", ["24: stage.weights must be above 0 for at least one dataset, found 0 for all"]),
        ("from_token = 81", "", ["22: stage.from_sample must be the only one of from_sample, from_token, from_iterat"]),
        ("from_token = 81", "from_iteration = 3", ["23: stage.from_iteration needs size.global_batch_size, found"]),
        (
            "from_token = 81",
            "from_token = 81\nramp_iterations = 3",
            ["24: stage.ramp_iterations needs size.global_batc"],
        ),
        (
            "from_token = 81",
            "from_token = 81\nramp_samples = 3\nramp_tokens = 1",
            ["25: stage.ramp_tokens must be the only one of ramp_samples, ramp_tokens, ramp_iterations, found ramp_s"],
        ),
        ("from_token = 81", "from_token = 81\nramp_samples = -3", ["24: stage.ramp_samples must be a whole number"]),
        ('"instant"', '"megatron"', ["22: stage needs order = 'instant' or 'packed', found 'megatron'"]),
        ("shuffle_block = 4", "shuffle_block = 0", ["27: options.shuffle_block must be a whole number of at least"]),
        ("shuffle_block = 4", "random_seed = 0", ["27: unknown key 'options.random_seed'; known keys: "]),
        ("train = 100", "train_tokens = 'much'", ["9: size.train_tokens must be a whole number of at least 1 and "]),
        (
            "train = 100",
            "",
            ["8: size must give the size of train, whose datasets have weights or epochs: one of train, t"],
        ),
        (
            "valid = 10",
            "",
            ["8: size must give the size of valid, whose datasets have weights or epochs: one of valid, "],
        ),
        ("valid = 10", "train_iters = 1", ["10: size.train_iters must be the only size of training", "10: size.tr"]),
        ("valid = 10", "valid = 1\neval_iters = 1", ["10: size.valid must be omitted if eval_iters gives the"]),
        ("[size]", "[size]]", ["8: must be TOML: Expected newline or end of document after a statement, column 7"]),
        ("shuffle_block = 4", "x = [", ["28: must be TOML: Invalid value"]),
        ("[options]", "[tokenizer]\neod = 7\n[options]", ["26: tokenizer.vocab_size must be given, as eod and voc"]),
        ("[options]", "[tokenizer]\nfile = 'x'\neod = 7\n[options]", ["28: tokenizer.eod must be omitted with token"]),
        (
            "[options]",
            "[tokenizer]\nfile = 'x.json'\nlower_case = true\n[options]",
            ["28: tokenizer.lower_case must be false, as it is for WordPiece vocabularies (.txt), found true"],
        ),
        (
            "[options]",
            "[tokenizer]\neod = 7\nvocab_size = 9\nlower_case = true\n[options]",
            ["29: tokenizer.lower_case must be omitted without tokenizer.file, found it given"],
        ),
        (
            "[options]",
            "[tokenizer]\nfile = 'x.txt'\nlower_case = 1\n[options]",
            ["28: tokenizer.lower_case must be true"],
        ),
        ("[options]", "[tokenizer]\neod = 9\nvocab_size = 9\n[options]", ["27: tokenizer.eod must be below tokeniz"]),
        ("weight = 0.5", "weight = 1" + "0" * 400, ["19: dataset.weight must be a finite number of at least 0, found"]),
        (
            "weight = 0.5",
            f"weight = 0x{'f' * 5000}",
            ["19: dataset.weight must be a finite number of at least 0, foun"],
        ),
        ("train = 100", "train = 1" + "0" * 30, ["9: size.train must be a whole number of at least 0 and below 2**63"]),
        (
            "train = 100",
            "train_tokens = '9999999999T'",
            ["9: size.train_tokens must be a whole number of at least 1 a"],
        ),
        ('"data/web.bin"', '"data/\\u0000"', ["13: dataset.path must be a non-empty string without NUL, found "]),
        ('"b-*"', '"\\u0000"', [f"18: dataset.group must be {GROUP}, found ['/abs/a', '"]),
        ('cache = "', 'cache = "\\u0000', ["6: cache must be a non-empty string without NUL, found"]),
        ("max_epochs = 2", "incomplete = 3", ["20: dataset.incomplete must be one of 'error', 'skip', found 3"]),
        (
            '["/abs/a", "b-*"]',
            "['a', 'b']\nincomplete = 'skip'",
            ["19: dataset.incomplete must be combined with a glob, "],
        ),
        ('"data/web.bin"', "'w*'\nincomplete = 'skip'", ["14: dataset.incomplete must be combined with a glob, or"]),
        (
            "shuffle_block = 4",
            "x = " + "[" * 5000 + "]" * 5000,
            ["1: must be TOML with little nesting, found arrays or"],
        ),
        (
            "shuffle_block = 4",
            "x = " + "{a = " * 5000 + "1" + "}" * 5000,
            ["1: must be TOML with little nesting, found array"],
        ),
        ("shuffle_block = 4", "x = " + "9" * 5000, ["1: must be TOML with readable numbers: Exceeds the limit"]),
        ("shuffle_block = 4", "a" + ".a" * 300_000 + " = 1", ["27: must have keys of fewer than 256 parts, found mor"]),
        (
            "shuffle_block = 4",
            "a" + " . 'b'" * 300_000 + " = 1",
            ["27: must have keys of fewer than 256 parts, found "],
        ),
        (
            "[options]",
            '[tokenizer]\nmegatron = {class = "\\u0000"}\n[options]',
            ["27: "],
        ),
        ("[options]", "tokenizer = 3\n[options]", ["26: unknown key 'stage.tokenizer'; "]),
    ],
)
def test_a_problem_is_reported_with_line_and_key(tmp_path, old, new, expected):
    assert WHOLE.count(old) >= 1
    found = problems(tmp_path, WHOLE.replace(old, new, 1))
    for start in expected:
        assert [problem for problem in found if problem.startswith(start)], found


def test_all_problems_are_reported_at_once_in_the_order_of_lines(tmp_path):
    text = (
        WHOLE.replace("seed = 5", "seed = -1")
        .replace("weight = 0.5", "weight = -2")
        .replace("train = 100", "train = 1.5")
    )
    assert [problem.split(" must")[0] for problem in problems(tmp_path, text)] == [
        "4: seed",
        "9: size.train",
        "19: dataset.weight",
    ]


def test_a_file_that_is_not_utf_8_is_refused(tmp_path):
    (tmp_path / "blend.toml").write_bytes(b"version = '\xff'")
    with pytest.raises(BlendFileError, match=r"blend\.toml:1: must be UTF-8, found byte 0xff"):
        read_blend_file(tmp_path / "blend.toml")


def test_epochs_say_the_size_of_training(tmp_path):
    text = "version = 1\nsequence_length = 8\nsplit = '1'\n[[dataset]]\npath = 'a'\nepochs = 2\n"
    assert read(tmp_path, text).sizes.train is None
    assert problems(tmp_path, text + "[size]\ntrain = 5") == [
        "7: size must not give the size of train if its datasets give their epochs, found both"
    ]


def test_each_split_may_have_datasets_of_its_own(tmp_path):
    text = """\
version = 1
sequence_length = 8
size.train = 5
[[dataset]]
path = "a"
weight = 1
splits = ["train"]
[[dataset]]
path = "b"
splits = ["valid", "test"]
"""
    assert [entry.splits for entry in read(tmp_path, text).datasets] == [(Split.train,), (Split.valid, Split.test)]
    found = problems(tmp_path, text.replace('splits = ["train"]', ""))
    assert "4: dataset.splits must be given in every dataset, or in none and split for all, found only some" in found
    said = "must be given if other datasets of valid have a weight, ratio or epochs, found none"
    assert f"8: dataset.weight {said}" in found
    assert problems(tmp_path, text.replace('"valid", "test"', '"valid", "valid"'))[-1].startswith(
        "10: dataset.splits must be a list of at least one of 'train', 'valid', 'test', each at most once"
    )


def test_a_tokenizer_may_be_a_file_or_what_datasets_must_know(tmp_path):
    top = "version = 1\nsequence_length = 8\nsplit = '1'\n{}\n[[dataset]]\npath = 'a'\n"

    def tokenizer(text):
        return read(tmp_path, top.format(text)).tokenizer

    assert tokenizer("") is None
    assert tokenizer("tokenizer = 't.json'").file == str(tmp_path / "t.json")
    assert isinstance(make_tokenizer(tokenizer("tokenizer = 'bytes'")), ByteTokenizer)
    stated = make_tokenizer(tokenizer("[tokenizer]\neod = 7\nvocab_size = 9"))
    assert (stated.eod, stated.vocab_size, stated.pad) == (7, 9, None)
    assert stated.unique_identifiers == {"class": "StatedTokenizer", "eod": 7, "vocab_size": 9}
    named = tokenizer("[tokenizer]\neod = 7\nvocab_size = 9\nmegatron = {class = 'a.B', path = 'p', options = {k = 1}}")
    identity = MegatronIdentity("a.B", "p", {"k": 1})
    assert make_tokenizer(named) == StatedTokenizer(7, 9, megatron_identity=identity)
    assert make_tokenizer(named).unique_identifiers == {"class": "a.B", "tokenizer_path": "p", "k": "1"}


def test_a_tokenizer_of_any_kind_may_be_named(tmp_path, monkeypatch):
    """Paths are relative to the file's folder; names of other kinds are no paths."""
    top = "version = 1\nsequence_length = 8\nsplit = '1'\n{}\n[[dataset]]\npath = 'a'\n"
    folder = tmp_path / "below"
    folder.mkdir()
    write_wordpiece(folder / "vocab.txt", lower_case=True)
    write_sentencepiece(folder / "own.model")
    write_plain_folder(folder / "own")
    (folder / "own.json").write_bytes((folder / "own" / "tokenizer.json").read_bytes())
    (folder / "tiktoken_ext").mkdir()
    namespace = {}
    exec(PLUGIN, namespace)
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "many", tiktoken.Encoding(**namespace["many"]()))
    wanted = {
        "bytes": ByteTokenizer,
        "null:50": NullTokenizer,
        "tiktoken:many": TiktokenTokenizer,
        "own.model": SentencePieceTokenizer,
        "own": HuggingFaceTokenizer,
        "own.json": HuggingFaceTokenizer,
        "vocab.txt": WordPieceTokenizer,
    }
    for name, cls in wanted.items():
        identity = MegatronIdentity("a.B", "p")
        for text in (
            f"tokenizer = '{name}'",
            f"[tokenizer]\nfile = '{name}'\nmegatron = {{class = 'a.B', path = 'p'}}",
        ):
            entry = read(folder, top.format(text)).tokenizer
            assert entry.file == (name if name in ("bytes", "null:50", "tiktoken:many") else str(folder / name))
            made = make_tokenizer(entry)
            assert type(made) is cls
            assert (made.unique_identifiers == identity.unique_identifiers()) is ("megatron" in text)
    entry = read(
        folder, top.format("[tokenizer]\nfile = 'own.json'\neod_token = '<end>'\npad_token = '<x1>'")
    ).tokenizer
    made = make_tokenizer(entry)
    assert (made.inv_vocab[made.eod], made.inv_vocab[made.pad]) == ("<end>", "<x1>")
    for lower, first in (("true", "the"), ("false", "[UNK]")):
        entry = read(folder, top.format(f"[tokenizer]\nfile = 'vocab.txt'\nlower_case = {lower}")).tokenizer
        made = make_tokenizer(entry)
        assert made.inv_vocab[made.tokenize("THE")[0]] == first


def test_tokens_of_a_tokenizer_that_has_none_are_refused(tmp_path):
    top = "version = 1\nsequence_length = 8\nsplit = '1'\n{}\n[[dataset]]\npath = 'a'\n"
    entry = read(tmp_path, top.format("[tokenizer]\nfile = 'bytes'\neod_token = 'x'")).tokenizer
    with pytest.raises(ArgumentError, match="the tokenizer 'bytes' must be used without options"):
        make_tokenizer(entry)


def test_every_field_of_the_configuration_has_its_place():
    """A new field must become an option, be set in another way, or be excluded on purpose."""
    said = {
        "random_seed",
        "sequence_length",
        "blend",
        "blend_per_split",
        "split",
        "path_to_cache",
        "tokenizer",
        "order",
    }
    said |= {"blend_stages", "blend_max_epochs", "groups", "pack_contiguous"}
    left_out = {"object_storage_cache_path", "s3_cache_path", "sequences_per_dataset", "hybrid_context_parallel"}
    assert {one.name for one in fields(GPTDatasetConfig) if one.init} == said | left_out | set(OPTIONS)


def test_counts_may_have_separators_and_units():
    assert parse_count("1234567890123456789012345678901234567") == 1234567890123456789012345678901234567
    with pytest.raises(ArgumentError, match=r"found '9{64}\.\.\.'"):
        parse_count("9" * 1_000_000)
    assert [parse_count(text) for text in ("2T", "1.5 B", "300_000", "1,024", "0.5K")] == [
        2 * 10**12,
        1_500_000_000,
        300_000,
        1024,
        500,
    ]
    for text in ("", "T", "1.2", "-1", "1e6", "2 t"):
        with pytest.raises(ArgumentError, match="must be a whole number such as"):
            parse_count(text)


def test_a_file_of_many_megabytes_is_refused(tmp_path):
    (problem,) = problems(tmp_path, WHOLE + "#" * (16 << 20))
    assert problem.startswith("1: must have at most 16,777,216 bytes, found more")
