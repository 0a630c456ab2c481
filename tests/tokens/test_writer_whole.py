"""Tests that a pair appears complete or not at all, even if its writer is killed."""

import fcntl
import gc
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.support.files.built_pair import build, names_in
from tests.support.processes.forked import run_in_fork
from tests.support.tiers import slow_but
from trackbed.errors import ArgumentError, TrackbedError
from trackbed.tokens import IndexedDataset, IndexedDatasetBuilder, commit, finish_pair, verify_content


def test_no_file_has_the_final_name_before_the_end(prefix):
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    builder.add_document(np.arange(100_000), [100_000])
    assert [name for name in names_in(prefix.parent) if not name.endswith(".partial")] == []
    builder.finalize(f"{prefix}.idx")
    assert names_in(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]


def test_an_older_pair_stays_until_it_is_replaced_whole(prefix):
    build(prefix, [[1, 2, 3]])
    held = IndexedDataset(str(prefix))
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    builder.add_document(np.arange(200_000) % 9, [200_000])
    assert IndexedDataset(str(prefix))[0].tolist() == [1, 2, 3]
    verify_content(str(prefix))
    builder.finalize(f"{prefix}.idx")
    assert verify_content(str(prefix)).tokens == 200_000
    assert IndexedDataset(str(prefix))[0].dtype == np.uint16
    assert held[0].tolist() == [1, 2, 3]
    assert names_in(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]


def test_discarding_a_builder_leaves_the_older_pair(prefix):
    build(prefix, [[1, 2, 3]])
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    builder.add_document(np.arange(200_000), [200_000])
    builder.discard()
    assert names_in(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]
    assert IndexedDataset(str(prefix))[0].tolist() == [1, 2, 3]
    verify_content(str(prefix))


def test_discarding_after_finalize_leaves_the_new_pair(prefix):
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    builder.add_document([1, 2], [2])
    builder.finalize(f"{prefix}.idx")
    builder.discard()
    assert names_in(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]
    assert verify_content(str(prefix)).tokens == 2


def test_two_builders_of_one_name_do_not_mix(prefix):
    first, second = (IndexedDatasetBuilder(f"{prefix}.bin") for _ in range(2))
    first.add_document([1] * 100_000, [100_000])
    second.add_document([2] * 100_000, [100_000])
    second.finalize(f"{prefix}.idx")
    first.finalize(f"{prefix}.idx")
    assert set(IndexedDataset(str(prefix))[0].tolist()) == {1}
    verify_content(str(prefix))


# Kills itself at the n-th file that it opens, renames, links or removes while it replaces a pair.
DIE = """
import os, signal, sys
from trackbed.tokens import IndexedDatasetBuilder
prefix, last, token = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
builder = IndexedDatasetBuilder(prefix + ".bin")
builder.add_document([token] * 4, [4])
steps = 0
def step(event, arguments):
    global steps
    if event in ("open", "os.rename", "os.link", "os.remove") and prefix in str(arguments[0]):
        steps += 1
        if steps == last:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(step)
builder.finalize(prefix + ".idx")
"""


def die_at(step, prefix, *, token=4):
    """Replaces a pair by four tokens in a process that dies at a step. Returns True if the step was reached."""
    command = [sys.executable, "-c", DIE, str(prefix), str(step), str(token)]
    died = subprocess.run(command, check=False).returncode
    assert died in (0, -signal.SIGKILL)
    return died != 0


def what_is_there(prefix):
    """First sequence of a complete pair, or the error that a reader gets."""
    if IndexedDataset.exists(str(prefix)):
        verify_content(str(prefix))
    try:
        return IndexedDataset(str(prefix))[0].tolist()
    except ArgumentError as error:
        return str(error)


@pytest.mark.parametrize("has_old", [True, False])
def test_a_writer_killed_at_any_step_leaves_the_old_pair_the_new_one_or_what_finishes_it(prefix, has_old):
    outcomes = []
    for step in range(1, 60):
        for name in names_in(prefix.parent):
            (prefix.parent / name).unlink()
        if has_old:
            build(prefix, [[1, 2, 3]])
        died = die_at(step, prefix)
        found = what_is_there(prefix)
        outcomes.append(found)
        if f"trackbed finish {prefix}" in str(found):
            assert finish_pair(str(prefix))
            assert not finish_pair(str(prefix))
            assert what_is_there(prefix) == [4] * 4
            assert names_in(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]
        # The next writer removes the files of a killed one, whether or not its pair was finished.
        build(prefix, [[8]])
        assert what_is_there(prefix) == [8]
        assert names_in(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]
        if not died:
            break
    kinds = ["how" if "trackbed finish" in str(one) else "none" if isinstance(one, str) else one for one in outcomes]
    changes = [one for at, one in enumerate(kinds) if kinds[at - 1 : at] != [one]]
    assert changes == [[1, 2, 3] if has_old else "none", "how", [4] * 4]
    assert len(kinds) > 10


