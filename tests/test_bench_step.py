"""The prefetch sweep: what runs, what is left out and why, what is best, and how it is drawn."""

import json
import math

import pytest

from bench.__main__ import main
from bench.heat import heat_figure, place
from bench.rows import Row
from bench.step import best_rows
from offload.config import OffloadConfig
from offload.virtual.profiles import dump_profile, load_profile
from tests.test_bench_budget import TINY

GIB = 1 << 30


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


def step(config, *words):
    fixed = ["--model-config", str(config), "--load-format", "meta", "--device", "virtual:h200-pcie5", "-n", "2"]
    return main(["step", *fixed, "--plot", str(config.parent / "heat.png"), *words])


def test_the_cross_product_runs_and_the_rest_is_left_out_with_reasons(config, capsys):
    words = ["--offload-group-size", "1-3", "--offload-num-in-group", "1,2", "--offload-prefetch-step", "1,2,6"]
    assert step(config, *words) == 0
    text = capsys.readouterr().out
    assert "simulated on h200-pcie5" in text
    assert (
        "Left out: 2 of 1, step 1-2, 6: " in text
        and "offload_num_in_group (2) must be <= offload_group_size (1)" in text
    )
    assert "Left out: 1 of 2, step 6: the slots take as much as is offloaded" in text
    shown = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| prefetch")]
    # 1 of 1, 1 of 2, 2 of 2, 1 of 3, 2 of 3 with steps 1 and 2, less 1 of 3 with step 2: two slots for two layers.
    assert len(shown) == 9
    assert (config.parent / "heat.png").is_file()


def test_the_best_can_be_pasted(config, capsys):
    words = ["--offload-group-size", "2,3", "--offload-prefetch-step", "1,2"]
    assert step(config, *words, "--device-memory", "1,0.0005") == 0
    text = capsys.readouterr().out
    configs = [line for line in text.splitlines() if line.startswith("--offload-config '")]
    assert configs and "at most 1 GiB" in text
    for line in configs:
        assert OffloadConfig.from_json(
            line.removeprefix("--offload-config '").removesuffix("'")
        ).is_offloading_enabled()


def test_equal_memory_gives_each_an_opponent_with_no_more_memory(config, capsys):
    assert (
        step(config, "--offload-group-size", "2", "--offload-prefetch-step", "1,2", "--equal-memory", "-o", "json") == 0
    )
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["backend"] for row in rows] == ["prefetch", "uva"] * 2
    for ours, opponent in zip(rows[::2], rows[1::2], strict=True):
        # Beside what uva stages a layer's vectors through.
        assert opponent["device_bytes"] <= ours["device_bytes"] + 1024
        assert ours["step_s"] == pytest.approx(ours["bound_s"] + ours["idle_s"])


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["--offload-group-size", "9"], 2, "no combination can be run: 1 of 9, step 1-4: "),
        (["--offload-group-size", "2", "--offload-prefetch-step", "0"], 2, "no combination can be run"),
        (["-n", "0"], 2, "leave nothing to measure"),
        (["--profile", "gh200"], 2, "--profile gives the bound of a real GPU"),
    ],
)
def test_refusals(config, capsys, words, code, line):
    assert step(config, *words) == code
    assert line in capsys.readouterr().err


def row(speed, memory_gib, group=2, count=1, ahead=1, backend="prefetch"):
    fields = {"offload_group_size": group, "offload_num_in_group": count, "offload_prefetch_step": ahead}
    text = json.dumps({backend: fields if backend == "prefetch" else {"cpu_offload_gb": 1}})
    times = {"tokens_per_s": speed, "step_s": 1 / speed, "stall_s": 0.01, "samples_s": (1 / speed,)} if speed else {}
    sizes = {"device_bytes": int(memory_gib * GIB), "slot_bytes": GIB}
    return Row(backend, text, "m", "virtual:x", True, "meta", 1, "tg4", **times, **sizes)


def test_what_does_not_fit_has_no_picture_of_its_own(config, capsys):
    tight = config.parent / "tight.json"
    document = json.loads(dump_profile(load_profile("h200-pcie5")))
    document["numbers"]["memory_bytes"]["value"] = 300_000  # for all layers on the host, not for half of them
    tight.write_text(json.dumps(document))
    words = ["--device", f"virtual:{tight}", "--offload-group-size", "1,2", "--offload-prefetch-step", "1"]
    assert step(config, *words, "-o", "json") == 0
    out = capsys.readouterr()
    assert {row["test"] for row in json.loads(out.out)["rows"]} == {"load", "tg2"}
    assert out.err.count("picture") == 1 and (config.parent / "heat.png").is_file()
    document["numbers"]["memory_bytes"]["value"] = 1
    tight.write_text(json.dumps(document))
    (config.parent / "heat.png").unlink()
    assert step(config, *words) == 0
    assert "picture" not in capsys.readouterr().err and not (config.parent / "heat.png").exists()


def test_rows_that_no_other_beats():
    rows = [row(5, 4), row(9, 8), row(8, 9), row(5, 3), row(None, 1), row(2, 2)]
    assert [(r.tokens_per_s, text) for text, r in best_rows(rows, ())] == [(9, "8 GiB"), (5, "3 GiB"), (2, "2 GiB")]
    given = [(text, r.tokens_per_s) for text, r in best_rows(rows, [4 * GIB, 100 * GIB, 1])]
    assert given == [("at most 4 GiB", 5), ("at most 100 GiB", 9)]


def test_a_heat_map_has_a_cell_per_configuration():
    rows = [row(5, 4), row(6, 4, ahead=2), row(7, 4, group=3), row(1, 4, backend="uva"), row(None, 4, group=3, ahead=2)]
    assert place(rows[0]) == ("1 of 2", 1) and place(rows[3]) is None
    figure = heat_figure(rows, "m, simulated on x")
    speed, stall, slots = figure.get_axes()
    values = speed.get_images()[0].get_array().filled(math.nan).tolist()
    assert values[0] == [5, 6] and values[1][0] == 7 and math.isnan(values[1][1])
    assert [tick.get_text() for tick in speed.get_xticklabels()] == ["1", "2"]
    assert [tick.get_text() for tick in speed.get_yticklabels()] == ["1 of 2", "1 of 3"]
    assert stall.get_images()[0].get_array()[0][0] == pytest.approx(10)
    assert slots.get_images()[0].get_array()[0][0] == 1
    assert figure.get_suptitle() == "m, simulated on x"
