"""How much memory the host can still give this process: the least that machine, cgroup and memlock leave.

A container that is allowed 32 GiB on a machine with 512 sees 512 in `/proc/meminfo`, and is killed at 33. So every
cgroup from the process's own up to the root is asked, in both versions of the interface. Page cache that the kernel
would drop first (`inactive_file`) counts as free, or else the files just read would make their own copy impossible.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from offload.device import FreeMemory

CAP_IPC_LOCK = 14
"""Number of the capability that lifts the memlock limit (capabilities(7))."""


class _Interface(NamedTuple):
    """File names of one version of the cgroup memory controller."""

    limit: str
    usage: str
    reclaimable: str


_V1 = _Interface("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Interface("memory.max", "memory.current", "inactive_file")


def free_host_memory(locked: bool = False, root: Path = Path("/")) -> FreeMemory:
    """Ask every limit and return the tightest.

    Args:
        locked: the memory is to be page-locked, so that the memlock limit (`ulimit -l`) counts too. A process with
            CAP_IPC_LOCK has no such limit.
        root: where `proc` and the cgroup mounts are found; tests bring their own.

    Returns:
        Free and total bytes under the limit that leaves least.
    """
    limits = [_machine(root), *_cgroups(root)]
    if locked:
        limits += _memlock(root)
    return min(limits, key=lambda limit: limit.free_bytes)


def _machine(root: Path) -> FreeMemory:
    fields = _fields(root / "proc/meminfo")
    if "MemAvailable" in fields:
        return FreeMemory(fields["MemAvailable"] * 1024, fields["MemTotal"] * 1024)
    # Not Linux: the size of the machine is all that can be known without its own calls.
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return FreeMemory(total_bytes, total_bytes)


def _memlock(root: Path) -> list[FreeMemory]:
    if not (root / "proc/self/status").is_file():
        return []
    import resource

    status = _text(root / "proc/self/status")
    capabilities = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit_bytes == resource.RLIM_INFINITY or capabilities >> CAP_IPC_LOCK & 1:
        return []
    locked_bytes = _fields(root / "proc/self/status").get("VmLck", 0) * 1024
    return [FreeMemory(max(0, limit_bytes - locked_bytes), limit_bytes)]


def _cgroups(root: Path) -> Iterator[FreeMemory]:
    for folder, top, interface in _memory_controllers(root):
        for place in [folder, *folder.parents]:
            limit = _number(place / interface.limit)
            usage = _number(place / interface.usage)
            if limit is not None and usage is not None:
                reclaimable = _fields(place / "memory.stat").get(interface.reclaimable, 0)
                yield FreeMemory(max(0, limit - usage + min(reclaimable, usage)), limit)
            if place == top:
                break


def _memory_controllers(root: Path) -> Iterator[tuple[Path, Path, _Interface]]:
    """Yield (the process's own group, where the mount begins, interface) for each mounted memory controller."""
    groups = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= {controller: path for controller in controllers.split(",")}
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        _, _, _, mounted_root, mount_point, *_ = before.split()
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" and "" in groups:
            path, interface = groups[""], _V2
        elif kind == "cgroup" and "memory" in options.split(",") and "memory" in groups:
            path, interface = groups["memory"], _V1
        else:
            continue
        top = root / mount_point.lstrip("/")
        yield _own_folder(top, mounted_root, path), top, interface


def _own_folder(top: Path, mounted_root: str, path: str) -> Path:
    """The process's group below a mount that may show only a part of the tree, as it does in a container."""
    own, shown = PurePosixPath(path), PurePosixPath(mounted_root)
    inside = own.relative_to(shown) if own.is_relative_to(shown) else own.relative_to("/")
    return top if ".." in inside.parts else top / inside


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    """Read `name value` or `name: value unit` lines; others are left out."""
    found = {}
    for line in _text(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = int(words[1])
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
