import json
from pathlib import Path

from tests.support.files.blends import build, gpt_config, write_pairs


def test_it_shows_counts_and_a_histogram_of_lengths(run, pair):
    found = run("inspect", pair)
    assert found.exit_code == 0
    assert "documents 2, sequences 2, tokens 5 of uint16" in found.stdout
    assert "documents of 2 to 3 tokens, 2.5 on average" in found.stdout
    (row,) = [line for line in found.stdout.splitlines() if line.lstrip().startswith("2 to 3")]
    assert row.split()[3] == "2"
    assert "\u2588" in row
    assert max(map(len, found.stdout.splitlines())) <= 80


def test_it_decodes_the_first_documents(run, pair):
    found = run("inspect", pair, "--tokenizer", "bytes", "--documents", 1, "--max-tokens", 2)
    assert found.stdout.splitlines()[-2:] == ["document 0, tokens 3:", "  ab ..."]


def test_programs_get_json(run, pair):
    found = json.loads(run("inspect", pair, "--json", "--tokenizer", "bytes").stdout)
    assert (found["documents"], found["tokens"], found["dtype"]) == (2, 5, "uint16")
    assert found["histogram"] == [{"shortest": 2, "longest": 3, "documents": 2}]
    assert found["first_documents"][1] == {"tokens": 2, "text": "de", "whole": True}


def test_text_that_the_mask_leaves_out_is_marked(run, pair, tmp_path):
    (tmp_path / "mask.lsm").write_bytes(bytes([0, 1, 1, 0, 1]))
    run("seal", pair, "--mask", str(tmp_path / "mask.lsm"))
    shown = run("inspect", pair, "--tokenizer", "bytes", "--max-tokens", 2).stdout.splitlines()
    assert shown[-4:] == ["document 0, tokens 3:", "  {-a-}b ...", "document 1, tokens 2:", "  {-d-}e"]
    (first, _) = json.loads(run("inspect", pair, "--json", "--tokenizer", "bytes").stdout)["first_documents"]
    assert first["text"] == "abc"
    assert first["runs"] == [{"text": "a", "counts": False}, {"text": "bc", "counts": True}]


def test_json_without_a_tokenizer_has_no_texts(run, pair):
    assert "first_documents" not in json.loads(run("inspect", pair, "--json").stdout)


def test_control_characters_of_a_text_do_not_reach_the_terminal(run, corpus):
    corpus.write_text(json.dumps({"text": "a\x1b[31m\nb [bold]"}) + "\n")
    run("preprocess", "corpus.jsonl", "--tokenizer", "bytes", "--output", "made", "--workers", 1)
    found = run("inspect", "made_text_document", "--tokenizer", "bytes")
    assert found.stdout.splitlines()[-1] == r"  a\x1b[31m\nb [bold]"


def test_the_tokenizer_of_another_pair_is_an_error(run, corpus):
    run("train-tokenizer", "corpus.jsonl", "--vocab-size", 300, "--output", "t.json")
    corpus.write_text(json.dumps({"text": "abc"}) + "\n")
    options = ["--append-eod", "--workers", 1]
    run("preprocess", "corpus.jsonl", "--tokenizer", "t.json", "--eod-token", "abc", "-o", "made", *options)
    found = run("inspect", "made_text_document", "--tokenizer", "bytes")
    assert found.exit_code == 1
    assert "tokens must be integers in [0, 257) to be this tokenizer's, found 25" in found.stderr


def test_an_empty_pair_has_no_histogram(run, corpus):
    corpus.write_text("")
    run("preprocess", "corpus.jsonl", "--tokenizer", "bytes", "--output", "made", "--workers", 1, "--allow-empty")
    found = run("inspect", "made_text_document")
    assert (found.exit_code, len(found.stdout.splitlines())) == (0, 3)


def test_a_damaged_pair_is_an_error(run, pair):
    Path(pair + ".idx").write_bytes(b"x" * 100)
    found = run("inspect", pair)
    assert found.exit_code == 1
    assert found.stderr.startswith(f"trackbed: {pair}.idx: the magic must be ")


def test_a_folder_stands_for_its_only_pair(run, pair, tmp_path):
    assert run("inspect", ".").stdout == run("inspect", pair).stdout
    (tmp_path / "other.idx").write_bytes(b"")
    assert run("inspect", ".").exit_code == 2


def test_an_end_of_document_token_without_a_tokenizer_is_refused(run, pair):
    assert run("inspect", pair, "--eod-token", "x").exit_code == 2


def test_the_counts_of_many_pairs_are_written_for_a_job(run, tmp_path):
    prefixes = write_pairs(tmp_path)
    found = run("inspect", *prefixes, "--counts-json", "counts.json")
    assert (found.exit_code, found.stdout) == (0, "counts.json: counts of 3 pairs\n")
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert list(counts) == prefixes
    blend = {"blend_per_split": [(prefixes, [3, 2, 1]), None, None], "sequences_per_dataset": counts}
    (train, *_) = build(gpt_config(tmp_path / "cache", **blend), [50, 0, 0])
    assert len(train) >= 50


def test_a_pair_that_is_not_there_leaves_no_counts(run, tmp_path):
    found = run("inspect", "missing", "--counts-json", "counts.json")
    assert found.exit_code == 1
    assert "missing.bin" in found.stderr
    assert not list(tmp_path.glob("counts.json*"))


def test_of_a_list_of_shards_it_shows_the_counts_of_each_key(run, corpus):
    options = ["--tokenizer", "bytes", "--workers", 1, "--shard-bytes", "30B"]
    run("preprocess", "corpus.jsonl", "-o", "one", *options)
    found = run("inspect", "one.toml")
    assert (found.exit_code, found.stdout) == (0, "one.toml: shards 3, documents 2, tokens 5 of uint16\n")
    run("preprocess", "corpus.jsonl", "-o", "two", "--json-keys", "text,title", *options)
    assert run("inspect", "two.toml").stdout.splitlines() == [
        "two.toml, key text: shards 3, documents 3, tokens 5 of uint16",
        "two.toml, key title: shards 3, documents 3, tokens 3 of uint16",
    ]
    keys = json.loads(run("inspect", "two.toml", "--json").stdout)["keys"]
    assert keys[1] == {"key": "title", "shards": 3, "documents": 3, "tokens": 3, "dtype": "uint16"}
    assert run("inspect", "one.toml", "--tokenizer", "bytes").exit_code == 2
    Path("one-00001-of-00003_text_document.idx").unlink()
    assert "one-00001-of-00003_text_document.idx" in run("inspect", "one.toml").stderr


def test_limits_are_shown_also_of_a_file_system(run, pair):
    found = run("inspect", "--limits", pair)
    assert found.exit_code == 0
    maps, files, of_pair = found.stdout.splitlines()
    assert maps.startswith("memory maps: up to ")
    assert files.startswith("open files: up to ")
    assert of_pair.endswith("its file system allows as many maps as a process takes")
    assert run("inspect", "--limits", f"{pair}.bin").stdout.splitlines()[2] == of_pair
    stored = run("inspect", "--limits", "s3://bucket/pair")
    assert (stored.exit_code, "must be a pair in a file system" in stored.stderr) == (1, True)
    assert run("inspect", "--limits", "--json", pair).exit_code == 2
    missing = run("inspect")
    assert (missing.exit_code, "Missing argument 'PREFIX...'" in missing.output) == (2, True)
