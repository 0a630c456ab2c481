from pathlib import Path

import pytest

from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.tokens import IndexedDataset, verify_content


def make(run, folder, prefix, *texts):
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    names = [f"{number}.txt" for number in range(len(texts))]
    run("preprocess", *names, "--tokenizer", "bytes", "--output", prefix, "--workers", 1)


def texts_in(prefix):
    return [ByteTokenizer().detokenize(tokens) for tokens in IndexedDataset(prefix)]


def test_pairs_become_one_in_the_order_given(run, tmp_path):
    make(run, tmp_path, "a", "one", "two")
    make(run, tmp_path, "b", "three")
    found = run("merge", "b_text_document", "a_text_document.bin", "--output", "all")
    assert (found.exit_code, found.stdout) == (0, "pairs 2\nall.bin\nall.idx\n")
    assert texts_in("all") == ["three", "one", "two"]
    assert verify_content("all").documents == 3


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_of_the_output_stands_for_its_pair(run, pair, suffix):
    found = run("merge", pair, "--output", f"all{suffix}")
    assert (found.exit_code, found.stdout) == (0, "pairs 1\nall.bin\nall.idx\n")
    assert verify_content("all").documents == 2


def test_a_folder_of_pairs_can_be_merged_into_itself_again_and_again(run, tmp_path):
    (tmp_path / "pairs").mkdir()
    make(run, tmp_path, "pairs/b", "two")
    make(run, tmp_path, "pairs/a", "one")
    for _ in range(2):
        assert run("merge", "pairs", "--output", "pairs/all").exit_code == 0
        assert texts_in("pairs/all") == ["one", "two"]


def test_a_list_of_shards_is_merged_to_the_pair_written_without_shards(run, corpus):
    options = ["--tokenizer", "bytes", "--json-keys", "text,title", "--workers", 1]
    run("preprocess", "corpus.jsonl", "-o", "whole", *options)
    assert run("preprocess", "corpus.jsonl", "-o", "c", "--shard-bytes", "30", *options).exit_code == 0
    for key in ("text", "title"):
        found = run("merge", "c.toml", "--json-key", key, "-o", "all")
        assert found.stdout.splitlines()[0] == "pairs 3"
        for suffix in (".bin", ".idx"):
            assert Path(f"all{suffix}").read_bytes() == Path(f"whole_{key}_document{suffix}").read_bytes()
    refused = run("merge", "c.toml", "-o", "x")
    assert "must be one of those listed ('text', 'title'), found none was named" in refused.stderr
    assert run("merge", "all", "--json-key", "text", "-o", "x").exit_code == 2
    assert run("verify", "--content", "c.toml").exit_code == 0


def test_a_damaged_pair_is_an_error_and_leaves_nothing(run, pair):
    Path(pair + ".bin").write_bytes(b"x")
    before = sorted(Path().iterdir())
    found = run("merge", pair, "--output", "all")
    assert found.exit_code == 1
    assert found.stderr.startswith(f"trackbed: {pair}.bin: ")
    assert sorted(Path().iterdir()) == before


def test_a_pair_that_is_not_there_is_an_error_that_names_its_file(run):
    found = run("merge", "gone", "--output", "all")
    assert (found.exit_code, found.stderr) == (
        1,
        "trackbed: gone: a .bin and an .idx file must exist, missing gone.idx and gone.bin\n",
    )
