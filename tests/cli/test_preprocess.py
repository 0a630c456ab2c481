import gzip
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import BertWordPieceTokenizer

import trackbed.preprocess
from tests.support.files.tokenizer_files import write_byt5_folder, write_sentencepiece, write_wordpiece
from trackbed.datasets import ByteTokenizer, open_tokenizer
from trackbed.tokens import IndexedDataset, verify_content


def texts_in(prefix):
    return [ByteTokenizer().detokenize(tokens) for tokens in IndexedDataset(prefix)]


def test_a_corpus_becomes_a_pair_with_megatrons_name(run, corpus):
    found = run(
        "preprocess", "corpus.jsonl", "--tokenizer", "bytes", "--output", "made", "--append-eod", "--workers", 2
    )
    assert (found.exit_code, found.stderr) == (0, "")
    assert texts_in("made_text_document") == ["abc<eod>", "de<eod>"]
    assert verify_content("made_text_document").documents == 2


def test_the_summary_has_the_counts_and_the_paths(run, corpus):
    lines = run("preprocess", "corpus.jsonl", "--tokenizer", "bytes", "-o", "made", "--workers", 1).stdout.splitlines()
    assert ["text", "2", "5", "1"] in [line.split() for line in lines]
    assert any(line.startswith("records 3, bad 0, blank lines 0, files 1") for line in lines)
    assert lines[-2:] == ["made_text_document.bin", "made_text_document.idx"]
    assert max(map(len, lines)) <= 80


def test_dropped_texts_are_explained_where_there_are_any(run, corpus, tmp_path):
    options = ["--tokenizer", "bytes", "-o", "made", "--workers", 1]
    sentence = "dropped: texts without tokens, such as empty ones, which become no document"
    assert run("preprocess", "corpus.jsonl", *options).stdout.splitlines().count(sentence) == 1
    (tmp_path / "full.jsonl").write_text('{"text": "a"}\n')
    assert "dropped:" not in run("preprocess", "full.jsonl", *options).stdout


@pytest.mark.parametrize("more", [[], ["--shard-bytes", "30B"]])
def test_a_missing_end_of_document_token_is_told_once_at_the_end(run, corpus, more):
    options = ["--tokenizer", "bytes", "-o", "made", "--workers", 1, *more]
    hint = "trackbed: documents end without an end-of-document token; give --append-eod for GPT training\n"
    assert run("preprocess", "corpus.jsonl", *options).stderr == hint
    for quiet in (["--append-eod", "--overwrite"][: 1 + len(more)], ["--split-sentences"]):
        assert hint not in run("preprocess", "corpus.jsonl", *options, *quiet).stderr
    corpus.write_text("bad\n")
    assert hint not in run("preprocess", "corpus.jsonl", *options).stderr


def test_a_resumed_run_says_where_it_goes_on_and_its_rate_is_that_of_its_own_work(run, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 40_000)
    options = ["a.jsonl", "--tokenizer", "bytes", "-o", "c", "--workers", 1, "--append-eod", "--shard-bytes", "200KB"]
    first = run("preprocess", *options)
    assert (first.stderr, "kept" in first.stdout) == ("", False)
    (tmp_path / "c-00002-of-00003_text_document.trackbed.json").unlink()
    resumed = run("preprocess", *options)
    assert resumed.stderr == "trackbed: going on at 0.4 of 0.6 MB\n"
    (line,) = [line for line in resumed.stdout.splitlines() if "kept" in line]
    found = re.fullmatch(r"0\.6 MB, kept from before 0\.4 MB, in ([\d.]+) s, ([\d.]+) MB/s", line)
    assert (float(found[1]) - 0.05) * float(found[2]) < 0.25  # 0.2 MB; the seconds are rounded
    whole = run("preprocess", *options)
    assert whole.stderr == ""
    assert re.search(r"^0\.6 MB, kept from before 0\.6 MB, in [\d.]+ s$", whole.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("saves", "said"),
    [
        ([], "trackbed: interrupted\n"),
        ([0], "trackbed: interrupted: nothing is kept yet\n"),
        ([0, 2], "trackbed: interrupted: 2.0 of 4.0 MB are kept; run the same command again to go on\n"),
        (
            [2, 3],
            "trackbed: going on at 2.0 of 4.0 MB\n"
            "trackbed: interrupted: 3.0 of 4.0 MB are kept; run the same command again to go on\n",
        ),
    ],
)
def test_an_interrupt_says_what_is_kept(run, corpus, monkeypatch, saves, said):
    def interrupted(*arguments, on_save, **options):
        for kept in saves:
            on_save(kept * 1_000_000, 4_000_000)
        raise KeyboardInterrupt

    monkeypatch.setattr(trackbed.preprocess, "preprocess", interrupted)
    found = run("preprocess", "corpus.jsonl", "--tokenizer", "bytes", "-o", "made")
    assert (found.exit_code, found.stdout, found.stderr) == (130, "", said)


