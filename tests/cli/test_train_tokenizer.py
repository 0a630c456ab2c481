import json


def test_it_says_what_it_made_and_uses_the_usual_special_token(run, corpus, tmp_path):
    found = run("train-tokenizer", "corpus.jsonl", "--vocab-size", 260, "--output", "t.json")
    assert found.exit_code == 0
    assert found.stdout.splitlines() == ["vocabulary 260, records 3, bad 0", "t.json"]
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
