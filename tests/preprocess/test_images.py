"""Pairs of texts and images."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiers import with_files
from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.errors import ArgumentError, FormatError
from trackbed.preprocess import (
    ImagesConfig,
    PreprocessConfig,
    first_documents,
    inspect_pair,
    open_splitter,
    preprocess,
)
from trackbed.tokens import IndexedDataset, verify_content


@pytest.fixture
def folder(tmp_path):
    """Three images of 0, 5 and 8 bytes, one of them in a folder below."""
    (tmp_path / "images" / "below").mkdir(parents=True)
    for name, data in (
        ("z.png", b""),
        ("a.png", b"\x01\x02\x03\x04\xff"),
        ("below/m.jpg", b"\xff\xff\xff\x7f\x00\x00\x00\x80"),
    ):
        (tmp_path / "images" / name).write_bytes(data)
    return tmp_path


def write_lines(folder, *records):
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def run(folder, *, key="image", pad_length=4, images=None, splitter=None, progress=None, **options):
    images = ImagesConfig(folder=images or folder / "images", pad_length=pad_length, key=key)
    given = {"inputs": (folder / "a.jsonl",), "output": str(folder / "made"), "workers": 1, "append_eod": True}
    config = PreprocessConfig(images=images, **{**given, **options})
    return preprocess(config, ByteTokenizer(), splitter=splitter, progress=progress)


def sequences_of(folder):
    """The numbers and the mode of each sequence."""
    return [(tokens.tolist(), int(mode)) for tokens, mode in IndexedDataset(str(folder / "made"), multimodal=True)]


def files(folder):
    return [(folder / f"made.{end}").read_bytes() for end in ("bin", "idx", "trackbed.json")]


def test_a_document_has_a_text_and_the_image_that_its_record_names(folder):
    write_lines(
        folder,
        {"text": "abcdef", "image": "below/m.jpg"},
        {"text": "ab", "image": "a.png"},
        {"text": "abcd", "image": "z.png"},
        {"text": "", "image": "a.png"},
    )
    report = run(folder)
    image = [3, 0x04030201, 0xFF]
    assert sequences_of(folder) == [
        ([97, 98, 99, 100], 0),
        ([0, 2**31 - 1, -(2**31)], 1),
        ([97, 98, 256, 256], 0),
        (image, 1),
        ([97, 98, 99, 100], 0),
        ([0], 1),
        ([], 0),
        (image, 1),
    ]
    dataset = IndexedDataset(str(folder / "made"), multimodal=True)
    assert dataset.index.dtype == np.int32
    assert dataset.document_indices.tolist() == [0, 2, 4, 6, 8]
    (output,) = report.outputs
    assert (output.prefix, output.documents, output.sequences, output.dropped) == (str(folder / "made"), 4, 8, 0)
    assert verify_content(output.prefix).tokens == output.tokens == 22


def test_without_an_end_token_texts_keep_their_length(folder, caplog):
    write_lines(folder, {"text": "abcdef", "image": "z.png"}, {"text": "ab", "image": "z.png"})
    run(folder, append_eod=False)
    assert [len(tokens) for tokens, mode in sequences_of(folder) if mode == 0] == [6, 2]
    assert "without --append-eod, --pad-length has no effect" in caplog.text


def test_keys_may_be_named(folder):
    write_lines(folder, {"caption": "ab", "file": "a.png", "text": 1})
    run(folder, key="file", json_keys=("caption",), pad_length=2)
    assert sequences_of(folder) == [([97, 98], 0), ([3, 0x04030201, 0xFF], 1)]


@with_files
@given(data=st.binary(max_size=40))
def test_the_bytes_of_an_image_can_be_restored(tmp_path, data):
    (tmp_path / "images").mkdir(exist_ok=True)
    (tmp_path / "images" / "i").write_bytes(data)
    write_lines(tmp_path, {"text": "a", "image": "i"})
    run(tmp_path)
    _, (numbers, mode) = sequences_of(tmp_path)
    raw = np.array(numbers[1:], dtype="<i4").tobytes()
    assert (raw[: len(raw) - numbers[0]], mode) == (data, 1)
    assert raw == data + bytes(numbers[0])
    assert numbers[0] == -len(data) % 4


@pytest.mark.parametrize("name", ["../a.jsonl", "below/../a.png", "..", "/etc/passwd", "", ".", "a\0b"])
def test_a_path_that_may_leave_the_folder_is_an_error_that_names_line_and_file(folder, name):
    write_lines(folder, {"text": "a", "image": "z.png"}, {"text": "a", "image": name})
    with pytest.raises(FormatError, match=r"a\.jsonl:2: the image must be the path of a file below .*images, found"):
        run(folder)
    assert not (folder / "made.bin").exists()
    report = run(folder, skip_bad=True)
    assert (report.bad, report.outputs[0].documents) == (1, 1)


def test_a_link_out_of_the_folder_is_an_error_and_one_inside_is_not(folder):
    (folder / "secret").write_bytes(b"s")
    (folder / "others").mkdir()
    (folder / "others" / "i").write_bytes(b"s")
    (folder / "images" / "out").symlink_to(folder / "secret")
    (folder / "images" / "outside").symlink_to(folder / "others")
    (folder / "images" / "inside").symlink_to("a.png")
    (folder / "images" / "self").symlink_to("self")
    names = ["inside", "out", "outside/i", "self"]
    write_lines(folder, *({"text": "a", "image": name} for name in names))
    report = run(folder, skip_bad=True)
    assert sequences_of(folder)[1:] == [([3, 0x04030201, 0xFF], 1)]
    assert [message.split(": ", 1)[1] for message in report.first_bad] == [
        f"the image 'out' must be a file below {folder}/images, found a link to {folder}/secret",
        f"the image 'outside/i' must be a file below {folder}/images, found a link to {folder}/others/i",
        f"the image 'self' must be a file below {folder}/images, found: Too many levels of symbolic links",
    ]


def test_the_folder_itself_may_be_a_link(folder):
    (folder / "linked").symlink_to("images")
    write_lines(folder, {"text": "a", "image": "below/m.jpg"})
    run(folder, images=folder / "linked")
    assert len(sequences_of(folder)) == 2


def test_files_that_are_missing_or_none_are_errors_that_name_line_and_file(folder):
    os.mkfifo(folder / "images" / "pipe")
    names = ["missing.png", "a.png/x", "below", "pipe", "x" * 300]
    write_lines(
        folder, {"text": "a", "image": "a.png"}, *({"text": "a", "image": name} for name in names), {"text": "a"}
    )
    report = run(folder, skip_bad=True)
    found = [message.removeprefix(f"{folder}/a.jsonl:") for message in report.first_bad]
    wanted = [
        f"2: the image 'missing.png' must be a file below {folder}/images, found: No such file or directory",
        f"3: the image 'a.png/x' must be a file below {folder}/images, found: Not a directory",
        f"4: {folder}/images/below: must be a regular file, found a folder",
        f"5: {folder}/images/pipe: must be a regular file, found a pipe",
        f"6: the image '{'x' * 300}' must be a file below {folder}/images, found: File name too long",
        "7: a record must have the key 'image', found 'text'",
    ]
    assert found == wanted


def test_an_image_over_the_limit_is_a_bad_record(folder):
    (folder / "images" / "large").write_bytes(bytes(101))
    write_lines(folder, {"text": "a", "image": "large"})
    with pytest.raises(FormatError, match="the image 'large' must have at most 100 bytes, found 101"):
        run(folder, max_record_bytes=100)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"pad_length": 0}, "pad_length must be at least 1, found 0"),
        ({"key": ""}, "the key of the images must have at least one character"),
        ({"key": "text"}, "the key of the images must not be that of the texts, found 'text' for both"),
        ({"json_keys": ("text", "title")}, "json_keys must be one key if records have images"),
        ({"splitter": open_splitter()}, "texts with images must be whole, found a splitter"),
        ({"input_format": "txt"}, "records with images must be JSON lines, found a text file"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_any_work(folder, options, found):
    write_lines(folder, {"text": "a", "image": "a.png"})
    before = sorted(folder.iterdir())
    with pytest.raises(ArgumentError, match=found):
        run(folder, **options)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("name", ["nothing", "a.jsonl"])
def test_the_folder_must_be_one(folder, name):
    write_lines(folder, {"text": "a", "image": "a.png"})
    with pytest.raises(ArgumentError, match=f"{name}: the images must be in a folder, found"):
        run(folder, images=folder / name)


def many(folder, count=60, size=20_000):
    for number in range(count):
        data = np.random.default_rng(number).bytes(size + number)
        (folder / "images" / f"{number}.png").write_bytes(data)
    write_lines(folder, *({"text": f"text {n} " * (n % 40), "image": f"{n}.png"} for n in reversed(range(count))))


def test_the_bytes_are_the_same_for_any_number_of_workers(folder):
    many(folder)
    made = []
    for workers, chunk_bytes in ((1, 1 << 20), (2, 500), (3, 2000)):
        run(folder, workers=workers, chunk_bytes=chunk_bytes)
        made.append(files(folder))
    assert made[0] == made[1] == made[2]


def test_inspect_counts_modes_and_decodes_texts_only(folder):
    many(folder, 3, 100)
    run(folder, pad_length=6)
    found = inspect_pair(str(folder / "made"))
    assert (found.documents, found.sequences, found.modes) == (3, 6, {0: 3, 1: 3})
    first = first_documents(str(folder / "made"), ByteTokenizer(), num_documents=3, max_tokens=5)
    assert [(one.tokens, one.text, one.whole) for one in first] == [
        (6, "text ", False),
        (6, "text ", False),
        (0, "", True),
    ]


PROGRAM = """
import sys, time
from pathlib import Path
from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.preprocess import ImagesConfig, PreprocessConfig, preprocess