def test_of_packed_inputs_the_report_has_stored_and_unpacked_bytes(run, tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 100_000))
    found = run("preprocess", "a.jsonl.gz", "--tokenizer", "bytes", "-o", "made", "--workers", 1)
    assert re.search(r"^stored 0\.0 MB, unpacked 1\.4 MB, in [\d.]+ s, [\d.]+ MB/s$", found.stdout, re.MULTILINE)


@pytest.mark.parametrize("more", [[], ["--shard-bytes", "30B"]])
def test_the_share_of_unknown_tokens_is_told_where_a_tokenizer_has_one(run, tmp_path, more):
    write_wordpiece(tmp_path / "vocab.txt", lower_case=True)
    (tmp_path / "a.jsonl").write_text('{"text": "the \u16a0 fox"}\n{"text": "\u16a0"}\n')
    options = ["-o", "made", "--append-eod", "--workers", 1, *more]
    found = run("preprocess", "a.jsonl", "--tokenizer", "vocab.txt", *options)
    lines = [line.split() for line in found.stdout.splitlines()]
    (head,) = [line for line in lines if line[:1] == ["key"]]
    assert head == ["key", "documents", "tokens", "unknown", "dropped"]
    (row,) = [line for line in lines if line[:1] == ["text"]]
    library = BertWordPieceTokenizer.from_file(str(tmp_path / "vocab.txt"), lowercase=True)
    texts = ("the \u16a0 fox", "\u16a0")
    tokens = sum(1 + len(library.encode(text, add_special_tokens=False).ids) for text in texts)
    assert row == ["text", "2", str(tokens), f"{2 / tokens:.2%}", "0"]
    plain = run("preprocess", "a.jsonl", "--tokenizer", "bytes", "-o", "other", "--workers", 1, *more)
    assert (plain.exit_code, "unknown" in plain.stdout) == (0, False)


def test_the_help_names_addresses_and_what_ray_needs(run):
    text = " ".join(run("preprocess", "--help").stdout.split())
    assert "INPUT may also be an address such as s3://bucket/key" in text
    assert "with --shard-bytes, so may PREFIX" in text
    assert "ray needs pip install '.[ray]', and inputs, tokenizer and PREFIX that every host has" in text


def test_several_keys_are_given_with_commas_or_one_by_one(run, corpus):
    for keys in (["--json-keys", "text,title"], ["--json-keys", "text", "--json-keys", "title"]):
        run("preprocess", "corpus.jsonl", "--tokenizer", "bytes", "--output", "made", "--workers", 1, *keys)
        assert texts_in("made_title_document") == ["t"] * 3
        assert texts_in("made_text_document") == ["abc", "", "de"]


def test_texts_without_tokens_of_several_keys_are_counted(run, corpus):
    options = ["--tokenizer", "bytes", "--output", "made", "--workers", 1, "--json-keys", "text,title"]
    kept = run("preprocess", "corpus.jsonl", *options).stdout
    assert ["key", "documents", "tokens", "empty", "dropped"] in [line.split() for line in kept.splitlines()]
    assert ["text", "3", "5", "1", "0"] in [line.split() for line in kept.splitlines()]
    assert "empty: texts without tokens, each a sequence without text" in kept
    left_out = run("preprocess", "corpus.jsonl", *options, "--drop-record").stdout
    assert ["text", "2", "5", "1"] in [line.split() for line in left_out.splitlines()]
    assert ["title", "2", "2", "1"] in [line.split() for line in left_out.splitlines()]
    assert "dropped: texts of records in which one has no tokens" in left_out
    assert (texts_in("made_text_document"), texts_in("made_title_document")) == (["abc", "de"], ["t", "t"])
    outputs = json.loads(run("preprocess", "corpus.jsonl", *options, "--json").stdout)["outputs"]
    assert [(one["documents"], one["empty"], one["dropped"]) for one in outputs] == [(3, 1, 0), (3, 0, 0)]