@pytest.mark.parametrize("first", slow_but([10, 14], range(8, 17, 2)))
def test_the_next_writer_finishes_nothing_of_a_killed_one_by_halves(prefix, first):
    """After two killed writers, the `.bin` of one is never under the `.idx` of the other."""
    for second in range(5, 22, 3):
        build(prefix, [[1, 2, 3]])
        die_at(first, prefix)
        die_at(second, prefix, token=5)
        finish_pair(str(prefix))
        assert what_is_there(prefix) in ([1, 2, 3], [4] * 4, [5] * 4)


# Replaces a pair repeatedly; all tokens of a pair are the number of its writer.
AGAIN = """
import sys
import numpy as np
from trackbed.tokens import IndexedDatasetBuilder
prefix, name, times = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for turn in range(times):
    builder = IndexedDatasetBuilder(prefix + ".bin", np.uint8)
    builder.add_document([name] * (name * 1000 + turn), [name * 1000 + turn])
    builder.finalize(prefix + ".idx")
"""


def test_writers_of_one_name_in_several_processes_never_mix_their_pairs(prefix):
    build(prefix, [[1]])
    writers = [subprocess.Popen([sys.executable, "-c", AGAIN, str(prefix), str(name), "60"]) for name in (1, 2, 3)]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0, 0]
    assert verify_content(str(prefix)).tokens % 1000 == 59
    (tokens,) = IndexedDataset(str(prefix))[:]
    assert set(tokens.tolist()) == {len(tokens) // 1000}
    assert names_in(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]


def test_a_lock_file_of_a_dead_process_does_not_block(prefix):
    (prefix.parent / "out.idx.lock").touch()
    build(prefix, [[1, 2, 3]])
    assert names_in(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]


def test_a_writer_that_finds_the_name_locked_gives_up_after_a_while_and_leaves_the_pair(prefix, monkeypatch):
    build(prefix, [[1, 2, 3]])
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    builder.add_document([4], [1])
    monkeypatch.setattr(commit, "_WAIT_SECONDS", 0.1)
    with (prefix.parent / "out.idx.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(TrackbedError, match=r"no other process may be replacing the pair, found one for 0 s"):
            builder.finalize(f"{prefix}.idx")
    assert what_is_there(prefix) == [1, 2, 3]


def test_two_pairs_of_one_name_whose_writers_take_turns_at_the_renames_do_not_mix(prefix, monkeypatch):
    """A second writer that starts while the first one is between two renames waits."""
    build(prefix, [[1, 2, 3]])
    first, second = (IndexedDatasetBuilder(f"{prefix}.bin", np.uint8) for _ in range(2))
    first.add_document([4] * 4, [4])
    second.add_document([5] * 5, [5])
    other = threading.Thread(target=lambda: second.finalize(f"{prefix}.idx"))
    publish = commit.publish
    waited = []

    def publish_slowly(partial, final):
        publish(partial, final)
        if not waited:
            waited.append(other.start())
            other.join(timeout=0.3)
            waited.append(other.is_alive())

    monkeypatch.setattr(commit, "publish", publish_slowly)
    first.finalize(f"{prefix}.idx")
    other.join(timeout=30)
    assert waited[1] is True
    assert what_is_there(prefix) == [5] * 5


# Writes two pairs with a file size limit of 300 KiB, and prints the outcome.
FULL = """
import sys, resource, signal
import numpy as np
from trackbed.tokens import IndexedDatasetBuilder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300 << 10, 300 << 10))
builder = IndexedDatasetBuilder(sys.argv[1] + ".bin", np.uint8)
try:
    builder.add_document(np.zeros(int(sys.argv[2]), np.uint8), [1] * int(sys.argv[2]))
    builder.finalize(sys.argv[1] + ".idx")
except OSError as error:
    builder.discard()
    print(error.strerror)
"""


@pytest.mark.parametrize("num_tokens", [400_000, 290_000])  # the .bin or only the .idx is too large
def test_a_full_disk_leaves_the_older_pair(prefix, num_tokens):
    build(prefix, [[1, 2, 3]])
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(prefix), str(num_tokens)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "File too large\n"
    assert names_in(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]
    assert IndexedDataset(str(prefix))[0].tolist() == [1, 2, 3]
    verify_content(str(prefix))


# Continues after every failure with a file size limit of 300 KiB, and prints the number of failures. The limit is
# raised before the last step.
STUBBORN = """
import sys, resource, signal
import numpy as np
from trackbed.tokens import IndexedDatasetBuilder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (300 << 10, hard))
builder = IndexedDatasetBuilder(sys.argv[1] + ".bin", np.uint8)
failures = 0
for _ in range(int(sys.argv[2])):
    try:
        builder.add_document(np.zeros(100_000, np.uint8), [100_000])
    except OSError:
        failures += 1
if failures:
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
try:
    builder.finalize(sys.argv[1] + ".idx")
except OSError:
    print(failures)
builder.discard()
"""


# The failing write is the last one, or is followed by others.
@pytest.mark.parametrize(("num_documents", "found"), [(4, 0), (6, 1), (8, 3), (20, 15)])
def test_a_write_that_failed_is_never_forgotten(prefix, num_documents, found):
    build(prefix, [[1, 2, 3]])
    done = subprocess.run(
        [sys.executable, "-c", STUBBORN, str(prefix), str(num_documents)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == found
    assert names_in(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]
    assert IndexedDataset(str(prefix))[0].tolist() == [1, 2, 3]
    verify_content(str(prefix))


def test_a_process_may_fork_while_it_writes(prefix):
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    for number in range(4):
        builder.add_document(np.full(100_000, number), [100_000])
        assert run_in_fork(lambda: len(builder.sequence_lengths)) == number + 1
    builder.finalize(f"{prefix}.idx")
    assert verify_content(str(prefix)).tokens == 400_000


def test_an_unfinished_builder_does_not_block_the_exit_of_its_process(tmp_path):
    program = f"""if True:
        from trackbed.tokens import IndexedDatasetBuilder
        builder = IndexedDatasetBuilder({str(tmp_path / "x.bin")!r})
        builder.add_document([1] * 100_000, [100_000])
    """
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
    assert [name for name in names_in(tmp_path) if not name.endswith(".partial")] == []
    IndexedDatasetBuilder(str(tmp_path / "x.bin")).discard()
    assert names_in(tmp_path) == []


def test_an_abandoned_builder_leaves_nothing(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "corpus.bin"))
    builder.add_document([1, 2], [2])
    del builder
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_missing_is_named_while_the_builder_can_still_be_finalized(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "corpus.bin"))
    builder.add_document([1, 2], [2])
    with pytest.raises(ArgumentError, match=r"nowhere/corpus\.idx: must be a file in an existing folder"):
        builder.finalize(str(tmp_path / "nowhere" / "corpus.idx"))
    builder.finalize(str(tmp_path / "corpus.idx"))
    assert len(IndexedDataset(str(tmp_path / "corpus"))) == 1


def test_a_builder_cannot_be_used_after_finalize(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "corpus.bin"))
    builder.finalize(str(tmp_path / "corpus.idx"))
    with pytest.raises(ArgumentError, match="must not be used after finalize"):
        builder.add_item([1])
    with pytest.raises(ArgumentError, match="must not be used after finalize"):
        builder.finalize(str(tmp_path / "corpus.idx"))


def test_a_write_that_was_interrupted_is_never_published(prefix, monkeypatch):
    build(prefix, [[1, 2, 3]])
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint8)

    def interrupt(_size):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(builder._data._writeback, "grown", interrupt)
        with pytest.raises(KeyboardInterrupt):
            builder.add_document(np.zeros(400_000, np.uint8), [400_000])
    with pytest.raises(ArgumentError, match="after it was interrupted"):
        builder.finalize(f"{prefix}.idx")
    builder.discard()
    assert IndexedDataset(str(prefix))[0].tolist() == [1, 2, 3]
    verify_content(str(prefix))


def test_tokens_without_a_length_are_never_published(prefix):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint8)
    builder.add_document([1, 2, 3], [3])
    builder.sequence_lengths.pop()  # the state after an interrupt between the two
    with pytest.raises(ArgumentError, match="must have the 3 bytes written, found 0"):
        builder.finalize(f"{prefix}.idx")
    builder.discard()


def test_a_builder_can_be_discarded_while_an_interrupt_is_on_its_way(prefix, monkeypatch):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint8)

    def interrupt(data):
        view = memoryview(data)  # as a frame of the traceback holds it
        raise KeyboardInterrupt(view)

    monkeypatch.setattr(builder._data.checksum, "update", interrupt)
    try:
        builder.add_document(np.zeros(400_000, np.uint8), [400_000])
    except KeyboardInterrupt:
        builder.discard()
    assert names_in(prefix.parent) == []
