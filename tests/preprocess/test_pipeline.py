import json
import subprocess
import sys
from multiprocessing import active_children

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.errors import ArgumentError, FormatError, PlanError, TrackbedError
from trackbed.files import new_partial
from trackbed.preprocess import PreprocessConfig, open_tokenizer, preprocess
from trackbed.tokens import IndexedDataset, verify_content

LEAVES_PARTIALS = """
from pathlib import Path
from trackbed.files import new_partial
for name in ("out_text_document.bin", "out_text_document.idx", "out_text_document.trackbed.json"):
    new_partial(Path(name)).write_text("unfinished")
"""


def run(folder, *inputs, tokenizer=None, **options):
    config = PreprocessConfig(
        inputs=tuple(folder / name for name in inputs), output=str(folder / "out"), **{"workers": 1, **options}
    )
    return preprocess(config, tokenizer or ByteTokenizer())


def texts_in(prefix, tokenizer=None):
    tokenizer = tokenizer or ByteTokenizer()
    return [tokenizer.detokenize(tokens) for tokens in IndexedDataset(str(prefix))]


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_texts_of_all_files_stand_in_their_order(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"text": "one"}, {"text": " two\n"}])
    (tmp_path / "b.txt").write_text("three\nlines\n")
    report = run(tmp_path, "b.txt", "a.jsonl")
    assert texts_in(tmp_path / "out_text_document") == ["three\nlines\n", "one", " two\n"]
    (output,) = report.outputs
    assert (output.documents, output.tokens, output.dropped) == (3, 20, 0)
    assert (report.files, report.records, report.blank, report.bad) == (2, 3, 0, 0)
    assert report.input_bytes == sum((tmp_path / name).stat().st_size for name in ("a.jsonl", "b.txt"))


def test_the_pair_is_sealed_and_holds_every_document_as_one_sequence(corpus, tmp_path):
    run(tmp_path, "corpus.jsonl")
    found = verify_content(str(tmp_path / "out_text_document"))
    assert (found.documents, found.sequences, found.dtype) == (4, 4, "uint16")


def test_tokens_are_those_that_the_tokenizer_makes_of_each_text(corpus, tmp_path, tokenizer_file):
    tokenizer = open_tokenizer(str(tokenizer_file))
    report = run(tmp_path, "corpus.jsonl", tokenizer=tokenizer, append_eod=True)
    texts = [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]
    wanted = [[*tokenizer.tokenize(text).tolist(), tokenizer.eod] for text in texts if text]
    assert [tokens.tolist() for tokens in IndexedDataset(str(tmp_path / "out_text_document"))] == wanted
    assert report.outputs[0].dropped == 1


def test_special_tokens_in_a_text_are_plain_text_unless_asked_for(corpus, tmp_path, tokenizer_file):
    for special_tokens in (False, True):
        tokenizer = open_tokenizer(str(tokenizer_file), special_tokens=special_tokens)
        run(tmp_path, "corpus.jsonl", tokenizer=tokenizer)
        tokens = np.concatenate(list(IndexedDataset(str(tmp_path / "out_text_document"))))
        assert (tokenizer.eod in tokens) is special_tokens


def test_each_key_gets_a_pair_whose_documents_correspond(corpus, tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"t": "x", "u": ""}, {"u": "y", "t": "z"}])
    report = run(tmp_path, "a.jsonl", json_keys=("u", "t"))
    assert texts_in(tmp_path / "out_t_document") == ["x", "z"]
    assert texts_in(tmp_path / "out_u_document") == ["", "y"]
    found = [(one.key, one.documents, one.dropped, one.empty) for one in report.outputs]
    assert found == [("u", 2, 0, 1), ("t", 2, 0, 0)]


def test_the_number_of_workers_and_the_size_of_chunks_change_no_byte(corpus, tmp_path, tokenizer_file):
    write_lines(tmp_path / "a.jsonl", [{"text": "the cat " * (number % 7)} for number in range(300)])
    tokenizer = open_tokenizer(str(tokenizer_file))
    found = []
    for workers, chunk_bytes in [(1, 1 << 20), (1, 100), (2, 3000), (3, 10_000)]:
        folder = tmp_path / f"{workers}_{chunk_bytes}"
        folder.mkdir()
        config = PreprocessConfig(
            inputs=(tmp_path / "a.jsonl", tmp_path / "corpus.jsonl"),
            output=str(folder / "out"),
            append_eod=True,
            workers=workers,
            chunk_bytes=chunk_bytes,
        )
        found.append((preprocess(config, tokenizer), files_in(folder)))
    reports, contents = zip(*found, strict=True)
    assert all(files == contents[0] for files in contents)
    assert len({(one.records, one.blank, one.outputs[0].tokens, one.outputs[0].dropped) for one in reports}) == 1


@settings(max_examples=25)
@given(
    lines=st.lists(st.sampled_from(['{"text": "a"}', '{"text": ""}', "", "bad", '{"text": 1}']), max_size=12),
    chunk_bytes=st.integers(1, 60),
)
def test_bad_records_are_reported_with_their_lines_however_the_file_is_cut(tmp_path, lines, chunk_bytes):
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    report = run(tmp_path, "a.jsonl", skip_bad=True, allow_empty=True, chunk_bytes=chunk_bytes)
    bad = [number for number, line in enumerate(lines, start=1) if line in ("bad", '{"text": 1}')]
    assert [int(message.partition("a.jsonl:")[2].split(":")[0]) for message in report.first_bad] == bad
    assert report.bad == len(bad)
    assert report.outputs[0].documents == lines.count('{"text": "a"}')
    assert report.outputs[0].dropped == lines.count('{"text": ""}')


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_bad_record_is_an_error_with_file_and_line_and_leaves_nothing(tmp_path, workers):
    write_lines(tmp_path / "a.jsonl", [{"text": "fine" * 100}] * 50)
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n' * 300 + '\n{"body": "x"}\n' + "bad\n" * 50)
    before = files_in(tmp_path)
    with pytest.raises(FormatError) as caught:
        run(tmp_path, "a.jsonl", "b.jsonl", workers=workers, chunk_bytes=1000)
    assert str(caught.value) == f"{tmp_path}/b.jsonl:302: a record must have the key 'text', found 'body'"
    assert files_in(tmp_path) == before