def test_a_record_can_only_be_dropped_if_it_has_several_texts(run, corpus):
    found = run("preprocess", "corpus.jsonl", "--tokenizer", "bytes", "--output", "made", "--drop-record")
    assert (found.exit_code, "--drop-record needs several --json-keys" in found.stderr) == (2, True)


def test_a_trained_tokenizer_is_used_with_its_end_of_document_token(run, corpus, tmp_path):
    assert run("train-tokenizer", "corpus.jsonl", "--vocab-size", 300, "--output", "t.json").exit_code == 0
    run("preprocess", "corpus.jsonl", "--tokenizer", "t.json", "-o", "made", "--append-eod", "--workers", 1)
    assert [tokens[-1] for tokens in IndexedDataset("made_text_document")] == [0, 0]
    options = ["--append-eod", "--eod-token", "a", "--workers", 1]
    run("preprocess", "corpus.jsonl", "--tokenizer", "t.json", "-o", "made", *options)
    vocab = json.loads((tmp_path / "t.json").read_text())["model"]["vocab"]
    assert [tokens[-1] for tokens in IndexedDataset("made_text_document")] == [vocab["a"]] * 2


def test_a_tokenizer_without_a_usual_end_of_document_token_is_an_error_that_lists_its_special_tokens(run, corpus):
    run("train-tokenizer", "corpus.jsonl", "--vocab-size", 300, "--special-token", "<end>", "--output", "t.json")
    found = run("preprocess", "corpus.jsonl", "--tokenizer", "t.json", "--output", "made", "--append-eod")
    assert found.exit_code == 1
    assert found.stderr.startswith("trackbed: t.json: the tokenizer must have one of '<|endoftext|>', ")
    assert found.stderr.endswith("its special tokens: '<end>'\n")


def test_special_tokens_in_a_text_count_where_they_are_asked_for(run, corpus, tmp_path):
    run("train-tokenizer", "corpus.jsonl", "--vocab-size", 300, "--output", "t.json")
    (tmp_path / "a.txt").write_text("x<|endoftext|>y")
    for options, there in (([], False), (["--special-tokens"], True)):
        run("preprocess", "a.txt", "--tokenizer", "t.json", "--output", "made", "--workers", 1, *options)
        assert (0 in np.asarray(IndexedDataset("made_text_document")[0])) is there


def test_bad_records_stop_the_run_or_are_listed(run, corpus):
    corpus.write_text('{"text": "a"}\n{"body": "b"}\nnonsense\n{"text": "c"}\n')
    found = run("preprocess", "corpus.jsonl", "--tokenizer", "bytes", "--output", "made", "--workers", 1)
    assert found.exit_code == 1
    assert found.stderr == "trackbed: corpus.jsonl:2: a record must have the key 'text', found 'body'\n"
    found = run("preprocess", "corpus.jsonl", "--tokenizer", "bytes", "-o", "made", "--workers", 1, "--skip-bad")
    assert found.exit_code == 0
    assert [line.split(": ")[:2] for line in found.stderr.splitlines()[:-1]] == [
        ["trackbed", "skipped corpus.jsonl:2"],
        ["trackbed", "skipped corpus.jsonl:3"],
    ]
    assert "records 4, bad 2" in found.stdout
    assert texts_in("made_text_document") == ["a", "c"]


def test_many_bad_records_are_listed_in_part(run, corpus):
    corpus.write_text('{"text": "x"}\n' + "bad\n" * 2025)
    found = run("preprocess", "corpus.jsonl", "--tokenizer", "bytes", "-o", "made", "--workers", 1, "--skip-bad")
    assert len(found.stderr.splitlines()) == 22
    assert found.stderr.splitlines()[-2] == "trackbed: and 2,005 more"


def test_a_folder_of_texts_is_read_in_order(run, tmp_path):
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    for name in ("texts/b.txt", "texts/a.md", "texts/deep/c.txt", "texts/skipped.py"):
        (tmp_path / name).write_text(name)
    run("preprocess", "texts", "--tokenizer", "bytes", "--output", "made", "--workers", 1)
    assert texts_in("made_text_document") == ["texts/a.md", "texts/b.txt", "texts/deep/c.txt"]


