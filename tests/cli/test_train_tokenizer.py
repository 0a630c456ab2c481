import json


def test_it_says_what_it_made_and_uses_the_usual_special_token(run, corpus, tmp_path):
    found = run("train-tokenizer", "corpus.jsonl", "--vocab-size", 260, "--output", "t.json")
    assert found.exit_code == 0
    assert found.stdout.splitlines() == ["vocabulary 260, records 3, bad 0", "files: 1 JSON lines", "t.json"]
    made = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert [token["content"] for token in made["added_tokens"]] == ["<|endoftext|>"]


def test_special_tokens_replace_the_usual_one(run, corpus, tmp_path):
    options = ["--special-token", "<pad>", "--special-token", "</s>"]
    run("train-tokenizer", "corpus.jsonl", "--vocab-size", 300, "--output", "t.json", *options)
    made = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert [token["content"] for token in made["added_tokens"]] == ["<pad>", "</s>"]


def test_too_small_a_vocabulary_is_refused(run, corpus):
    found = run("train-tokenizer", "corpus.jsonl", "--vocab-size", 10, "--output", "t.json")
    assert found.exit_code == 1
    assert found.stderr == "trackbed: vocab_size must be at least 257 for the bytes and special tokens, found 10\n"


def test_it_reads_a_folder_as_preprocess_does(run, tmp_path):
    for name in ("in/a.jsonl", "disk/b.jsonl", "in/_temporary/c.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    (tmp_path / "in" / "books").symlink_to("../disk")
    found = run("train-tokenizer", "in", "in/a.jsonl", "--vocab-size", 260, "--output", "t.json")
    assert found.stdout.splitlines()[:2] == [
        "vocabulary 260, records 2, bad 0",
        "files: 2 JSON lines; left out: 1 hidden (in/_temporary), 1 given twice (in/a.jsonl)",
    ]
    (tmp_path / "in" / "gone").symlink_to("nowhere")
    refused = run("train-tokenizer", "in", "--vocab-size", 260, "--output", "t.json")
    assert (refused.exit_code, "in/gone: a link must lead to" in refused.stderr) == (1, True)
