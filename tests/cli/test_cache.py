import json
import os
import time
from pathlib import Path

import click
import pytest

from tests.support.files.blends import build, gpt_config, write_pair
from tests.support.files.small_entries import STEM, open_
from trackbed.cache import await_flush
from trackbed.cli.parse import Duration, Size
from trackbed.files import new_partial

OTHER = STEM.replace("train", "valid")


@pytest.fixture
def folder(tmp_path):
    """Cache of two entries; the first was last used ten days ago, the other now."""
    cache = tmp_path / "cache"
    open_(cache)
    open_(cache, stem=OTHER)
    for path in cache.rglob(f"{STEM}*"):
        os.utime(path, (0, time.time() - 10 * 86_400))
    return cache


def leave_partial(folder):
    name = new_partial(Path("f.npy")).name.replace(f".{os.getpid()}.", ".4194305.")
    (folder / ".trackbed" / "partial" / name).touch()


def test_entries_are_listed_with_the_latest_use_first(run, folder):
    leave_partial(folder)
    found = run("cache", "ls", folder)
    assert found.exit_code == 0
    lines = found.stdout.splitlines()
    rows = [line for line in lines if "shared" in line]
    assert ["whole" in row for row in rows] == [True, True]
    assert found.stdout.index("train") > found.stdout.index("valid")
    assert lines[-2].startswith("2 entries, ")
    assert lines[-1] == "1 partial file, writer dead"


def test_programs_get_json(run, folder):
    fields = json.loads(run("cache", "ls", folder, "--json").stdout)
    assert [one["split"] for one in fields["entries"]] == ["valid", "train"]
    assert fields["size_bytes"] == sum(one["size_bytes"] for one in fields["entries"])
    assert {one["condition"] for one in fields["entries"]} == {"whole"}
    assert fields["partials"] == []


def test_a_valid_cache_is_reported(run, folder):
    found = run("cache", "verify", folder)
    assert (found.exit_code, found.stderr) == (0, "")
    assert found.stdout.startswith(f"{folder}: ok: 2 entries, ")
    (folder / ".trackbed" / f"{STEM}.json").unlink()
    assert run("cache", "verify", folder).stdout.endswith("; 1 without a manifest, checked by headers\n")


def test_each_problem_is_a_line(run, folder):
    leave_partial(folder)
    for stem in (STEM, OTHER):
        path = folder / f"{stem}-sample_index.npy"
        path.write_bytes(path.read_bytes()[:-1] + b"X")
    found = run("cache", "verify", folder)
    assert (found.exit_code, found.stdout) == (1, "")
    lines = found.stderr.splitlines()
    assert len(lines) == 3
    assert all(line.startswith(f"trackbed: {folder}/") for line in lines)
    assert lines[0].startswith(f"trackbed: {folder}/{STEM}-sample_index.npy: must have the CRC-32 ")


def test_a_dry_run_prints_what_a_run_removes(run, folder):
    leave_partial(folder)
    await_flush()
    before = sorted(folder.rglob("*"))
    dry = run("cache", "gc", folder, "--unused-for", "7d", "--dry-run")
    assert sorted(folder.rglob("*")) == before
    done = run("cache", "gc", folder, "--unused-for", "7d")
    assert dry.exit_code == done.exit_code == 0
    assert done.stdout == dry.stdout.replace("would remove", "removed")
    first, partial, total = done.stdout.splitlines()
    assert first.startswith(f"removed {folder}/{STEM}: ")
    assert partial == "removed 1 partial file"
    assert total.startswith("removed 1 entry, ")
    assert not list(folder.rglob(f"{STEM}*"))
    assert len(list(folder.rglob(f"{OTHER}*"))) == 5


def test_entries_that_stay_beyond_the_limit_are_reported(run, folder):
    found = run("cache", "gc", folder, "--keep", "1KB")
    assert found.exit_code == 0
    assert "removed 1 entry" in found.stdout
    assert "more than 1.0 kB: they are in use, were used too recently (see --unused-for)" in found.stderr
    assert run("cache", "gc", folder, "--keep", "1KB", "--unused-for", "0s").stderr == ""
    assert not list(folder.glob("*.npy"))


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--keep", "much"], ["--unused-for", "30"]])
def test_a_removal_must_state_what_to_remove(run, folder, options):
    await_flush()
    before = sorted(folder.rglob("*"))
    assert run("cache", "gc", folder, *options).exit_code == 2
    assert sorted(folder.rglob("*")) == before


def test_a_folder_that_is_not_there_is_a_wrong_command_line(run):
    assert run("cache", "ls", "nowhere").exit_code == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("17", 17),
        ("1KB", 1000),
        ("1 kb", 1000),
        ("1.5GB", 1_500_000_000),
        ("2TiB", 2 << 40),
        ("3M", 3_000_000),
    ],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert Size().convert(text, None, None) == size


@pytest.mark.parametrize(("text", "seconds"), [("30d", 2_592_000), ("1.5h", 5400), ("2w", 1_209_600), ("0s", 0)])
def test_durations_are_read_as_people_write_them(text, seconds):
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize(("kind", "text"), [(Size(), "1XB"), (Size(), "-1"), (Duration(), "1y"), (Duration(), "")])
def test_amounts_that_mean_nothing_are_refused(kind, text):
    with pytest.raises(click.BadParameter, match="must be a number with"):
        kind.convert(text, None, None)


@pytest.mark.parametrize("order", ["megatron", "balanced"])
def test_entries_are_listed_with_dataset_split_and_class(run, tmp_path, order):
    prefixes = [write_pair(tmp_path / f"a pair with a rather long name {number}", [20] * 30) for number in range(2)]
    build(gpt_config(tmp_path / "cache", blend=(prefixes, [1, 1]), split="8,2", order=order), (9, 3, None))
    listed = json.loads(run("cache", "ls", "cache", "--json").stdout)["entries"]
    blend = "blend of 2 datasets" if order == "megatron" else "9 samples of 2 datasets in the balanced order"
    found = {(one["dataset"], one["split"], one["class"]) for one in listed}
    assert {(prefix, split, "GPTDataset") for prefix in prefixes for split in ("train", "valid")} <= found
    assert any(dataset.endswith(blend[1:]) for dataset, _, _ in found)
    table = run("cache", "ls", "cache").stdout
    for prefix in prefixes:
        rows = [line.split(prefix)[1].split()[:2] for line in table.splitlines() if prefix in line]
        assert sorted(rows) == [["train", "GPTDataset"], ["valid", "GPTDataset"]]


def test_an_entry_without_a_description_is_listed_with_what_its_name_tells(run, folder):
    for path in folder.rglob("*description.txt"):
        path.unlink()
    (first, _) = json.loads(run("cache", "ls", folder, "--json").stdout)["entries"]
    assert (first["dataset"], first["split"]) == ("", "valid")