def test_files_of_unknown_suffix_are_refused_by_name_and_counted_in_a_folder(run, corpus, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "part-0").write_bytes(corpus.read_bytes())
    (tmp_path / "in" / "a.txt").write_text("one")
    named = run("preprocess", "in/part-0", "--tokenizer", "bytes", "-o", "made")
    assert (named.exit_code, named.stdout) == (1, "")
    assert "in/part-0: a file name must end in .jsonl," in named.stderr
    assert "--format jsonl|txt|parquet states the format" in named.stderr
    folder = run("preprocess", "in", "--tokenizer", "bytes", "-o", "made", "--workers", 1)
    assert "files 1\nfiles: 1 text; left out: 1 of unknown suffix (in/part-0)\n" in folder.stdout
    (tmp_path / "in" / "a.txt").unlink()
    told = run("preprocess", "in", "--format", "jsonl", "--tokenizer", "bytes", "-o", "made", "--workers", 1)
    assert "records 3, bad 0, blank lines 0, files 1\n" in told.stdout


@pytest.fixture
def mixed(tmp_path):
    """A folder of records with a linked folder, hidden names, a note, and a file under two names."""
    for name in ("in/a.jsonl", "disk/b.jsonl", "in/_temporary/c.jsonl", "in/.d.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    (tmp_path / "in" / "README.md").write_text("a note")
    (tmp_path / "in" / "books").symlink_to("../disk")
    (tmp_path / "in" / "z.jsonl").hardlink_to(tmp_path / "in" / "a.jsonl")


@pytest.mark.parametrize("more", [[], ["--shard-bytes", "30B"]])
def test_the_report_says_what_was_read_and_what_not(run, mixed, more, caplog):
    options = ["--tokenizer", "bytes", "-o", "made", "--workers", 1, "--append-eod", *more]
    found = run("preprocess", "in", *options)
    (line,) = [line for line in found.stdout.splitlines() if line.startswith("files: ")]
    assert line.replace(f"{Path.cwd()}/", "") == (
        "files: 2 JSON lines, 1 text (in/README.md); left out: 2 hidden (in/.d.jsonl, in/_temporary), "
        "1 given twice (in/z.jsonl)"
    )
    (message,) = [record.getMessage() for record in caplog.records if "plain text" in record.getMessage()]
    assert message.startswith(
        "in: has 1 plain text beside 2 files of JSON lines, and each becomes a document: in/README.md;"
    )


def test_the_report_as_json_names_all_files(run, mixed):
    found = run("preprocess", "in", "--tokenizer", "bytes", "-o", "made", "--workers", 1, "--append-eod", "--json")
    report = json.loads(found.stdout)
    assert report["formats"] == {"jsonl": ["in/a.jsonl", "in/books/b.jsonl"], "text": ["in/README.md"]}
    assert report["left_out"] == {"hidden": ["in/.d.jsonl", "in/_temporary"], "given twice": ["in/z.jsonl"]}
    assert (report["records"], report["bad"], report["outputs"][0]["documents"]) == (3, 0, 3)


def test_hidden_files_are_left_out_of_a_folder_with_a_format(run, tmp_path):
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "in" / "part-0")
    for name in (".gitignore", "_SUCCESS", ".part-0.crc"):
        (tmp_path / "in" / name).write_text("no table")
    found = run("preprocess", "in", "--format", "parquet", "--tokenizer", "bytes", "-o", "made", "--workers", 1)
    assert (found.exit_code, texts_in("made_text_document")) == (0, ["a", "b"])
    (tmp_path / "in" / "README.md").write_text("no table")
    refused = run("preprocess", "in", "--format", "parquet", "--tokenizer", "bytes", "-o", "made", "--workers", 1)
    assert (refused.exit_code, "in/README.md" in refused.stderr) == (1, True)


def test_nothing_is_written_of_no_document_unless_that_is_allowed(run, tmp_path, pair):
    before = (tmp_path / f"{pair}.bin").read_bytes()
    (tmp_path / "empty.jsonl").write_text("")
    refused = run("preprocess", "empty.jsonl", "--tokenizer", "bytes", "-o", "made", "--workers", 1)
    assert (refused.exit_code, refused.stdout) == (1, "")
    replaced = f"trackbed: {pair}.bin and .idx exist, and are replaced once the new ones are whole\n"
    assert refused.stderr.startswith(f"{replaced}trackbed: {pair}: a pair must have at least one document, found none")
    assert (tmp_path / f"{pair}.bin").read_bytes() == before
    allowed = run("preprocess", "empty.jsonl", "--tokenizer", "bytes", "-o", "made", "--workers", 1, "--allow-empty")
    assert allowed.exit_code == 0
    assert (tmp_path / f"{pair}.bin").read_bytes() == b""


