"""`linear` with a named schedule, in the interpreter: right, deterministic, and written everywhere and nowhere else."""

import pytest
import torch

from offload_kernels import linear, skinny, tiles, wide
from tests.kernels.interpret.counting import guarded
from tests.kernels.yardstick import assert_accurate

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Interpreted tiles are 64 rows of W by 512 bytes: K takes a fraction of a step, one, or several and a fraction.
SHAPES = {
    "decode": (1, 192, 512),
    "decode-ragged": (1, 77, 333),
    "few": (7, 130, 1031),
    "batch": (16, 65, 520),
    "tile": (64, 128, 256),
    "ragged": (100, 131, 257),
    "full": (256, 70, 100),
    "small": (3, 5, 7),
}
# torch rounds a narrow product otherwise than a wide one: fifteen numbers are too few to compare their errors by.
STAGED_SMALL = {"small": (50, 5, 7)}
WIDE_SHAPES = SHAPES | {"above": (257, 300, 130), "prefill": (515, 270, 261)}


def inputs(shape, dtype, bias=True):
    M, N, K = shape
    x, weight = torch.randn(M, K, dtype=dtype), torch.randn(N, K, dtype=dtype)
    return x, weight, torch.randn(N, dtype=dtype) if bias else None


def cases():
    for schedule, shapes in (("skinny", SHAPES), ("wide", WIDE_SHAPES), ("staged", WIDE_SHAPES | STAGED_SMALL)):
        for name, shape in shapes.items():
            yield pytest.param(schedule, shape, id=f"{schedule}-{name}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("schedule, shape", list(cases()))
def test_accuracy(schedule, shape, dtype):
    x, weight, bias = inputs(shape, dtype)
    y = linear(x, weight, bias, schedule=schedule)
    assert_accurate(y, x, weight, bias)


@pytest.mark.parametrize("schedule", ["skinny", "wide", "staged"])
def test_no_bias(schedule):
    x, weight, _ = inputs((5, 66, 70), torch.bfloat16, bias=False)
    assert_accurate(linear(x, weight, schedule=schedule), x, weight)


@pytest.mark.parametrize("schedule", ["skinny", "wide", "staged"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_on_two_runs(schedule, dtype):
    x, weight, bias = inputs((33, 67, 4100), dtype)
    first, second = (linear(x, weight, bias, schedule=schedule) for _ in range(2))
    assert torch.equal(first, second)


def test_wide_and_unsplit_skinny_agree_bit_by_bit():
    x, weight, bias = inputs((40, 150, 600), torch.float32)
    tile = tiles.WideTile(64, 64, 128, 1, 4, copy_stages=1)
    by_wide, by_skinny = torch.empty(40, 150), torch.empty(40, 150)
    wide.run(x, weight, bias, by_wide, tile=tile)
    skinny.run(x, weight, bias, by_skinny, tile=tiles.SkinnyTile(64, 64, 128, 1, 4))
    assert torch.equal(by_wide, by_skinny)


def default_tiles(kind):
    """Every default tile of a kernel, once, however many architectures share it."""
    for arch in (80, 90):
        for size in (2, 4):
            for rows, tile in tiles.table(kind, size, arch).items():
                yield tile, torch.bfloat16 if size == 2 else torch.float32, rows


def tile_cases(kind):
    cases = {(tile, dtype): rows for tile, dtype, rows in default_tiles(kind)}
    for (tile, dtype), rows in cases.items():
        name = f"{dtype}-{tile.block_n}x{tile.block_m}x{tile.block_k}".removeprefix("torch.")
        yield pytest.param(tile, dtype, rows, id=name)


@pytest.mark.parametrize("tile, dtype, rows", list(tile_cases("skinny")))
def test_default_tiles_of_skinny(tile, dtype, rows):
    x, weight, bias = inputs((rows - 1, 2 * tile.block_n + 3, 3 * tile.block_k + 8), dtype)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=dtype)
    skinny.run(x, weight, bias, out, tile=tile)
    assert_accurate(out, x, weight, bias)


@pytest.mark.parametrize("tile, dtype, rows", list(tile_cases("wide")))
def test_default_tiles_of_wide(tile, dtype, rows):
    x, weight, bias = inputs((tile.block_m + 5, 5 * tile.block_n + 3, 3 * tile.block_k + 8), dtype)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=dtype)
    wide.run(x, weight, bias, out, tile=tile)
    assert_accurate(out, x, weight, bias)


@pytest.mark.parametrize("K", [4096, 4101], ids=["even", "ragged"])
def test_split_k(K):
    x, weight, bias = inputs((3, 60, K), torch.bfloat16)
    assert skinny.plan(tiles.pick("skinny", 3, 2, tiles.INTERPRETER), 60, K, 2).splits > 1
    assert_accurate(linear(x, weight, bias, schedule="skinny"), x, weight, bias)


@pytest.mark.parametrize("schedule", ["skinny", "wide", "staged"])
class TestLayouts:
    """Strides and batch shapes that callers bring."""

    def test_batch_dimensions(self, schedule):
        x, weight = torch.randn(2, 3, 40), torch.randn(70, 40)
        assert_accurate(linear(x, weight, schedule=schedule), x, weight)

    def test_one_dimension(self, schedule):
        x, weight = torch.randn(40), torch.randn(70, 40)
        assert_accurate(linear(x, weight, schedule=schedule), x, weight)

    @pytest.mark.parametrize("shape", [(0, 40), (2, 0, 40)], ids=["flat", "batched"])
    def test_no_rows(self, schedule, shape):
        assert linear(torch.empty(shape), torch.randn(70, 40), schedule=schedule).shape == (*shape[:-1], 70)

    def test_no_weight_rows(self, schedule):
        assert linear(torch.randn(3, 40), torch.empty(0, 40), schedule=schedule).shape == (3, 0)

    def test_no_columns(self, schedule):
        bias = torch.randn(70)
        y = linear(torch.empty(3, 0), torch.empty(70, 0), bias, schedule=schedule)
        assert torch.equal(y, bias.expand(3, 70))

    def test_one_column_has_no_stride(self, schedule):
        x, weight = torch.randn(9, 1), torch.randn(1, 70).t()
        assert weight.stride() == (1, 70) and weight.contiguous() is weight
        assert_accurate(linear(x, weight, schedule=schedule), x, weight)

    def test_transposed_x(self, schedule):
        x, weight = torch.randn(40, 9).t(), torch.randn(70, 40)
        assert_accurate(linear(x, weight, schedule=schedule), x, weight)

    def test_x_rows_with_a_stride(self, schedule):
        x, weight = guarded(torch.randn(9, 40), row_padding=5), torch.randn(70, 40)
        assert_accurate(linear(x, weight, schedule=schedule), x, weight)

    def test_every_second_position(self, schedule):
        x, weight = torch.randn(4, 6, 40)[:, ::2], torch.randn(70, 40)
        assert_accurate(linear(x, weight, schedule=schedule), x, weight)

    def test_a_bias_with_a_stride(self, schedule):
        x, weight = torch.randn(9, 40), torch.randn(70, 40)
        for bias in (torch.randn(70, 3)[:, 1], torch.randn(1).expand(70)):
            assert_accurate(linear(x, weight, bias, schedule=schedule), x, weight, bias)

    @pytest.mark.parametrize("padding", [3, 8, 64], ids=["unaligned", "16-bytes", "lines"])
    def test_weight_rows_with_a_stride(self, schedule, padding):
        x, weight = (
            torch.randn(9, 320, dtype=torch.bfloat16),
            guarded(torch.randn(70, 320, dtype=torch.bfloat16), padding),
        )
        assert_accurate(linear(x, weight, schedule=schedule), x, weight)

    def test_weight_in_the_middle_of_memory(self, schedule):
        slab = torch.full((70 * 40 + 1,), float("nan"), dtype=torch.float16)
        weight = slab[1:].view(70, 40)
        weight.copy_(torch.randn(70, 40))
        x = torch.randn(9, 40, dtype=torch.float16)
        assert_accurate(linear(x, weight, schedule=schedule), x, weight)

    def test_out_is_written_and_nothing_beside_it(self, schedule):
        x, weight, bias = inputs((9, 70, 40), torch.bfloat16)
        storage = torch.full((11, 75), float("nan"), dtype=torch.bfloat16)
        out = storage[1:10, 2:72]
        assert linear(x, weight, bias, schedule=schedule, out=out) is out
        assert_accurate(out, x, weight, bias)
        assert storage.isnan().sum() == storage.numel() - out.numel()
