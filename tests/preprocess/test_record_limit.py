"""Records beyond the size limit."""

import gzip
import json
import re
import subprocess
import sys
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.errors import ArgumentError, FormatError
from trackbed.preprocess import PreprocessConfig, TrainingConfig, preprocess, train_tokenizer
from trackbed.preprocess.chunks import plan_chunks
from trackbed.preprocess.inputs import find_inputs
from trackbed.preprocess.records import read_lines
from trackbed.tokens import IndexedDataset

COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def run(folder, name, **options):
    config = PreprocessConfig(inputs=(folder / name,), output=str(folder / "out"), **{"workers": 1, **options})
    return preprocess(config, ByteTokenizer())


def texts_in(folder):
    return [ByteTokenizer().detokenize(tokens) for tokens in IndexedDataset(str(folder / "out_text_document"))]


def line(text):
    return json.dumps({"text": text}).encode() + b"\n"


@given(
    lengths=st.lists(st.integers(0, 30), max_size=12),
    ends_open=st.booleans(),
    chunk_bytes=st.integers(1, 60),
    limit=st.integers(1, 30),
    end=st.sampled_from(list(COMPRESS)),
)
def test_lines_up_to_the_limit_are_read_and_longer_ones_are_one_bad_line_each(
    tmp_path, lengths, ends_open, chunk_bytes, limit, end
):
    lines = [bytes([97 + number]) * length + b"\n" for number, length in enumerate(lengths)]
    raw = b"".join(lines)
    if ends_open and raw:
        raw = raw[:-1]
    path = tmp_path / f"a.jsonl{end}"
    path.write_bytes(COMPRESS[end](raw))
    chunks = plan_chunks(find_inputs([path]).files, chunk_bytes=chunk_bytes, max_record_bytes=limit)
    found = [one for chunk in chunks for segment in chunk.segments for one in read_lines(segment, max_bytes=limit)]
    wanted = [one + b"\n" if len(one) <= limit else None for one in raw.split(b"\n")]
    if raw.endswith(b"\n") or not raw:
        wanted.pop()
    elif wanted[-1] is not None:
        wanted[-1] = wanted[-1][:-1]
        wanted = [one for one in wanted if one != b""]
    assert found == wanted


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("end", COMPRESS)
def test_a_long_line_is_an_error_with_its_number_or_is_left_out(tmp_path, end, workers):
    small = [line(f"{number}") for number in range(300)]
    raw = b"".join([*small, line("x" * 5_000), *small, line("y" * 9_000)])
    (tmp_path / f"a.jsonl{end}").write_bytes(COMPRESS[end](raw))
    options = {"max_record_bytes": 4_000, "chunk_bytes": 1_000, "workers": workers}
    with pytest.raises(FormatError, match=r"a\.jsonl\S*:301: a line must have at most 4,000 bytes, found more"):
        run(tmp_path, f"a.jsonl{end}", **options)
    assert [path.name for path in tmp_path.iterdir()] == [f"a.jsonl{end}"]
    report = run(tmp_path, f"a.jsonl{end}", skip_bad=True, **options)
    assert (report.records, report.bad) == (602, 2)
    assert [re.sub(r".*:(\d+):.*", r"\1", one) for one in report.first_bad] == ["301", "602"]
    assert texts_in(tmp_path) == [f"{number}" for number in range(300)] * 2
    assert run(tmp_path, f"a.jsonl{end}", **{**options, "max_record_bytes": 9_100}).bad == 0


