"""Memory that processes of one host share."""

import gc
import json
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trackbed.comm.shared_memory import SharedMemory

ATTACH = """
import json, sys
from trackbed.comm.shared_memory import SharedMemory
memory = SharedMemory.attach(json.loads(sys.argv[1]))
view = memory.view("int64")
print(int(view.sum()), len(memory))
view[:] = 7
"""


def descriptors():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def memfds():
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return sum("memfd:trackbed-" in line for line in maps.splitlines())


def resident_bytes():
    """Bytes of shared memory that this process has in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssShmem"))


def test_new_memory_holds_zeros_and_takes_none():
    before = resident_bytes()
    memory = SharedMemory.create(1 << 30)
    assert len(memory) == 1 << 30
    assert resident_bytes() - before < 1 << 20
    assert not memory.view(np.uint8)[:: 1 << 24].any()


def test_another_process_sees_and_changes_the_memory():
    memory = SharedMemory.create(8 * 1024)
    memory.view(np.int64)[:] = np.arange(1024)
    command = [sys.executable, "-c", ATTACH, json.dumps(memory.offer())]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert found.stdout.split() == [str(1024 * 1023 // 2), str(8 * 1024)]
    assert (memory.view(np.int64) == 7).all()


def test_memory_outlives_the_object_that_made_it():
    first = SharedMemory.create(4096)
    second = SharedMemory.attach(first.offer())
    first.view(np.uint8)[0] = 5
    del first
    gc.collect()
    assert second.view(np.uint8)[0] == 5


def test_a_view_keeps_the_memory():
    view = SharedMemory.create(4096).view(np.uint8)
    gc.collect()
    view[:] = 3
    assert view.sum() == 3 * 4096


def test_another_file_in_the_place_of_the_memory_is_refused(tmp_path):
    memory = SharedMemory.create(4096)
    process, number, name, size = memory.offer()
    with pytest.raises(FileNotFoundError, match=f"must be the memory {name[:-4]}ffff, but is another file"):
        SharedMemory.attach([process, number, name[:-4] + "ffff", size])
    with (tmp_path / "file").open("wb") as other, pytest.raises(FileNotFoundError, match="is another file"):
        SharedMemory.attach([process, other.fileno(), name, size])


def test_memory_of_a_process_that_has_ended_is_refused():
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    with pytest.raises(OSError, match=f"/proc/{ended.pid}/fd/5"):
        SharedMemory.attach([ended.pid, 5, "trackbed-0", 4096])


def test_released_pages_are_zero_in_every_mapping_and_take_no_memory():
    memory = SharedMemory.create(1 << 24)
    other = SharedMemory.attach(memory.offer())
    memory.view(np.uint8)[:] = 1
    held = resident_bytes()
    memory.release_pages()
    assert held - resident_bytes() >= 1 << 24
    assert not other.view(np.uint8).any()
    other.view(np.uint8)[5] = 9
    assert memory.view(np.uint8)[5] == 9


def test_nothing_is_left_after_the_last_reference():
    gc.collect()  # other tests leave memory that would be freed in between
    before = descriptors(), memfds(), resident_bytes()
    memory = SharedMemory.create(1 << 23)
    other = SharedMemory.attach(memory.offer())
    memory.view(np.uint8)[:] = 1
    assert memfds() == before[1] + 2
    del memory, other
    assert (descriptors(), memfds()) == before[:2]
    assert resident_bytes() - before[2] < 1 << 20


def test_a_failure_to_map_leaves_no_descriptor():
    before = descriptors()
    memory = SharedMemory.create(mmap.PAGESIZE)
    offer = [*memory.offer()[:3], -1]
    with pytest.raises((OSError, ValueError, OverflowError)):
        SharedMemory.attach(offer)
    with pytest.raises((OSError, ValueError, OverflowError)):
        SharedMemory.create(-1)
    del memory
    assert descriptors() == before
