"""Tile choices: which block of W one program holds, per kernel, dtype, architecture and number of rows of x.

A tile is a block of ``block_n`` rows of W by ``block_k`` columns, multiplied with ``block_m`` rows of x. What a tile
must satisfy is written once, in `refusal`. The tables were compiled ahead of time for every target: no stack, no
spills, 16-byte weight loads. They are stated for 2-byte elements; a wider element takes proportionally fewer columns,
so that the bytes of a tile, and with them the requests on the bus and the shared memory, stay the same.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

LINE_BYTES = 128  # one request on the bus is at best one full line
INTERPRETER = 0  # the "architecture" of TRITON_INTERPRET=1: time goes per statement, so its tiles are large

_SHARED_BYTES = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
_SHARED_BYTES_OTHER = 99 << 10  # sm_86, sm_89, sm_120


@dataclass(frozen=True)
class Tile:
    """A block of W and x held by one program, and how its loads are pipelined.

    Args:
        block_n: Rows of W.
        block_m: Rows of x.
        block_k: Columns of W and x in one step.
        stages: Depth of the software pipeline around the product.
        warps: Warps of 32 threads in the program.
    """

    block_n: int
    block_m: int
    block_k: int
    stages: int
    warps: int

    def shared_bytes(self, element_bytes: int, arch: int) -> int:
        """Shared memory of the pipelined operands: ``mma.sync`` keeps one buffer fewer than wgmma and tcgen05."""
        buffers = max(1, self.stages - (0 if _warp_group(arch) else 1))
        return buffers * (self.block_n + self.block_m) * self.block_k * element_bytes

    def in_flight_bytes(self, element_bytes: int) -> int:
        """Weight bytes that one program keeps on their way (``mma.sync`` pipelines allocate ``stages - 1`` buffers)."""
        return (self.stages - 1) * self.block_n * self.block_k * element_bytes


@dataclass(frozen=True)
class SkinnyTile(Tile):
    """Tile of the skinny kernel: ``block_m`` covers all rows of x."""


@dataclass(frozen=True)
class WideTile(Tile):
    """Tile of the wide kernel: ``copy_stages`` pipelines the copy into the ring, ``stages`` the product from it."""

    copy_stages: int = 4

    def in_flight_bytes(self, element_bytes: int) -> int:
        """Weight bytes that one program keeps on their way while it copies its rows."""
        return (self.copy_stages - 1) * self.block_n * self.block_k * element_bytes


@dataclass(frozen=True)
class GroupedTile(Tile):
    """Tile of the grouped experts: ``block_m`` tokens of one expert; gate and up each hold ``block_n`` rows of W."""


@dataclass(frozen=True)
class Specialisation:
    """What the compiler is told about one kernel: enough to build it ahead of time and to test its machine code.

    Args:
        kernel: Name of the kernel in its module.
        signature: Argument name -> Triton type (``"*bf16"``, ``"i32"``, ``"constexpr"``), in the kernel's order.
        constexprs: Argument name -> value of the constants.
        divisible_by_16: Names of the arguments that a caller must pass as multiples of 16 (pointers: 16-byte aligned).
        num_warps: Warps of one program.
        num_stages: Default pipeline depth; loops state their own.
    """

    kernel: str
    signature: dict[str, str]
    constexprs: dict[str, Any]
    divisible_by_16: tuple[str, ...]
    num_warps: int
    num_stages: int

    def attrs(self) -> dict[tuple[int], list[list[Any]]]:
        """The hints in the form that ``triton.compiler.ASTSource`` takes."""
        order = list(self.signature)
        return {(order.index(name),): [["tt.divisibility", 16]] for name in self.divisible_by_16}


# Largest number of rows of x -> tile. mma.sync (sm_80, sm_86, sm_89, sm_120) and the fp32 units take narrow tiles
# without spilling; wgmma and tcgen05 multiply 64 rows of W at a time.
_MMA_SYNC = {
    "skinny": {
        8: SkinnyTile(16, 8, 256, 6, 4),
        16: SkinnyTile(32, 16, 256, 4, 4),
        32: SkinnyTile(32, 32, 128, 6, 4),
        64: SkinnyTile(32, 64, 128, 4, 4),
        128: SkinnyTile(32, 128, 64, 4, 4),
        256: SkinnyTile(32, 256, 64, 3, 8),
    },
    "wide": {0: WideTile(64, 128, 64, 3, 8, copy_stages=4)},
    "gate_up": {16: GroupedTile(32, 16, 128, 4, 8), 0: GroupedTile(32, 64, 64, 4, 8)},
    "down": {16: GroupedTile(32, 16, 128, 4, 8), 0: GroupedTile(64, 32, 64, 4, 8)},
}
_WARP_GROUP = {
    "skinny": {
        8: SkinnyTile(16, 8, 256, 6, 4),
        16: SkinnyTile(64, 16, 128, 6, 4),
        32: SkinnyTile(64, 32, 128, 5, 4),
        64: SkinnyTile(64, 64, 128, 4, 4),
        128: SkinnyTile(64, 128, 64, 5, 4),
        256: SkinnyTile(64, 256, 64, 4, 8),
    },
    "wide": {0: WideTile(64, 256, 64, 3, 8, copy_stages=4)},
    "gate_up": {16: GroupedTile(64, 16, 128, 3, 8), 0: GroupedTile(64, 64, 64, 4, 8)},
    "down": {16: GroupedTile(64, 16, 64, 6, 8), 0: GroupedTile(64, 64, 64, 3, 8)},
}
_INTERPRETED = {
    "skinny": {
        16: SkinnyTile(64, 16, 256, 1, 4),
        64: SkinnyTile(64, 64, 256, 1, 4),
        256: SkinnyTile(64, 256, 256, 1, 4),
    },
    "wide": {0: WideTile(64, 256, 256, 1, 4, copy_stages=1)},
    "gate_up": {0: GroupedTile(64, 16, 128, 1, 4)},
    "down": {0: GroupedTile(64, 16, 128, 1, 4)},
}

SKINNY_ROWS = 256  # above this many rows of x, accumulators no longer fit the registers of one program


def _warp_group(arch: int) -> bool:
    """Whether products of an architecture are made by warp groups (wgmma, tcgen05)."""
    return arch // 10 in (9, 10)


def table(kind: str, element_bytes: int, arch: int) -> dict[int, Tile]:
    """All default tiles of a kernel, by the largest number of rows of x each takes (0: any number).

    Args:
        kind: ``skinny``, ``wide``, ``gate_up`` or ``down``.
        element_bytes: Bytes of one element of W.
        arch: Compute capability as an integer (80, 89, 90, 100, 120), or `INTERPRETER`.
    """
    if arch == INTERPRETER:
        choices = _INTERPRETED
    else:
        choices = _WARP_GROUP if _warp_group(arch) and element_bytes < 4 else _MMA_SYNC
    return {rows: replace(tile, block_k=tile.block_k * 2 // element_bytes) for rows, tile in choices[kind].items()}


def pick(kind: str, rows: int, element_bytes: int, arch: int) -> Tile:
    """Choose the tile for a number of rows of x.

    Args:
        kind: ``skinny``, ``wide``, ``gate_up`` or ``down``.
        rows: Rows of x (for experts: of the tokens of one expert).
        element_bytes: Bytes of one element of W.
        arch: Compute capability as an integer, or `INTERPRETER`.

    Returns:
        The smallest tile of `table` that covers ``rows``, with its columns scaled to the element.

    Raises:
        ValueError: No tile of this kernel covers so many rows.
    """
    choices = table(kind, element_bytes, arch)
    limits = sorted(choices, key=lambda limit: limit or math.inf)
    limit = next((limit for limit in limits if limit == 0 or rows <= limit), None)
    if limit is None:
        raise ValueError(f"{kind} takes at most {max(choices)} rows of x, got {rows}: use schedule 'wide' or 'staged'")
    return choices[limit]


def refusal(tile: Tile, element_bytes: int, arch: int) -> str | None:
    """Why this tile must not be used, or None: the one place where the constraints on a tile are written."""
    for name in ("block_n", "block_m", "block_k", "warps"):
        value = getattr(tile, name)
        if value < 1 or value & (value - 1):
            return f"{name}={value} must be a power of two"
    if tile.block_k * element_bytes < LINE_BYTES:
        return (
            f"block_k={tile.block_k} of {element_bytes}-byte elements asks for less than a line of {LINE_BYTES} bytes"
        )
    if tile.block_k < 16:
        return f"block_k={tile.block_k} is less than the 16 that tl.dot needs"
    limit = shared_limit_bytes(arch)
    if arch != INTERPRETER and tile.shared_bytes(element_bytes, arch) > limit:
        return f"{tile.shared_bytes(element_bytes, arch)} bytes of shared memory exceed the {limit} of sm_{arch}"
    return None


def shared_limit_bytes(arch: int) -> int:
    """Shared memory that one program can use on an architecture."""
    return _SHARED_BYTES.get(arch, _SHARED_BYTES_OTHER)
