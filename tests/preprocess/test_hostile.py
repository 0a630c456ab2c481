"""Hostile texts and archives: each becomes a pair, or an error of one sentence."""

import gzip
import json
import os
import random
import struct
import warnings

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.support.hostile.hostile import Case, check, run_cases
from trackbed.tokens import verify_content

FAST, FULL = 10, 110
WORDS = ["the", "cat", "Straße", "東京", "🙂", "<|endoftext|>", "\u2028", "\x00", "\ufeff", "e\u0301"]


def records(draw, count=200):
    """Returns the bytes of valid records."""
    texts = (" ".join(draw.choices(WORDS, k=draw.randrange(20))) for _ in range(count))
    return b"".join(json.dumps({"text": text, "n": 1}, ensure_ascii=False).encode() + b"\n" for text in texts)


def change_bytes(draw, raw):
    """Changes bytes, and deletes or duplicates parts."""
    found = bytearray(raw)
    for _ in range(draw.choice([1, 1, 5, 50])):
        if not found:
            break
        at = draw.randrange(len(found))
        if draw.random() < 0.7:
            found[at] = draw.randrange(256)
        elif draw.random() < 0.5:
            del found[at : at + draw.randrange(300)]
        else:
            found[at:at] = found[at : at + draw.randrange(300)]
    return bytes(found)


def odd_lines(draw):
    """Returns lines at or beyond the edge of JSON."""
    lines = [
        b"[" * 100_000,
        b'{"text": ' * 50_000,
        b'{"text": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"text": ' + b"9" * 100_000 + b"}",
        b'{"text": 1e99999}',
        b'{"text": "\\ud800"}',
        b'{"text": "\xed\xa0\x80"}',
        b'{"text": "a", "text": "b"}',
        b'{"text": "' + b"\\u0000" * 50_000 + b'"}',
        b"{" + b",".join(b'"k%d": 0' % n for n in range(50_000)) + b', "text": "x"}',
        b'"text"',
        b"null",
        b"NaN",
        b"\x00" * 100_000,
        b"\xff\xfe{\x00",
        b"\r\r\r",
        b'{"text": "x"}\r',
        b'{"text": "' + b"x" * 3_000_000 + b'"}',
        b"\n" * 200_000,
        b" \t" * 200_000,
    ]
    return b"\n".join(draw.choices([*lines, records(draw, 5)], k=draw.randrange(1, 6)))


def compress_gzip(draw, raw):
    """Returns a gzip file of several members, with or without trailing garbage."""
    parts = [gzip.compress(raw[at : at + 3000]) for at in range(0, len(raw), 3000)]
    parts.insert(0, draw.choice([b"", gzip.compress(b"") * 5_000, gzip.compress(b"\0" * (40 << 20)), b"\x1f\x8b"]))
    return b"".join(parts) + draw.choice([b"", b"", b"\0" * 1000, b"rubbish", raw[:50]])


def compress_zstandard(draw, raw):
    """Returns a Zstandard file of several frames, some of which state a wrong size."""
    skipped = struct.pack("<II", 0x184D2A50, 7) + b"skipped"
    huge = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**60)  # a frame of an exbibyte
    window = b"\x28\xb5\x2f\xfd\x00\xff"  # requires a window of terabytes
    zeros = zstandard.compress(b"\0" * (300 << 20))
    first = draw.choice([b"", skipped, skipped * 5000, huge, window, zeros, zstandard.compress(b"") * 5000])
    return first + zstandard.compress(raw) + draw.choice([b"", b"", skipped, b"rubbish", b"\x28\xb5\x2f\xfd"])


def make_parquet(draw, path):
    """Writes a Parquet file of an odd table."""
    texts = [draw.choice(["x" * draw.randrange(2000), "é", "", None]) for _ in range(200)]
    column = pa.array(texts)
    table = draw.choice(
        [
            pa.table({"text": column}),
            pa.table([column, column], names=["text", "text"]),
            pa.table({"text": column.dictionary_encode()}),
            pa.table({"text": pa.array(["y" * (1 << 20)]).dictionary_encode().take(pa.array([0] * 1500))}),
            pa.table({"text": pa.array([[one] for one in texts])}),
            pa.table({"text": pa.StructArray.from_arrays([column], ["text"])}),
            pa.table({"text": pa.array(range(200))}),
            pa.table({"text": pa.nulls(200)}),
            pa.table({"text": pa.array([b"\xff\xfe", b"a"]).view(pa.string())}),
            pa.table({f"c{n}": column for n in range(300)}),
            pa.table({}),
        ]
    )
    pq.write_table(
        table,
        path,
        row_group_size=draw.choice([1, 50, 10_000]),
        use_dictionary=len(table) > 1000 or draw.random() < 0.5,
    )