class Slow(ByteTokenizer):
    def tokenize_batch(self, texts):
        time.sleep(0.01 * len(texts))
        return super().tokenize_batch(texts)

if __name__ == "__main__":
    config = PreprocessConfig(
        inputs=(Path("a.jsonl"),), output="made", append_eod=True, workers=int(sys.argv[1]), chunk_bytes=1000,
        save_interval_bytes=200_000, images=ImagesConfig(folder=Path("images"), pad_length=int(sys.argv[2])),
    )
    seen = []
    preprocess(config, Slow(), progress=lambda done, _: seen.append(done))
    print(seen[0])
"""


def start(folder, workers, pad_length=9):
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", str(workers), str(pad_length)]
    return subprocess.Popen(command, cwd=folder, start_new_session=True, stdout=subprocess.PIPE, text=True)


def kill_after_a_save(folder, process):
    record = folder / "made.unfinished" / "record.json"
    while not record.exists():
        assert process.poll() is None
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize(("workers", "again"), [pytest.param(1, 2, marks=pytest.mark.slow), (2, 1)])
def test_after_a_kill_the_same_command_makes_the_same_files(folder, workers, again):
    many(folder)
    run(folder, pad_length=9)
    wanted = files(folder)
    for end in ("bin", "idx", "trackbed.json"):
        (folder / f"made.{end}").unlink()
    kill_after_a_save(folder, start(folder, workers))
    said, _ = start(folder, again).communicate(timeout=60)
    assert 0 < int(said) < (folder / "a.jsonl").stat().st_size
    assert files(folder) == wanted
    assert not (folder / "made.unfinished").exists()


def test_saved_work_for_another_length_is_not_used(folder):
    many(folder)
    kill_after_a_save(folder, start(folder, 1))
    said, _ = start(folder, 1, 10).communicate(timeout=60)
    assert int(said) == 0
    assert {len(tokens) for tokens, mode in sequences_of(folder) if mode == 0} == {0, 10}


def test_a_missing_image_may_be_added_before_the_run_goes_on(folder):
    many(folder)
    data = (folder / "images" / "3.png").read_bytes()
    run(folder)
    wanted = files(folder)
    (folder / "images" / "3.png").unlink()
    options = {"chunk_bytes": 1000, "save_interval_bytes": 100_000}
    with pytest.raises(FormatError, match=r"a\.jsonl:57: the image '3\.png' must be a file below"):
        run(folder, **options)
    (folder / "images" / "3.png").write_bytes(data)
    seen = []
    run(folder, progress=lambda done, _: seen.append(done), **options)
    assert seen[0] > 0
    assert files(folder) == wanted
