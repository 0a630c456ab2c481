"""A Megatron job with its own tokenizer starts from the cache that `trackbed build` made with the identity of it."""

import base64
import json

import pytest
import tiktoken
from click.testing import CliRunner
from megatron.core.tokenizers.text.libraries import tiktoken_tokenizer

from tests.support.files.tokenizer_files import SCRIPTS, write_plain_folder, write_sentencepiece
from tests.support.megatron_core.cases import DEFAULT_TOKENIZER
from tests.support.megatron_core.observe import answer
from tests.support.megatron_core.oracle import running
from trackbed.blends import measure_blend, read_blend_file
from trackbed.cli.main import trackbed
from trackbed.datasets import open_tokenizer

SPECIAL = tiktoken_tokenizer.SPECIAL_TOKENS
FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
BLEND = """\
version = 1
sequence_length = 16
split = "8,1,1"
cache = "cache"
size = {{train = 40, valid = 4, test = 4}}
[tokenizer]
{tokenizer}
[tokenizer.megatron]
class = "{class_path}"
path = "{path}"
options = {{{options}}}
[[dataset]]
path = "{folder}/one_text_document"
weight = 2
[[dataset]]
path = "{folder}/two_text_document"
weight = 1
"""


@pytest.fixture(scope="module")
def oracle():
    with running() as started:
        yield started


def stamps(folder):
    """File number and time of each file of a cache."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir() if path.is_file()}


def write_megatron_tiktoken(path):
    """A vocabulary file of Megatron Core's, and the encoding that it makes of it."""
    ranks = [*(bytes([byte]) for byte in range(256)), b"th", b"he", b"the", b" the"]
    listed = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for rank, token in enumerate(ranks)
    ]
    path.write_text(json.dumps(listed))
    shifted = {token: rank + len(SPECIAL) for rank, token in enumerate(ranks)}
    return tiktoken.Encoding(
        "theirs",
        pat_str=tiktoken_tokenizer._PATTERN_TIKTOKEN_V2,
        mergeable_ranks=shifted,
        special_tokens={token: index for index, token in enumerate(SPECIAL)},
    )


def write_tokenizer(kind, folder, monkeypatch):
    """Our name and options of a tokenizer, and Megatron Core's path and options."""
    if kind == "sentencepiece":
        write_sentencepiece(folder / "own.model")
        return 'file = "own.model"', "own.model", {}, {"legacy": False, "special_tokens": None}
    if kind == "huggingface":
        write_plain_folder(folder / "own")
        return 'file = "own"', "own", {}, {"use_fast": True}
    encoding = write_megatron_tiktoken(folder / "own.json")
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "theirs", encoding)
    ours = {"eod_token": "</s>", "pad_token": "<pad>"}
    table = "\n".join(['file = "tiktoken:theirs"', *(f'{name} = "{value}"' for name, value in ours.items())])
    return table, "own.json", ours, {"num_special_tokens": len(SPECIAL), "vocab_size": encoding.n_vocab}


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken", "huggingface"])
def test_a_job_with_its_own_tokenizer_starts_from_the_cache(kind, oracle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table, file, ours, theirs = write_tokenizer(kind, tmp_path, monkeypatch)
    path = str(tmp_path / file)
    name = "tiktoken:theirs" if kind == "tiktoken" else file

    def run(*arguments):
        result = CliRunner().invoke(trackbed, arguments, prog_name="trackbed")
        assert result.exit_code == 0, (result.output, result.exception)
        return result.stdout

    for number, pair in enumerate(("one", "two")):
        texts = [f"{text} {number} the cat" * 3 for text in SCRIPTS * 5]
        (tmp_path / f"{pair}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        ending = ["--eod-token", ours["eod_token"]] if ours else []
        run("preprocess", f"{pair}.jsonl", "--tokenizer", name, "-o", pair, "--append-eod", "--workers", "1", *ending)
    # TOML has no None; Megatron Core hashes the text of each option.
    options = ", ".join(f"{key} = {json.dumps('None' if value is None else value)}" for key, value in theirs.items())
    blend = BLEND.format(tokenizer=table, class_path=DEFAULT_TOKENIZER, path=path, options=options, folder=tmp_path)
    (tmp_path / "blend.toml").write_text(blend)
    run("build", str(tmp_path / "blend.toml"), "--for", "megatron-core")

    config = measure_blend(read_blend_file(tmp_path / "blend.toml")).config()
    request = {
        "config": {
            name: getattr(config, name)
            for name in ("random_seed", "sequence_length", "split", "blend", "path_to_cache", *FLAGS)
        },
        "sizes": [40, 4, 4],
        "tokenizer": {"kind": kind, "identity": {"path": path, "options": theirs}},
        "texts": SCRIPTS,
    }
    built = stamps(tmp_path / "cache")
    found = oracle.ask(request)
    assert "error" not in found
    assert stamps(tmp_path / "cache") == built
    wanted = answer(request, config.tokenizer, "trackbed.megatron.core")
    assert wanted == found
    assert wanted["ids"] == [open_tokenizer(name, **ours).tokenize(text).tolist() for text in SCRIPTS]
    assert any(".npy" in name for name in found["files"])
