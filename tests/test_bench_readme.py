"""README.md shows what bench/results holds, and those files say where their numbers come from."""

import json
import re

import pytest

from bench.machine import REPOSITORY
from bench.readme import README, RESULTS, filled

MACHINE = {"cpu": "Test CPU", "cores": 2, "torch_threads": 2, "memory_bytes": 2**34, "gpus": []}
HEAD = {"commit": "abc", "machine": MACHINE, "versions": {"torch": "2", "python": "3"}}


def row(config, test, step_s, device_bytes, bound_s=None, note=""):
    share = bound_s / step_s if bound_s else None
    return {
        "config": config, "test": test, "batch": 1, "step_s": step_s, "bound_s": bound_s, "share_of_bound": share,
        "offloaded_bytes": 2**30 if config else 0, "device_bytes": device_bytes, "note": note,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    uva = '{"uva": {"cpu_offload_gb": 1}}'
    rows = [
        row(None, "load", None, None, note="does not fit: needs 3 GiB, has 2 GiB"),
        row(uva, "pp8", 2.0, 2**31, bound_s=1.0),
        row(uva, "tg4", 0.5, 3 * 2**30, bound_s=0.45),
    ]
    sweep = {**HEAD, "command": "python -m bench budget -r 3 --save bench/results/a.json", "title": "m, simulated on x"}
    (tmp_path / "a.json").write_text(json.dumps({**sweep, "rows": rows}))
    load = {**HEAD, "command": "python -m bench load", "ratio": 0.9, "target_ratio": 0.8, "rows": []}
    hooks = {**HEAD, "command": "python -m bench hooks", "rows": [{"hooks_s": 2e-6}, {"hooks_s": 9e-6}]}
    (tmp_path / "load.json").write_text(json.dumps(load))
    (tmp_path / "hooks.json").write_text(json.dumps(hooks))
    return tmp_path


def test_a_sweep_becomes_one_row_per_configuration(folder):
    text = filled("before\n<!-- throughput a.json -->\nold\n<!-- end -->\nafter\n", folder)
    assert text == (
        "before\n<!-- throughput a.json -->\n"
        "| configuration | offloaded GiB | device GiB | pp8 tok/s | tg4 tok/s | pp8 of bound | tg4 of bound |\n"
        "|---|--:|--:|--:|--:|--:|--:|\n"
        "| no offload | 0 | - | does not fit: needs 3 GiB, has 2 GiB | - | - | - |\n"
        "| uva 1 GiB | 1.00 | 3.00 | 4.00 | 2.00 | 50% | 90% |\n\n"
        "*Simulated on x*, not measured: `python -m bench budget -r 3` ([result](bench/results/a.json)).\n"
        "<!-- end -->\nafter\n"
    )
    assert filled(text, folder) == text


def test_figures_say_what_was_missed(folder):
    lines = filled("<!-- figures load.json hooks.json -->\n<!-- end -->", folder).splitlines()
    assert "| 0.9 | at most 0.8 | **missed**, [load.json](bench/results/load.json) |" in lines[3]
    assert "| 9 us | at most 15 us | reached, [hooks.json]" in lines[4]


@pytest.mark.parametrize(
    ("block", "words"), [("throughput none.json", "none.json, which is not there"), ("pie a.json", "'pie' is unknown")]
)
def test_a_block_that_cannot_be_filled_is_refused(folder, block, words):
    with pytest.raises(ValueError, match=words):
        filled(f"<!-- {block} -->\n<!-- end -->", folder)


def test_readme_shows_what_the_results_hold():
    assert filled(README.read_text(encoding="utf-8")) == README.read_text(encoding="utf-8")


def test_readme_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8"))
    assert len(links) > 10
    assert [link for link in links if "://" not in link and not (REPOSITORY / link).exists()] == []


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_a_result_says_where_it_comes_from_and_nothing_of_the_place(path):
    document = json.loads(path.read_text(encoding="utf-8"))
    assert {"command", "commit", "machine", "versions", "rows"} <= set(document)
    assert document["command"].startswith("python -m bench ") and document["commit"]
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|usr|mnt)/", path.read_text(encoding="utf-8"))
