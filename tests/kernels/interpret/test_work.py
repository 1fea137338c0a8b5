"""How work is cut: all of W, nothing twice, bounded scratch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_kernels import runtime, skinny, staged, tiles, wide

sizes = st.integers(1, 40_000)
archs = st.sampled_from([80, 89, 90, 100, 120])


@given(rows=st.integers(1, 256), N=sizes, K=sizes, arch=archs, element_bytes=st.sampled_from([2, 4]))
def test_skinny_splits_cover_k_and_none_is_empty(rows, N, K, arch, element_bytes):
    tile = tiles.pick("skinny", rows, element_bytes, arch)
    launch = skinny.plan(tile, N, K, element_bytes)
    steps = -(-K // tile.block_k)
    assert launch.splits * launch.steps_per_split >= steps > (launch.splits - 1) * launch.steps_per_split
    tasks = -(-N // tile.block_n) * launch.splits
    assert 1 <= launch.programs <= min(tasks, runtime.saturating_programs(tile, element_bytes))


@given(rows=st.integers(1, 256), arch=archs)
def test_a_large_weight_keeps_the_link_full(rows, arch):
    tile = tiles.pick("skinny", rows, 2, arch)
    launch = skinny.plan(tile, 16384, 4096, 2)
    assert launch.programs * tile.in_flight_bytes(2) >= runtime.IN_FLIGHT_BYTES / 2


@given(N=sizes, K=sizes, arch=archs, processors=st.integers(1, 200), element_bytes=st.sampled_from([2, 4]))
def test_wide_covers_the_rows_within_half_a_weight_of_ring(N, K, arch, processors, element_bytes):
    tile = tiles.pick("wide", 1000, element_bytes, arch)
    launch = wide.plan(tile, N, K, element_bytes, processors)
    assert launch.programs <= processors
    assert launch.programs * launch.rows_per_program >= N > (launch.programs - 1) * launch.rows_per_program
    ring_rows, ring_columns = launch.ring_shape
    assert ring_rows == launch.programs * tile.block_n
    assert ring_rows <= max(tile.block_n, N // 2)
    assert K <= ring_columns < K + runtime.line_elements(element_bytes)


@given(N=st.integers(0, 100_000), row_bytes=st.integers(1, 60_000))
def test_chunks_follow_each_other_within_the_bounds(N, row_bytes):
    ranges = staged.chunks(N, row_bytes)
    borders = [0, *(end for _, end in ranges)]
    assert ranges == list(zip(borders, borders[1:], strict=False)) and borders[-1] == N
    longest = max((end - first for first, end in ranges), default=0)
    assert longest * row_bytes < staged.CHUNK_BYTES + row_bytes
    assert longest <= max(1, -(-N // staged.MIN_CHUNKS))


@pytest.mark.parametrize("kind", ["skinny", "wide", "gate_up", "down"])
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120, tiles.INTERPRETER])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_default_tiles_are_allowed(kind, arch, element_bytes):
    for tile in tiles.table(kind, element_bytes, arch).values():
        assert tiles.refusal(tile, element_bytes, arch) is None


@pytest.mark.parametrize(
    "tile, words",
    [
        (tiles.SkinnyTile(48, 16, 64, 4, 4), "block_n=48 must be a power of two"),
        (tiles.SkinnyTile(64, 16, 32, 4, 4), "less than a line of 128 bytes"),
        (tiles.SkinnyTile(64, 256, 256, 6, 8), "of shared memory exceed"),
    ],
    ids=["power", "line", "shared"],
)
def test_refusals(tile, words):
    assert words in tiles.refusal(tile, 2, 90)


def test_pick_refuses_more_rows_than_the_largest_tile():
    with pytest.raises(ValueError, match="at most 256 rows of x, got 257: use schedule 'wide'"):
        tiles.pick("skinny", 257, 2, 90)


class TestRowsOfX:
    """Kernels load x by 16 bytes: rows that do not begin there are copied to rows that do, others are left alone."""

    def test_aligned_rows_are_left_alone(self):
        x = torch.randn(5, 40, dtype=torch.bfloat16)
        assert runtime.aligned_rows(x) is x and runtime.aligned_rows(x[1:, 8:24]).data_ptr() == x[1, 8:].data_ptr()

    @pytest.mark.parametrize(
        "x",
        [torch.randn(5, 41), torch.randn(5, 40)[:, 1:], torch.randn(40, 5).t(), torch.randn(1, 43)],
        ids=["stride", "base", "transposed", "one-row"],
    )
    def test_others_are_copied(self, x):
        rows = runtime.aligned_rows(x)
        assert torch.equal(rows, x) and rows.stride(1) == 1
        assert rows.stride(0) * 4 % 16 == rows.data_ptr() % 16 == 0

    def test_rows_too_far_apart_for_32_bits_are_copied(self):
        x = torch.empty(2, 1 << 31, dtype=torch.bfloat16, device="meta")[:, :40]
        assert runtime.aligned_rows(x).stride() == (40, 1)


@given(rows=st.integers(1, 5000), kind=st.sampled_from(["gate_up", "down"]), arch=archs)
def test_few_tokens_take_the_tile_for_few(rows, kind, arch):
    tile = tiles.pick(kind, rows, 2, arch)
    smaller = [limit for limit in tiles.table(kind, 2, arch) if 0 < limit < tile.block_m]
    assert all(rows > limit for limit in smaller)
