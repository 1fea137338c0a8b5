"""R counted, not assumed: every element of the weight is read once, by one program, and padding never, for any M."""

import pytest
import torch

from offload_kernels import linear
from tests.kernels.interpret.counting import LoadCounter, guarded
from tests.kernels.yardstick import assert_accurate

ROWS = [1, 2, 7, 16, 64, 100, 256, 257, 1000]
CASES = [(schedule, M) for schedule in ("skinny", "wide") for M in ROWS if schedule == "wide" or M <= 256]
WEIGHTS = {
    "tile": (64, 256),
    "ragged": (33, 130),
    "tall": (257, 97),
    "long": (65, 1031),
    "split": (30, 4370),
    "small": (5, 7),
}


@pytest.mark.parametrize("shape", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("schedule, M", CASES)
def test_each_weight_element_crosses_the_bus_once(schedule, M, shape):
    x, weight = torch.randn(M, shape[1]), guarded(torch.randn(shape))
    with LoadCounter() as counter:
        watched = counter.watch(weight)
        y = linear(x, weight, schedule=schedule)
    watched.assert_each_element_loaded_once_by_one_program()
    assert_accurate(y, x, weight)


@pytest.mark.parametrize("schedule", ["skinny", "wide"])
def test_rows_that_begin_on_full_lines_are_no_exception(schedule):
    weight = guarded(torch.randn(70, 352), row_padding=32)
    with LoadCounter() as counter:
        watched = counter.watch(weight)
        linear(torch.randn(20, 352), weight, schedule=schedule)
    watched.assert_each_element_loaded_once_by_one_program()