@pytest.mark.parametrize("end", COMPRESS)
def test_a_long_plain_text_is_a_bad_record(tmp_path, end):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("small")
    (tmp_path / "in" / f"b.txt{end}").write_bytes(COMPRESS[end](b"x" * 11))
    with pytest.raises(FormatError, match=r"b\.txt\S*:1: a plain text must have at most 10 bytes, found more"):
        run(tmp_path, "in", max_record_bytes=10)
    assert run(tmp_path, "in", max_record_bytes=10, skip_bad=True).bad == 1
    assert texts_in(tmp_path) == ["small"]
    assert run(tmp_path, "in", max_record_bytes=11).bad == 0


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_a_long_cell_is_a_bad_record(tmp_path, kind):
    rows = ["a", "é" * 6, None, "b" * 11, "c" * 10]
    pq.write_table(pa.table({"text": pa.array(rows).cast(kind)}), tmp_path / "a.parquet")
    with pytest.raises(FormatError, match=r"a\.parquet:2: the value of 'text' must have at most 10 bytes, found 12"):
        run(tmp_path, "a.parquet", max_record_bytes=10)
    report = run(tmp_path, "a.parquet", max_record_bytes=10, skip_bad=True)
    assert (report.records, report.bad) == (5, 3)
    assert texts_in(tmp_path) == ["a", "c" * 10]


# One line or plain text of 2 GB, compressed without holding it in memory; a record follows it.
BEHIND = line("behind")


def compress_zeros(path, *, gigabytes, last):
    compressor = zlib.compressobj(1, wbits=31)
    block = b"0" * (1 << 24)
    with path.open("wb") as file:
        for _ in range(gigabytes * 60):
            file.write(compressor.compress(block))
        file.write(compressor.compress(last))
        file.write(compressor.flush())


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from trackbed.cli.main import main
main()
"""


@pytest.mark.parametrize(("name", "last"), [("a.jsonl.gz", b"\n" + BEHIND), ("a.txt.gz", b"")])
def test_a_line_of_gigabytes_in_a_small_file_takes_no_memory(tmp_path, name, last):
    (tmp_path / "in").mkdir()
    compress_zeros(tmp_path / "in" / name, gigabytes=2, last=last)
    (tmp_path / "in" / "b.jsonl").write_bytes(BEHIND)
    command = [sys.executable, "-c", LIMITED, "preprocess", "in", "--tokenizer", "bytes", "-o", "out", "--workers", "1"]
    command += ["--max-record-bytes", "100MB"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    what = "line" if "jsonl" in name else "plain text"
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith(f"trackbed: in/{name}:1: a {what} must have at most 100,000,000 bytes, found more\n")
    done = subprocess.run([*command, "--skip-bad"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "bad 1," in done.stdout
    assert texts_in(tmp_path) == ["behind"] * (1 + bool(last))


def test_a_long_line_of_a_plain_file_is_not_read_into_memory(tmp_path):
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.truncate(5 << 28)  # a hole: one line of zeros
        file.seek(0, 2)
        file.write(b"\n" + BEHIND)
    command = [sys.executable, "-c", LIMITED, "preprocess", "a.jsonl", "--tokenizer", "bytes", "-o", "out"]
    command += ["--workers", "1", "--skip-bad", "--max-record-bytes", "1.2GB"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "records 2, bad 1," in done.stdout
    assert texts_in(tmp_path) == ["behind"]


def test_training_a_tokenizer_has_the_same_limit(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(line("x" * 50) + line("the cat sat"))
    options = {"inputs": (tmp_path / "a.jsonl",), "vocab_size": 300, "max_record_bytes": 40}
    with pytest.raises(FormatError, match=r"a\.jsonl:1: a line must have at most 40 bytes, found more"):
        train_tokenizer(TrainingConfig(**options), tmp_path / "tokenizer.json")
    assert train_tokenizer(TrainingConfig(**options, skip_bad=True), tmp_path / "tokenizer.json").bad == 1


@pytest.mark.parametrize("kind", [PreprocessConfig, TrainingConfig])
def test_options_out_of_range_are_refused(tmp_path, kind):
    given = {"inputs": (tmp_path,), **({"output": "out"} if kind is PreprocessConfig else {})}
    with pytest.raises(ArgumentError, match="max_record_bytes must be at least 1, found 0"):
        kind(**given, max_record_bytes=0)
    with pytest.raises(ArgumentError, match="input_format must be one of jsonl, txt, parquet, or None, found 'csv'"):
        kind(**given, input_format="csv")
