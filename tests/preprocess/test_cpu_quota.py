"""CPU quotas of containers, in both versions of control groups."""

import os

import pytest

from trackbed.preprocess import available_cores
from trackbed.preprocess.cpu_quota import cpu_quota

V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
OTHERS = "24 1 8:1 / / rw - ext4 /dev/sda1 rw\n33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\nodd\n"


@pytest.fixture
def quota_of(tmp_path):
    def write(groups, mounts, files):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
        (tmp_path / "proc/self/mountinfo").write_text(OTHERS + mounts)
        for name, text in files.items():
            path = tmp_path / "sys/fs/cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return cpu_quota(tmp_path)

    return write


def first(folder, quota, period=100_000):
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("50000 100000\n", 1),
        ("1000 100000\n", 1),
        ("6400000 100000\n", 64),
        ("300000\n", 3),
        ("20000 10000\n", 2),
        ("max 100000\n", None),
        ("", None),
        ("nonsense\n", None),
        ("100000 0\n", None),
    ],
)
def test_the_quota_of_version_2_is_that_of_its_file(quota_of, text, cores):
    assert quota_of("0::/\n", V2, {"cpu.max": text}) == cores


@pytest.mark.parametrize(("quota", "cores"), [(200_000, 2), (250_000, 3), (10_000, 1), (-1, None), (0, None)])
def test_the_quota_of_version_1_is_that_of_its_files(quota_of, quota, cores):
    assert quota_of("4:cpu,cpuacct:/\n3:memory:/\n", V1.format(top="/"), first("cpu,cpuacct", quota)) == cores


def test_groups_above_limit_too(quota_of):
    files = {"cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n", "a/b/cpu.max": "400000 100000\n"}
    assert quota_of("0::/a/b\n", V2, files) == 2


def test_a_group_beside_does_not(quota_of):
    assert quota_of("0::/a/b\n", V2, {"a/c/cpu.max": "200000 100000\n"}) is None


def test_a_container_without_a_namespace_of_its_own_finds_its_group_at_the_mount(quota_of):
    mount = V1.format(top="/docker/abc")
    assert quota_of("4:cpu,cpuacct:/docker/abc\n", mount, first("cpu,cpuacct", 300_000)) == 3


def test_a_group_below_the_mounted_one_is_found(quota_of):
    mount = V1.format(top="/docker/abc")
    assert quota_of("4:cpu,cpuacct:/docker/abc/job\n", mount, first("cpu,cpuacct/job", 300_000)) == 3


@pytest.mark.parametrize("path", ["/../../system.slice", "/elsewhere"])
def test_a_path_from_outside_the_container_means_the_mounted_group(quota_of, path):
    mount = V2.replace(" / /sys", " /kubepods/pod /sys")
    assert quota_of(f"0::{path}\n", mount, {"cpu.max": "200000 100000\n"}) == 2


def test_of_both_versions_the_smaller_quota_counts(quota_of):
    mounts = V1.format(top="/") + V2.replace("/sys/fs/cgroup rw", "/sys/fs/cgroup/unified rw")
    files = {**first("cpu,cpuacct", 400_000), "unified/cpu.max": "300000 100000\n"}
    assert quota_of("4:cpu,cpuacct:/\n0::/\n", mounts, files) == 3


def test_mounts_with_spaces_in_their_names_are_found(quota_of):
    mount = V2.replace("/sys/fs/cgroup rw", "/sys/fs/cgroup/a\\040b rw")
    assert quota_of("0::/\n", mount, {"a b/cpu.max": "200000 100000\n"}) == 2


def test_without_control_groups_there_is_no_quota(tmp_path, quota_of):
    assert cpu_quota(tmp_path / "nothing") is None
    assert quota_of("", "", {}) is None


def test_the_default_number_of_workers_is_within_the_mask():
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))
