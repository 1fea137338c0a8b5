"""Free host memory: the tightest of machine, cgroup and memlock, in every layout of the files that say so."""

import resource
from pathlib import Path

import pytest

from offload.device import FreeMemory
from offload.host_limits import free_host_memory

GIB = 1024**3
MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {48 * GIB // 1024} kB\n"
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def system(root: Path, cgroup: str = "", mounts: str = "", **files: str) -> Path:
    """Write the files of a system below `root`; names of `files` have __ for /."""
    paths = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts}
    for path, text in {**paths, **files}.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return root


def group(folder: str, limit: str | int, usage: int, stat: str = "") -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{usage}\n",
        f"{folder}/memory.stat": stat,
    }


def group_v1(folder: str, limit: int, usage: int, stat: str = "") -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{usage}\n",
        f"{folder}/memory.stat": stat,
    }


def test_without_limits_it_is_what_the_machine_has(tmp_path):
    assert free_host_memory(root=system(tmp_path)) == FreeMemory(48 * GIB, 64 * GIB)


def test_the_machine_counts_where_the_cgroup_allows_more(tmp_path):
    files = group("sys/fs/cgroup/box", 60 * GIB, 0)
    assert free_host_memory(root=system(tmp_path, "0::/box\n", V2_MOUNT, **files)) == FreeMemory(48 * GIB, 64 * GIB)


def test_v2_limit_less_usage_with_reclaimable_cache_as_free(tmp_path):
    files = group("sys/fs/cgroup/box", 8 * GIB, 5 * GIB, f"anon 9\ninactive_file {2 * GIB}\n")
    assert free_host_memory(root=system(tmp_path, "0::/box\n", V2_MOUNT, **files)) == FreeMemory(5 * GIB, 8 * GIB)


def test_v2_limit_of_a_parent_counts(tmp_path):
    files = group("sys/fs/cgroup/outer", 4 * GIB, GIB) | group("sys/fs/cgroup/outer/inner", "max", GIB)
    root = system(tmp_path, "0::/outer/inner\n", V2_MOUNT, **files)
    assert free_host_memory(root=root) == FreeMemory(3 * GIB, 4 * GIB)


def test_v1_limit_in_a_container_whose_mount_shows_a_part_of_the_tree(tmp_path):
    files = group_v1("sys/fs/cgroup/memory", 6 * GIB, 2 * GIB, f"total_inactive_file {GIB}\ninactive_file 1\n")
    root = system(tmp_path, "5:cpu:/\n4:memory:/docker/abc\n", V1_MOUNT.format(root="/docker/abc"), **files)
    assert free_host_memory(root=root) == FreeMemory(5 * GIB, 6 * GIB)


def test_v2_group_inside_a_container_whose_mount_shows_a_part_of_the_tree(tmp_path):
    files = group("sys/fs/cgroup/inner", 3 * GIB, GIB) | group("sys/fs/cgroup", 9 * GIB, GIB)
    mount = V2_MOUNT.replace("0:28 / ", "0:28 /docker/abc ")
    root = system(tmp_path, "0::/docker/abc/inner\n", mount, **files)
    assert free_host_memory(root=root) == FreeMemory(2 * GIB, 3 * GIB)


def test_v2_group_outside_of_what_a_namespace_shows(tmp_path):
    files = group("sys/fs/cgroup", 3 * GIB, GIB) | group("sys/fs", 1, 0)
    root = system(tmp_path, "0::/../other\n", V2_MOUNT, **files)
    assert free_host_memory(root=root) == FreeMemory(2 * GIB, 3 * GIB)


def test_v1_path_that_does_not_exist_below_the_mount_means_the_mount_itself(tmp_path):
    files = group_v1("sys/fs/cgroup/memory", 6 * GIB, 2 * GIB)
    root = system(tmp_path, "4:cpuacct,memory:/elsewhere\n", V1_MOUNT.format(root="/"), **files)
    assert free_host_memory(root=root) == FreeMemory(4 * GIB, 6 * GIB)


def test_both_versions_mounted_at_once(tmp_path):
    files = group_v1("sys/fs/cgroup/memory/box", 6 * GIB, 2 * GIB)
    mounts = V2_MOUNT.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified") + V1_MOUNT.format(root="/")
    root = system(tmp_path, "4:memory:/box\n0::/\n", mounts, **files)
    assert free_host_memory(root=root) == FreeMemory(4 * GIB, 6 * GIB)


def test_usage_above_the_limit_leaves_nothing(tmp_path):
    files = group("sys/fs/cgroup", GIB, 2 * GIB)
    assert free_host_memory(root=system(tmp_path, "0::/\n", V2_MOUNT, **files)) == FreeMemory(0, GIB)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [("0000000000000000", FreeMemory(5 * 1024, 8 * 1024)), ("0000000000004000", FreeMemory(48 * GIB, 64 * GIB))],
    ids=["limited", "with CAP_IPC_LOCK"],
)
def test_memlock_counts_for_memory_that_is_to_be_locked(tmp_path, monkeypatch, capabilities, expected):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 * 1024, 8 * 1024))
    root = system(tmp_path, **{"proc/self/status": f"VmLck:\t3 kB\nCapEff:\t{capabilities}\n"})
    assert free_host_memory(locked=True, root=root) == expected
    assert free_host_memory(locked=False, root=root) == FreeMemory(48 * GIB, 64 * GIB)


def test_no_memlock_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    root = system(tmp_path, **{"proc/self/status": "VmLck:\t0 kB\nCapEff:\t0\n"})
    assert free_host_memory(locked=True, root=root) == FreeMemory(48 * GIB, 64 * GIB)


def test_this_machine_has_some_memory():
    memory = free_host_memory()
    assert 0 < memory.free_bytes <= memory.total_bytes