def test_a_failure_leaves_the_pair_that_was_there(corpus, tmp_path):
    run(tmp_path, "corpus.jsonl")
    before = files_in(tmp_path)
    (tmp_path / "bad.jsonl").write_text("bad\n")
    with pytest.raises(FormatError):
        run(tmp_path, "bad.jsonl")
    (tmp_path / "bad.jsonl").unlink()
    assert files_in(tmp_path) == before


def test_what_a_killed_run_left_is_removed_and_what_runs_is_not(corpus, tmp_path):
    subprocess.run([sys.executable, "-c", LEAVES_PARTIALS], cwd=tmp_path, check=True)
    running = new_partial(tmp_path / "out_text_document.bin")
    running.write_text("x")
    assert len(list(tmp_path.glob("*.partial"))) == 4
    run(tmp_path, "corpus.jsonl")
    assert list(tmp_path.glob("*.partial")) == [running]


def test_of_many_bad_records_twenty_are_listed_and_all_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text("bad\n" * 50)
    report = run(tmp_path, "a.jsonl", skip_bad=True, allow_empty=True)
    assert (report.bad, len(report.first_bad)) == (50, 20)


@pytest.mark.parametrize("text", ["", "bad\n", '{"text": ""}\n'])
def test_a_pair_without_a_document_is_written_only_where_that_is_allowed(tmp_path, text):
    write_lines(tmp_path / "b.jsonl", [{"text": "old"}])
    run(tmp_path, "b.jsonl")
    before = files_in(tmp_path)
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(PlanError, match=r"out_text_document: a pair must have at least one document, found none in"):
        run(tmp_path, "a.jsonl", skip_bad=True)
    assert files_in(tmp_path) == {**before, "a.jsonl": text.encode()}
    report = run(tmp_path, "a.jsonl", workers=2, skip_bad=True, allow_empty=True)
    assert report.outputs[0].documents == 0
    assert verify_content(str(tmp_path / "out_text_document")).documents == 0


def test_a_key_without_a_document_is_named(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"text": "one", "title": ""}])
    with pytest.raises(PlanError, match=r"out_title_document: a pair must have at least one document"):
        run(tmp_path, "a.jsonl", json_keys=("text", "title"))
    assert list(files_in(tmp_path)) == ["a.jsonl"]


def test_progress_begins_at_nothing_and_ends_at_everything(corpus, tmp_path):
    seen = []
    config = PreprocessConfig(inputs=(corpus,), output=str(tmp_path / "out"), workers=1, chunk_bytes=50)
    preprocess(config, ByteTokenizer(), progress=lambda done, total: seen.append((done, total)))
    size = corpus.stat().st_size
    assert (seen[0], seen[-1]) == ((0, size), (size, size))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_plain_texts_cannot_fill_several_keys(corpus, tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ArgumentError, match=r"a\.txt: a plain text has one text, json_keys asks for 2"):
        run(tmp_path, "a.txt", json_keys=("text", "title"))


@pytest.mark.parametrize("shard_bytes", [None, 1000])
def test_the_folder_of_the_output_is_made(corpus, tmp_path, shard_bytes):
    output = tmp_path / "new" / "deep" / "out"
    preprocess(
        PreprocessConfig(inputs=(corpus,), output=str(output), workers=1, shard_bytes=shard_bytes), ByteTokenizer()
    )
    assert list(output.parent.glob("out*.idx"))


@pytest.mark.parametrize("shard_bytes", [None, 1000])
def test_a_folder_of_the_output_that_cannot_be_made_is_an_error_before_any_work(corpus, tmp_path, shard_bytes):
    (tmp_path / "file").touch()
    config = PreprocessConfig(
        inputs=(corpus,), output=str(tmp_path / "file" / "out"), workers=1, shard_bytes=shard_bytes
    )
    seen = []
    with pytest.raises(ArgumentError, match="file: the folder of the output must exist or be one that can be made"):
        preprocess(config, ByteTokenizer(), progress=lambda *done: seen.append(done))
    assert seen == []


def test_a_worker_that_is_killed_is_an_error_that_names_the_chunk_and_leaves_nothing(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"text": "x" * 100}] * 2000)
    config = PreprocessConfig(inputs=(tmp_path / "a.jsonl",), output=str(tmp_path / "out"), workers=2, chunk_bytes=2000)

    def kill_a_worker(done, total):
        if done:
            active_children()[0].kill()

    with pytest.raises(TrackbedError, match=r"a\.jsonl: bytes \[\d+, \d+\): a worker process .* killed by signal 9"):
        preprocess(config, ByteTokenizer(), progress=kill_a_worker)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_line_of_many_megabytes_is_one_document(tmp_path):
    long = "the cat " * 2_000_000
    write_lines(tmp_path / "a.jsonl", [{"text": "first"}, {"text": long}, {"text": "last"}])
    report = run(tmp_path, "a.jsonl", workers=2)
    assert [len(tokens) for tokens in IndexedDataset(str(tmp_path / "out_text_document"))] == [5, len(long), 4]
    assert report.records == 3


def test_preprocessing_does_not_load_torch():
    program = "import sys, trackbed.preprocess; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
