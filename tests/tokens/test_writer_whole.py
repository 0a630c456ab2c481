"""A pair appears whole, or not at all, whatever happens to its writer."""

import gc
import signal
import subprocess
import sys

import numpy as np
import pytest

from built_pair import build, names_in
from forked import run_in_fork
from trackbed.errors import ArgumentError
from trackbed.tokens import IndexedDataset, IndexedDatasetBuilder, verify_content


def test_nothing_stands_under_the_final_name_before_the_end(prefix):
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


def test_a_builder_that_gives_up_leaves_the_older_pair(prefix):
    build(prefix, [[1, 2, 3]])
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    builder.add_document(np.arange(200_000), [200_000])
    builder.discard()
    assert names_in(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]
    assert IndexedDataset(str(prefix))[0].tolist() == [1, 2, 3]
    verify_content(str(prefix))


def test_giving_up_comes_too_late_when_the_pair_is_there(prefix):
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


# Dies at the n-th file that it opens, renames or removes while it replaces a pair.
DIE = """
import gc
import os, signal, sys
from trackbed.tokens import IndexedDatasetBuilder
prefix, last = sys.argv[1], int(sys.argv[2])
builder = IndexedDatasetBuilder(prefix + ".bin")
builder.add_document([4, 5, 6, 7], [4])
steps = 0
def step(event, arguments):
    global steps
    if event in ("open", "os.rename", "os.remove") and prefix in str(arguments[0]):
        steps += 1
        if steps == last:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(step)
builder.finalize(prefix + ".idx")
"""


def test_a_writer_killed_at_any_step_leaves_a_whole_pair_or_none(prefix):
    outcomes = []
    for step in range(1, 40):
        build(prefix, [[1, 2, 3]])
        died = subprocess.run([sys.executable, "-c", DIE, str(prefix), str(step)], check=False).returncode
        if IndexedDataset.exists(str(prefix)):
            verify_content(str(prefix))
            outcomes.append(IndexedDataset(str(prefix))[0].tolist())
        else:
            outcomes.append(None)
        if died == 0:
            break
        assert died == -signal.SIGKILL
    assert outcomes[0] == [1, 2, 3]
    assert outcomes[-1] == [4, 5, 6, 7]
    assert None in outcomes
    # The old pair, then none, then the new one; and the next writer has cleaned up after every killed one.
    assert [outcome for at, outcome in enumerate(outcomes) if outcomes[at - 1 : at] != [outcome]] == [
        [1, 2, 3],
        None,
        [4, 5, 6, 7],
    ]
    build(prefix, [[1]])
    assert names_in(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]


# Writes two pairs where files may have at most 300 KiB, and says what came of it.
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


# Goes on after every failure where files may have at most 300 KiB, and says how often it failed. There is room again
# before the last step.
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


# The failing write is the very last one, or one after which more is added.
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


def test_builders_that_are_left_alone_hold_up_nothing(tmp_path):
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
    with pytest.raises(ArgumentError, match=r"nowhere/corpus\.idx: must be a file in a folder that is there"):
        builder.finalize(str(tmp_path / "nowhere" / "corpus.idx"))
    builder.finalize(str(tmp_path / "corpus.idx"))
    assert len(IndexedDataset(str(tmp_path / "corpus"))) == 1


def test_a_builder_takes_nothing_after_finalize(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "corpus.bin"))
    builder.finalize(str(tmp_path / "corpus.idx"))
    with pytest.raises(ArgumentError, match="takes nothing after finalize"):
        builder.add_item([1])
    with pytest.raises(ArgumentError, match="takes nothing after finalize"):
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
    builder.sequence_lengths.pop()  # what an interrupt between the two leaves
    with pytest.raises(ArgumentError, match="must make 3 bytes as written, found 0"):
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
