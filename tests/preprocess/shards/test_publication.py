"""Workers that make one shard at once, and workers that are killed."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from trackbed.errors import ArgumentError
from trackbed.files import find_partials
from trackbed.preprocess.shards.shard_files import FolderShard, ShardRequirements
from trackbed.preprocess.shards.spec import made_by
from trackbed.tokens import IndexedDataset, verify_content

RECIPE = {"tokenizer": "bytes"}
MOMENTS = [pytest.param(seed, marks=[pytest.mark.slow] if seed >= 2 else []) for seed in range(20)]


def shard_at(folder, *, recipe=RECIPE, overwrite=False):
    wanted = ShardRequirements(
        prefix=str(folder / "c-00000-of-00001"), recipe=recipe, skip_bad=False, overwrite=overwrite
    )
    return FolderShard(wanted)


def builder_of(shard, tokens=(1, 2, 3)):
    builder = shard.open_builder("uint16")
    builder.add_documents(np.array(tokens, dtype=np.uint16), [len(tokens)])
    return builder


def publish(shard, builder):
    recipe = shard.wanted.recipe
    return shard.publish(
        builder, sign=lambda seal: replace(seal, made_by=made_by(recipe), recipe=recipe, counts={"bad": 0})
    )


def publish_often(folder, times):
    for _ in range(times):
        publish(shard_at(Path(folder)), builder_of(shard_at(Path(folder))))


def inodes(folder):
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


def test_the_first_seal_wins_and_the_other_worker_discards_its_work(tmp_path):
    shard = shard_at(tmp_path)
    first, second = builder_of(shard), builder_of(shard)
    made = publish(shard, first)
    before = inodes(tmp_path)
    assert publish(shard, second) == made
    assert {name: inodes(tmp_path)[name] for name in before if not name.endswith(".partial")}.items() <= before.items()
    assert inodes(tmp_path).keys() == {f"c-00000-of-00001{suffix}" for suffix in (".bin", ".idx", ".trackbed.json")}


def test_a_worker_of_another_recipe_does_not_touch_a_finished_shard(tmp_path):
    first, second = shard_at(tmp_path), shard_at(tmp_path, recipe={"tokenizer": "other"})
    one, other = builder_of(first), builder_of(second, (9,))
    publish(first, one)
    before = inodes(tmp_path).items()
    with pytest.raises(ArgumentError, match='found tokenizer: "bytes", now "other"'):
        publish(second, other)
    assert {(name, inode) for name, inode in before if not name.endswith(".partial")} == set(inodes(tmp_path).items())


def test_a_shard_that_is_replaced_loses_its_seal_first(tmp_path):
    publish(shard_at(tmp_path), builder_of(shard_at(tmp_path)))
    shard = shard_at(tmp_path, recipe={"tokenizer": "other"}, overwrite=True)

    def sign(seal):
        (tmp_path / "c-00000-of-00001.bin").unlink()
        (tmp_path / "c-00000-of-00001.bin").mkdir()  # so that the step after the removal of the seal fails
        return seal

    with pytest.raises(OSError, match=r"c-00000-of-00001\.bin"):
        shard.publish(builder_of(shard), sign=sign)
    assert inodes(tmp_path).keys() == {"c-00000-of-00001.bin"}


def test_a_worker_whose_files_were_removed_accepts_the_finished_shard(tmp_path):
    shard = shard_at(tmp_path)
    late, lost = builder_of(shard), builder_of(shard)
    for found in find_partials(tmp_path):
        if Path(found.path) == lost._data.partial:
            Path(found.path).unlink()
    with pytest.raises(FileNotFoundError):
        publish(shard, lost)
    made = publish(shard, late)
    removed = builder_of(shard)
    removed._data.partial.unlink()
    assert publish(shard, removed) == made


def test_processes_that_publish_one_shard_at_once_leave_one_whole_shard(tmp_path):
    context = get_context("spawn")
    workers = [context.Process(target=publish_often, args=(str(tmp_path), 20)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert verify_content(str(tmp_path / "c-00000-of-00001")).documents == 1
    assert inodes(tmp_path).keys() == {f"c-00000-of-00001{suffix}" for suffix in (".bin", ".idx", ".trackbed.json")}


SHARDED = """
import sys
from pathlib import Path
from trackbed.preprocess import PreprocessConfig, open_tokenizer, preprocess
if __name__ == "__main__":
    config = PreprocessConfig(inputs=(Path("a.jsonl"),), output="out/c", shard_bytes=40_000, workers=2)
    report = preprocess(config, open_tokenizer("bytes"))
    print(report.finished_shards)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A corpus, the files of an uninterrupted run, and the seconds that it took from its first file on."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "a.jsonl").write_text("".join(f'{{"text": "{"some words " * 30}{number}"}}\n' for number in range(3000)))
    (folder / "run.py").write_text(SHARDED)
    process = start(folder)
    begin = time.monotonic()
    process.communicate()
    assert process.returncode == 0
    return folder, {path.name: path.read_bytes() for path in (folder / "out").iterdir()}, time.monotonic() - begin


def start(folder):
    (folder / "out").mkdir(exist_ok=True)
    for path in (folder / "out").iterdir():
        path.unlink()
    process = subprocess.Popen([sys.executable, "run.py"], cwd=folder, stdout=subprocess.PIPE, start_new_session=True)
    while process.poll() is None and not list((folder / "out").glob("c-*")):
        time.sleep(0.001)
    return process


@pytest.mark.parametrize("seed", MOMENTS)
def test_a_killed_run_leaves_whole_shards_and_the_next_one_makes_the_others(whole, seed):
    folder, files, seconds = whole
    process = start(folder)
    time.sleep(random.Random(seed).uniform(0, seconds))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    sealed = [path for path in (folder / "out").iterdir() if path.name.endswith(".trackbed.json")]
    stamps = {path: path.stat().st_mtime_ns for path in sealed}
    for path in sealed:
        verify_content(str(path).removesuffix(".trackbed.json"))
    again = subprocess.run([sys.executable, "run.py"], cwd=folder, check=True, capture_output=True, text=True)
    assert int(again.stdout) == len(sealed)
    assert {path: path.stat().st_mtime_ns for path in sealed} == stamps
    assert {path.name: path.read_bytes() for path in (folder / "out").iterdir()} == files


def test_ctrl_c_leaves_whole_shards_and_nothing_else(whole):
    folder, files, seconds = whole
    process = start(folder)
    time.sleep(seconds / 3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    found = {path.name for path in (folder / "out").iterdir() if not path.name.endswith(".partial")}
    prefixes = {name.split(".")[0] for name in found if not name.endswith(".toml")}
    assert found - {"c.toml"} <= files.keys()
    for prefix in prefixes:
        if f"{prefix}.trackbed.json" in found:
            verify_content(str(folder / "out" / prefix))
            assert len(IndexedDataset(str(folder / "out" / prefix))) > 0
