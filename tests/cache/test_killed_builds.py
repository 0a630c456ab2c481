"""A builder is killed before each call that changes what others see: the next builder ends as if undisturbed."""

import shutil

import pytest

from tests.support.files.small_entries import STEM, arrays, entry, files_in, open_, problems, seeds_in
from tests.support.models.stepping import WAYS, finish, kill_at, start, steps
from tests.support.tiers import slow_but

ENTRIES = {f"{seed:032x}-GPTDataset-train": seed for seed in (1, 2, 3)}

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace kills at a call")


def check_problems(folder):
    for problem in problems(folder) if folder.exists() else []:
        assert "must have a living writer" in problem or "as its manifest says, found nothing" in problem


@pytest.mark.parametrize("way", slow_but(["named"], WAYS))
def test_a_batch_that_is_cut_off_anywhere_is_finished_by_the_next_builder(tmp_path, way):
    for stem, seed in ENTRIES.items():
        open_(tmp_path / "undisturbed", seed=seed, stem=stem)
    cuts = steps(tmp_path / "counted", way, ENTRIES)
    assert len(cuts) >= 5 * len(ENTRIES)
    for call, number in cuts:
        folder = tmp_path / f"{call}{number}"
        kill_at(folder, way, ENTRIES, call, number)
        check_problems(folder)
        again = start(folder, way, ENTRIES)
        assert finish(again) == ""
        assert again.returncode == 0
        assert files_in(folder) == files_in(tmp_path / "undisturbed")
        assert problems(folder) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_builder_leaves_nothing_that_is_served_for_something_else(tmp_path, way):
    for call, number in steps(tmp_path / "counted", way, {STEM: 1}):
        folder = tmp_path / f"{call}{number}"
        kill_at(folder, way, {STEM: 1}, call, number)
        assert seeds_in(open_(folder, seed=2)) == {2}
        assert seeds_in(open_(folder, seed=1)) == {1}
        assert problems(folder) == []


@pytest.mark.parametrize(
    "file", [pytest.param(f".trackbed/{STEM}.json", marks=pytest.mark.slow), f"{STEM}-sample_index.npy"]
)
def test_a_builder_that_is_killed_while_it_replaces_a_damaged_entry_leaves_it_damaged_or_whole(tmp_path, file):
    def make_damaged(folder):
        """Of another seed, with files of the right size: what of it looks whole would be served."""
        open_(folder, seed=5, build=lambda _: arrays(5))
        manifest = folder / ".trackbed" / f"{STEM}.json"
        manifest.write_bytes(manifest.read_bytes().replace(entry(folder, seed=5).fingerprint.encode(), ours.encode()))
        (folder / file).write_bytes(b"")

    ours = entry(tmp_path, seed=1).fingerprint
    make_damaged(tmp_path / "counted")
    for call, number in steps(tmp_path / "counted", "unnamed", {STEM: 1}):
        folder = tmp_path / f"{call}{number}"
        make_damaged(folder)
        kill_at(folder, "unnamed", {STEM: 1}, call, number)
        assert seeds_in(open_(folder)) == {1}
        check_problems(folder)
