"""Read machine code: what a compiled kernel takes, and which of its instructions came from which line of its source.

The disassembler and cuobjdump are the ones in the triton wheel, so no CUDA toolkit and no GPU are needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_LINE = re.compile(r'//## File "([^"]+)", line (\d+)')
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);")
_GLOBAL_LOAD = re.compile(r"(?:LDGSTS|LDG|LD)\.E\b")
_WIDTH = re.compile(r"\.(?:U|S)?(8|16|32|64|128|256)\b")
_TENSOR_CORE = re.compile(r"(?:HMMA|HGMMA|IMMA|UTC\w*MMA|QGMMA|BGMMA|OMMA)\b")
_LAYOUT = re.compile(
    r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[\d+, (\d+)\], threadsPerWarp = \[\d+, (\d+)\], .*?order = \[1, 0\]",
    re.M,
)
_READ = re.compile(r"(?:tt\.load|async_copy_global_to_local) .*?: tensor<(\d+)x(\d+)x!tt\.ptr<\w+>, (#\w+)>")


@dataclass(frozen=True)
class Instruction:
    """One instruction of the code.

    Args:
        address: Offset in the kernel; code order.
        opcode: With its modifiers, such as ``LDGSTS.E.BYPASS.128``.
        operands: The rest of the line.
        source: The text of the source line it was compiled from.
    """

    address: int
    opcode: str
    operands: str
    source: str

    @property
    def load_bytes(self) -> int:
        """Bytes that one thread asks of global memory; 0 for other instructions."""
        if not _GLOBAL_LOAD.match(self.opcode):
            return 0
        width = _WIDTH.search(self.opcode)
        return int(width.group(1)) // 8 if width else 4


@dataclass(frozen=True)
class Resources:
    """What one thread or program of a kernel takes, in registers and bytes."""

    registers: int
    stack_bytes: int
    static_shared_bytes: int
    local_bytes: int


@dataclass(frozen=True)
class Code:
    """A disassembled kernel."""

    resources: Resources
    instructions: tuple[Instruction, ...]

    def loads(self, wanted: Callable[[str], bool]) -> list[Instruction]:
        """The loads from global memory whose source line is wanted."""
        return [each for each in self.instructions if each.load_bytes and wanted(each.source)]

    def tensor_cores(self) -> dict[str, int]:
        """How many instructions of each kind feed the tensor cores."""
        found: dict[str, int] = {}
        for each in self.instructions:
            if _TENSOR_CORE.match(each.opcode):
                found[each.opcode] = found.get(each.opcode, 0) + 1
        return found


def disassemble(cubin: bytes, sources: Iterable[str | Path]) -> Code:
    """Disassemble a kernel that was compiled with line information, as Triton's are.

    Args:
        cubin: The ELF image.
        sources: Files that the kernel's code may come from. The image names them by the path they had when it was
            compiled, which a cache may keep longer than the file: only the last part of the path counts.

    Raises:
        RuntimeError: A tool is missing or refuses the image.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        listing = _run("nvdisasm", "-c", "-g", file.name)
    found = _RESOURCES.search(usage)
    if found is None:
        raise RuntimeError(f"cuobjdump tells no resources: {usage[:200]!r}")
    return Code(
        Resources(*map(int, found.groups())),
        tuple(_instructions(listing, {Path(path).name: _lines(path) for path in sources})),
    )


def contiguous_bytes(ttgir: str, rows: int, columns: int, element_bytes: int) -> int:
    """Bytes in a row that one warp asks for at once when it reads a (rows, columns) tile from global memory.

    Args:
        ttgir: The compiler's form of the kernel that still names layouts.
        rows, columns: Of the tile, contiguous along columns.
        element_bytes: Of its elements.

    Returns:
        The least over all such reads whose layout runs along the row; 0 if there is none.
    """
    layouts = {name: int(per_thread) * int(threads) for name, per_thread, threads in _LAYOUT.findall(ttgir)}
    reads = [layout for n, k, layout in _READ.findall(ttgir) if (int(n), int(k)) == (rows, columns)]
    spans = [layouts[layout] for layout in reads if layout in layouts]
    return min(min(spans), columns) * element_bytes if spans else 0


def _instructions(listing: str, sources: Mapping[str, tuple[str, ...]]) -> list[Instruction]:
    found, source = [], ""
    for line in listing.splitlines():
        if place := _LINE.search(line):
            lines, number = sources.get(Path(place.group(1)).name, ()), int(place.group(2))
            source = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        elif code := _INSTRUCTION.search(line):
            found.append(Instruction(int(code.group(1), 16), code.group(2), code.group(3).strip(), source))
    return found


@cache
def _lines(path: str | Path) -> tuple[str, ...]:
    return tuple(Path(path).read_text(encoding="utf-8").splitlines())


@cache
def _tool(name: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.is_file():
        raise RuntimeError(f"this triton wheel has no {name}: install one for Linux from the package index")
    return str(path)


def _run(tool: str, *words: str) -> str:
    done = subprocess.run([_tool(tool), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stderr.strip()[:200]}")
    return done.stdout