def test_a_line_above_the_limit_is_named(run, corpus):
    found = run("preprocess", corpus, "--tokenizer", "bytes", "-o", "made", "--workers", 1, "--max-record-bytes", "20B")
    assert (found.exit_code, found.stdout) == (1, "")
    assert found.stderr == f"trackbed: {corpus}:1: a line must have at most 20 bytes, found more\n"


def test_text_is_lower_cased_for_a_vocabulary_of_lower_case_text(run, tmp_path):
    write_wordpiece(tmp_path / "vocab.txt", lower_case=True)
    (tmp_path / "a.txt").write_text("THE Fox")
    tokens = {}
    for options in ((), ("--lower-case",)):
        found = run("preprocess", "a.txt", "--tokenizer", "vocab.txt", "-o", "made", "--append-eod", *options)
        assert found.exit_code == 0, found.stderr
        tokens[options] = IndexedDataset("made_text_document")[0].tolist()
    library = BertWordPieceTokenizer.from_file(str(tmp_path / "vocab.txt"), lowercase=True)
    wanted = library.encode("THE Fox", add_special_tokens=False).ids
    assert tokens[("--lower-case",)] == [*wanted, library.token_to_id("[SEP]")]
    assert tokens[()] != tokens[("--lower-case",)]
    shown = run("inspect", "made_text_document", "--tokenizer", "vocab.txt")
    assert "the fox" in shown.stdout
    refused = run("preprocess", "a.txt", "--tokenizer", "bytes", "-o", "made", "--lower-case")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("trackbed: bytes: must be a WordPiece vocabulary (.txt) with lower_case")


def test_numbers_are_their_own_ids(run, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "5 7"}\n{"text": "101"}\n{"text": "100 0"}\n')
    options = ["--tokenizer", "null:100", "-o", "made", "--append-eod", "--workers", 1]
    refused = run("preprocess", "a.jsonl", *options)
    assert refused.exit_code == 1
    assert "a.jsonl:2: the tokenizer must accept the text, found an error: a text must be decimal" in refused.stderr
    assert run("preprocess", "a.jsonl", *options, "--skip-bad").exit_code == 0
    assert [one.tolist() for one in IndexedDataset("made_text_document")] == [[5, 7, 100], [100, 0, 100]]


def test_the_workers_of_any_kind_of_tokenizer_give_the_same_tokens(run, tmp_path):
    write_sentencepiece(tmp_path / "own.model")
    write_byt5_folder(tmp_path / "byt5")
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / f"{number}.txt").write_text(f"the quick brown fox {number}")
    for name in ("own.model", "byt5"):
        tokenizer = open_tokenizer(name)
        found = run("preprocess", "in", "--tokenizer", name, "-o", "made", "--workers", 2)
        assert found.exit_code == 0, found.stderr
        wanted = [tokenizer.tokenize(f"the quick brown fox {number}").tolist() for number in range(3)]
        assert [one.tolist() for one in IndexedDataset("made_text_document")] == wanted


def test_sentences_become_sequences_of_a_pair_with_megatrons_name(run, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "Mr. Smith left.  It rained!"}\n{"text": "One."}\n{"text": " "}\n')
    options = ["--tokenizer", "bytes", "-o", "made", "--append-eod", "--workers", 1, "--split-sentences"]
    found = run("preprocess", "a.jsonl", *options)
    assert (found.exit_code, found.stderr) == (0, "")
    assert texts_in("made_text_sentence") == ["Mr. Smith left.", "It rained!<eod>", "One.<eod>"]
    assert IndexedDataset("made_text_sentence").document_indices.tolist() == [0, 2, 3]
    lines = [line.split() for line in found.stdout.splitlines()]
    assert ["key", "documents", "sentences", "tokens", "dropped"] in lines
    assert ["text", "2", "3", "31", "1"] in lines


def test_the_splitter_may_be_named(run, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "Le roi M. Dupont parle. Fin."}) + "\n")
    options = ["--tokenizer", "bytes", "-o", "made", "--workers", 1, "--split-sentences", "--splitter"]
    counts = []
    for name in ("sentencex:en", "sentencex:fr"):
        assert run("preprocess", "a.jsonl", *options, name).exit_code == 0
        counts.append(len(texts_in("made_text_sentence")))
    assert counts[0] < counts[1]
    found = run("preprocess", "a.jsonl", *options, "punkt:model")
    assert (found.exit_code, found.stderr.splitlines()[-1]) == (
        1,
        "trackbed: model: a Punkt model must be a folder with collocations.tab, sent_starters.txt, abbrev_types.txt, "
        "ortho_context.tab, found no collocations.tab",
    )