def write_tree(draw, folder):
    """Writes files of odd names and kinds."""
    inside = folder / "in.jsonl"  # a folder of that name
    inside.mkdir()
    for name in (b"a\nb.jsonl", b"\xff\xfe.jsonl", b"x" * 240 + b".jsonl", b" .jsonl", b"-o.jsonl", b"unknown"):
        with open(os.path.join(os.fsencode(inside), name), "wb") as file:  # noqa: PTH118, PTH123  names of any bytes
            file.write(records(draw, 3))
    odd = draw.choice(["pipe", "loop", "gone", "folder", "none"])
    if odd == "pipe":
        os.mkfifo(inside / "pipe.jsonl")
    elif odd == "folder":
        (inside / "f.txt").mkdir()
    elif odd != "none":
        (inside / "loop.jsonl").symlink_to("loop.jsonl" if odd == "loop" else "gone.jsonl")
    return inside


def hostile_input(folder, seed):
    """Writes an input. Returns its name and its kind."""
    draw = random.Random(seed)
    kind = draw.choice(
        ["lines", "lines", "text", "gzip", "gzip", "zstandard", "zstandard", "parquet", "parquet", "tree"]
    )
    raw = draw.choice([records, odd_lines])(draw)
    if draw.random() < 0.3:
        raw = change_bytes(draw, raw)
    if kind == "tree":
        return write_tree(draw, folder).name, kind
    suffix = {"lines": ".jsonl", "text": ".txt", "parquet": ".parquet"}.get(
        kind, draw.choice([".jsonl", ".jsonl", ".txt"])
    )
    path = folder / f"in{suffix}{ {'gzip': '.gz', 'zstandard': '.zst'}.get(kind, '') }"
    if kind == "parquet":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make_parquet(draw, path)
    else:
        path.write_bytes(
            {"gzip": compress_gzip, "zstandard": compress_zstandard}.get(kind, lambda _, raw: raw)(draw, raw)
        )
    if draw.random() < 0.6:
        path.write_bytes(change_bytes(draw, path.read_bytes()))
    return path.name, kind


def cases(folder, seeds):
    for seed in seeds:
        draw = random.Random(seed + 1)
        here = folder / str(seed)
        here.mkdir()
        name, kind = hostile_input(here, seed)
        command = [
            "preprocess",
            name,
            "--tokenizer",
            "bytes",
            "-o",
            "out",
            "--workers",
            draw.choice(["1", "1", "1", "2"]),
        ]
        command += ["--max-record-bytes", draw.choice(["1GiB", "1GiB", "100KB", "100KB", "1"])]
        yield Case(here, command, f"seed {seed}: {kind}")
        yield Case(here, [*command, "--skip-bad"], f"seed {seed}: {kind}")
        yield Case(
            here, [*command, "--skip-bad", "--format", draw.choice(["jsonl", "txt", "parquet"])], f"seed {seed}: {kind}"
        )


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(FAST), id="some"),
        pytest.param(range(FAST, FAST + FULL), id="many", marks=pytest.mark.slow),
    ],
)
def test_hostile_texts_and_archives_become_a_pair_or_one_sentence(tmp_path, seeds):
    outcomes = run_cases(list(cases(tmp_path, seeds)))
    counts = check(outcomes)
    assert counts[0] > len(seeds) / 4
    assert counts[1] > len(seeds) / 4
    for outcome in outcomes:
        names = {path.name for path in outcome.case.folder.iterdir() if path.name.startswith("out")}
        names.discard("out.unfinished")  # saved work of a failed run
        assert names in (set(), {"out_text_document.bin", "out_text_document.idx", "out_text_document.trackbed.json"})
        if outcome.code == 0:
            assert verify_content(str(outcome.case.folder / "out_text_document")).documents > 0
        else:
            said = [line for line in outcome.stderr.splitlines() if line.startswith("trackbed: ")]
            assert len([line for line in said if "are replaced once" not in line]) == 1
