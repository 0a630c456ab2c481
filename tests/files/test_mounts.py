"""Tests of the detection of local file systems, and of the lookup of mapped files."""

import mmap
from pathlib import Path

import pytest

from trackbed.files import is_local, local_host_path, mapped_files
from trackbed.files.local import kind_of

MOUNTS = [
    "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
    "30 22 0:40 / /data rw,noatime shared:2 master:1 - nfs4 host:/export rw,vers=4.2",
    "31 30 0:41 / /data/with\\040space rw - tmpfs tmpfs rw",
    "32 22 0:42 / /over rw - overlay overlay rw,lowerdir=/a - b",
    "33 22 0:43 / /lustre rw - lustre 10.0.0.1@tcp:/scratch rw",
]


@pytest.mark.parametrize(
    ("device", "folder", "kind"),
    [
        ("8:1", "/home", "ext4"),
        ("0:40", "/data/cache", "nfs4"),
        ("0:41", "/data/with space/cache", "tmpfs"),
        ("9:9", "/data/with space", "tmpfs"),
        ("9:9", "/data/within", "nfs4"),
        ("9:9", "/database", "ext4"),
        ("0:42", "/over/x", "overlay"),
        ("0:43", "/lustre", "lustre"),
    ],
)
def test_the_kind_of_a_file_system_is_that_of_its_mount(device, folder, kind):
    assert kind_of(MOUNTS, device, folder) == kind


def test_without_mounts_the_kind_is_unknown():
    assert kind_of([], "8:1", "/home") == ""
    assert kind_of(["nonsense"], "8:1", "/home") == ""


def test_a_folder_in_memory_is_local(tmp_path):
    assert isinstance(is_local(str(tmp_path)), bool)
    if Path("/dev/shm").is_dir():
        assert is_local("/dev/shm")


def test_a_mapped_file_is_found_by_inode_and_name(tmp_path):
    path = tmp_path / "with space and [brackets].npy"
    path.write_bytes(bytes(5000))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert (path.stat().st_ino, path.name) in mapped_files((".npy",))
        assert mapped_files((".nothing-ends-like-this",)) == set()
    assert (path.stat().st_ino, path.name) not in mapped_files((".npy",))


def test_a_local_host_path_tells_local_folders_apart(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    assert local_host_path(str(tmp_path / "a" / "b")) == local_host_path(str(tmp_path / "link" / "a" / "b"))
    assert local_host_path(str(tmp_path / "a")) != local_host_path(str(tmp_path / "b"))
    assert local_host_path(str(tmp_path / "a")).endswith(f"/{tmp_path.name}/a")
    assert local_host_path("/proc/self") == ""  # proc is not in the list of local file systems