def test_a_splitter_without_split_sentences_is_a_usage_error(run, corpus):
    found = run("preprocess", "corpus.jsonl", "--tokenizer", "bytes", "-o", "made", "--splitter", "sentencex")
    assert found.exit_code == 2
    assert "--splitter needs --split-sentences" in found.stderr


@pytest.fixture
def with_images(tmp_path):
    """One record with an image of five bytes."""
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "i.png").write_bytes(b"12345")
    (tmp_path / "a.jsonl").write_text('{"text": "abc", "image": "i.png", "file": "i.png"}\n')


def test_images_follow_their_texts_in_a_pair_without_key_and_level(run, with_images):
    options = ["--tokenizer", "bytes", "-o", "made", "--append-eod", "--workers", 1, "--pad-length", 5]
    for more in ([], ["--image-key", "file"]):
        found = run("preprocess", "a.jsonl", "--images", "images", *options, *more)
        said = "trackbed: made.bin and .idx exist, and are replaced once the new ones are whole\n" if more else ""
        assert (found.exit_code, found.stderr) == (0, said)
        assert found.stdout.splitlines()[-2:] == ["made.bin", "made.idx"]
        sequences = [(tokens.tolist(), int(mode)) for tokens, mode in IndexedDataset("made", multimodal=True)]
        assert sequences == [([97, 98, 99, 256, 256], 0), ([3, 0x34333231, 0x35], 1)]
    assert run("verify", "--content", "made").exit_code == 0
    shown = run("inspect", "made", "--tokenizer", "bytes").stdout
    assert "documents 1, sequences 2, tokens 8 of int32" in shown
    assert "sequences of mode 0 1, sequences of mode 1 1" in shown
    assert "abc<eod><eod>" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pad-length", 5], "--pad-length needs --images"),
        (["--image-key", "x"], "--image-key needs --images"),
        (["--images", "images"], "--images needs --pad-length"),
        (
            ["--images", "images", "--pad-length", 5, "--split-sentences"],
            "--images and --split-sentences exclude each other",
        ),
        (["--images", "images", "--pad-length", 0], "0 is not in the range x>=1"),
    ],
)
def test_options_of_images_that_do_not_go_together_are_usage_errors(run, with_images, options, message):
    found = run("preprocess", "a.jsonl", "--tokenizer", "bytes", "-o", "made", *options)
    assert found.exit_code == 2
    assert message in found.stderr


def test_several_keys_with_images_are_an_error(run, with_images):
    options = ["--images", "images", "--pad-length", 5, "--json-keys", "text,title"]
    found = run("preprocess", "a.jsonl", "--tokenizer", "bytes", "-o", "made", *options)
    assert found.exit_code == 1
    assert found.stderr == "trackbed: json_keys must be one key if records have images, found ['text', 'title']\n"


def test_shards_are_written_listed_and_not_written_again(run, corpus):
    command = ["preprocess", "corpus.jsonl", "--tokenizer", "bytes", "-o", "c", "--shard-bytes", "60B", "--workers", 1]
    lines = run(*command).stdout.splitlines()
    assert lines[-2:] == ["shards 2, finished before 0", "c.toml"]
    assert run(*command).stdout.splitlines()[-2] == "shards 2, finished before 2"
    other = run(*command, "--append-eod")
    assert (other.exit_code, other.stderr.count("\n")) == (1, 1)
    assert "eod: null, now 256; --overwrite replaces it" in other.stderr
    assert run(*command, "--append-eod", "--overwrite").exit_code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shard-bytes", "1GB", "--images", ".", "--pad-length", 4], "--shard-bytes and --images exclude each other"),
        (["--engine", "ray"], "--engine ray needs --shard-bytes"),
        (["--overwrite"], "--overwrite needs --shard-bytes"),
    ],
)
def test_options_of_shards_that_exclude_each_other_are_refused(run, corpus, options, message):
    found = run("preprocess", "corpus.jsonl", "--tokenizer", "bytes", "-o", "c", *options)
    assert found.exit_code == 2
    assert message in found.stderr
