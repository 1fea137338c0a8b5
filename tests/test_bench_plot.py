"""What the pictures contain."""

import pytest

from bench.plot import save_figure, throughput_figure
from bench.rows import Row

GIB = 2**30


def row(backend, offloaded, step_s, test="tg4", batch=1, bound_s=None, config='{"uva": {"cpu_offload_gb": 1}}'):
    config = '{"prefetch": {"offload_group_size": 4}}' if backend == "prefetch" else config
    fits = step_s is not None
    return Row(
        backend=backend, config=config, model="tiny", device="cpu", simulated=False, load_format="dummy", batch=batch,
        test=test, step_s=step_s, tokens_per_s=batch / step_s if fits else None, bound_s=bound_s,
        offloaded_bytes=offloaded, samples_s=(step_s, step_s * 2) if fits else (),
    )  # fmt: skip


SWEEP = [
    row("none", 0, 0.25),
    row("uva", 2 * GIB, 0.5, bound_s=0.25),
    row("uva", GIB, 0.4),
    row("prefetch", GIB, 0.2),
    row("uva", 3 * GIB, None, test="load"),
]


def lines(axis):
    return {line.get_label(): line for line in axis.get_lines()}


def test_points_are_throughput_against_gib_in_order_of_the_budget():
    (axis,) = throughput_figure(SWEEP, "tiny on cpu, CPU times").axes
    (bars,) = [bars for bars in axis.containers if bars.get_label() == "uva"]
    assert bars.lines[0].get_xydata().tolist() == [[1.0, 2.5], [2.0, 2.0]]
    assert "GiB" in axis.get_xlabel() and axis.get_title() == "tg4"


def test_bound_is_a_line_and_what_does_not_fit_a_cross():
    (axis,) = throughput_figure(SWEEP, "t").axes
    assert lines(axis)["bound, uva"].get_xydata().tolist() == [[2.0, 4.0]]
    assert lines(axis)["does not fit"].get_xydata().tolist() == [[3.0, 0.0]]


def test_one_panel_for_each_test_and_a_series_for_each_batch():
    rows = [row("uva", GIB, 0.5, test, batch) for test in ("pp8", "tg4") for batch in (1, 4)]
    figure = throughput_figure(rows, "t")
    assert [axis.get_title() for axis in figure.axes] == ["pp8", "tg4"]
    assert {bars.get_label() for bars in figure.axes[1].containers} == {"uva, batch 1", "uva, batch 4"}


def test_a_wide_range_is_drawn_on_a_logarithmic_axis():
    (narrow,) = throughput_figure(SWEEP, "t").axes
    (wide,) = throughput_figure([*SWEEP, row("uva", 4 * GIB, 9.0)], "t").axes
    assert (narrow.get_yscale(), wide.get_yscale()) == ("linear", "log")


@pytest.mark.parametrize("rows", [[], [row("uva", GIB, None, test="load")]], ids=["empty", "nothing-fits"])
def test_a_sweep_without_times_still_draws(rows, tmp_path):
    assert save_figure(throughput_figure(rows, "t"), tmp_path / "x" / "a.png").stat().st_size > 1000


def test_the_title_travels_in_the_file(tmp_path):
    path = save_figure(throughput_figure(SWEEP, "tiny, simulated (h200-pcie5)"), tmp_path / "a.png")
    assert b"simulated (h200-pcie5)" in path.read_bytes()
