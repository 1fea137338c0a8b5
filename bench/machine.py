"""The machine card: what a measurement ran on, and the document that keeps both together.

A number means something only beside the hardware, the versions, the commit and the command that gave it. No host name,
user name or absolute path is recorded: a result is committed, and those say nothing about speed.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "numpy", "safetensors", "transformers", "accelerate", "tokenizers")
GIB = 1024**3


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a speed may depend on; a package that is missing is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit that is checked out, with `+changes` if tracked files differ from it; None outside a clone."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    return f"{head}+changes" if _git("status", "--porcelain", "--untracked-files=no") else head


def machine() -> dict[str, Any]:
    """Describe the machine: processor, cores and threads in use, memory, GPUs, system."""
    import torch

    card: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": _memory_bytes(),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if card["gpus"]:
        card["cuda"] = torch.version.cuda
        card["driver"] = _driver()
    return card


def describe(card: dict[str, Any]) -> str:
    """The card as one line, for the head of a table."""
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_bytes'] / GIB:.0f} GiB)" for gpu in card["gpus"]) or "no GPU"
    memory = f"{card['memory_bytes'] / GIB:.0f} GiB" if card["memory_bytes"] else "unknown memory"
    return f"{card['cpu']}, {card['cores']} cores ({card['torch_threads']} threads), {memory}, {gpus}"


def command(name: str, argv: Sequence[str]) -> str:
    """The command line as it can be repeated in a clone, absolute paths cut to what lies below it."""
    return shlex.join(["python", "-m", "bench", name, *(portable(word) for word in argv)])


def portable(word: str) -> str:
    """One word of a command line (`/a/b`, `@/a/b`, `--option=/a/b`) without the folders that only this machine has."""
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    mark, value = ("@", value[1:]) if value.startswith("@") else ("", value)
    path = Path(value).expanduser() if value.startswith("~") else Path(value)
    if path.is_absolute():
        inside = path.is_relative_to(REPOSITORY)
        value = str(path.relative_to(REPOSITORY)) if inside else path.name
    return f"{option}{equals}{mark}{value}"


def document(name: str, argv: Sequence[str], rows: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A result as it is saved: command, commit, machine, versions, rows, and what a bench has to add.

    Args:
        name, argv: the bench and its arguments.
        rows: what was measured, as JSON values.
        more: further entries, such as a summary or a bound.
    """
    return {
        "command": command(name, argv),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        **more,
        "rows": list(rows),
    }


def save(result: dict[str, Any], path: str | Path) -> Path:
    """Write a result document as indented JSON, whole or not at all; makes the folder; returns the path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.part")
    scratch.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    scratch.replace(target)
    print(f"saved {portable(str(target))}", file=sys.stderr)
    return target


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(REPOSITORY), *words], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in found]


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split()[0] if done.returncode == 0 and done.stdout.strip() else None
