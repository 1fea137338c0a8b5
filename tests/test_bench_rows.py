"""The row schema and its four forms."""

import csv
import io
import json
from dataclasses import replace

import pytest

from bench.rows import FORMATS, SCHEMA, Row, markdown, render, short_config

ISSUED = (
    "backend, config, model, device, simulated, load_format, batch, test, tokens_per_s, step_s, bound_s, "
    "share_of_bound, bound_fastest_link_s, offloaded_bytes, device_bytes, slot_bytes, bus_bytes_per_step, "
    "bus_bytes_per_s, stall_s, idle_s, samples_s"
)
CARD = {"cpu": "Test CPU", "cores": 2, "torch_threads": 2, "memory_bytes": 2**34, "gpus": []}
UVA = '{"uva": {"cpu_offload_gb": 0.5}}'


def row(**changes):
    return replace(
        Row(
            backend="uva", config=UVA, model="tiny", device="cpu", simulated=False, load_format="dummy", batch=2,
            test="tg4", tokens_per_s=4.0, step_s=0.5, offloaded_bytes=2**29, device_bytes=2**30, slot_bytes=0,
            bus_bytes_per_step=2**29, bus_bytes_per_s=2**30, samples_s=(0.25, 0.5, 1.0),
        ),
        **changes,
    )  # fmt: skip


def printed(form, rows):
    return "\n".join(render(form, rows, CARD, "tiny on cpu"))


def test_the_schema_is_the_agreed_one_and_what_else_there_is_to_say():
    assert ", ".join(SCHEMA) == f"{ISSUED}, tokens, note"


def test_json_is_machine_and_rows_and_nothing_else():
    value = json.loads(printed("json", [row()]))
    assert set(value) == {"machine", "rows"} and value["machine"] == CARD
    assert value["rows"] == [row().as_dict()] and list(value["rows"][0]) == list(SCHEMA)


def test_jsonl_is_one_object_a_line():
    assert [json.loads(line)["batch"] for line in printed("jsonl", [row(), row(batch=7)]).splitlines()] == [2, 7]


def test_csv_reads_back():
    found = list(csv.DictReader(io.StringIO(printed("csv", [row(), row(step_s=None, samples_s=(), note="a, b")]))))
    assert list(found[0]) == list(SCHEMA)
    assert float(found[0]["step_s"]) == 0.5 and json.loads(found[0]["samples_s"]) == [0.25, 0.5, 1.0]
    assert found[1]["step_s"] == "" and found[1]["note"] == "a, b" and found[0]["config"] == UVA


def test_md_says_once_what_never_varies_and_keeps_results():
    text = markdown([row().as_dict(), row(batch=3, samples_s=(0.5,)).as_dict()])
    head, table = text.split("\n\n")
    header = [cell.strip() for cell in table.splitlines()[0].strip("|").split("|")]
    assert header == ["offloaded GiB", "device GiB", "batch", "tok/s", "step ms", "bus GB/s"]
    for words in ("model tiny", "device cpu", "weights dummy", "config uva 0.5 GiB", "test tg4"):
        assert words in head
    assert "offloaded GiB" not in head and "device GiB" not in head


def test_md_gives_mean_and_deviation_median_and_spread_and_units():
    line = markdown([row().as_dict()]).splitlines()[-1]
    # Two sequences in 0.25, 0.5 and 1 s: 8, 4 and 2 tokens/s.
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "0.500", "1.00", "4.67 ± 3.06", "500.0 (250.0-1000)", "1.07",
    ]  # fmt: skip


def test_a_prompts_speed_counts_its_tokens_in_every_sequence():
    line = markdown([row(test="pp10", samples_s=(0.5,)).as_dict()]).splitlines()[-1]
    assert line.strip("|").split("|")[2].strip() == "40.00"


def test_md_shows_a_row_without_times_by_its_note():
    refused = row(step_s=None, tokens_per_s=None, samples_s=(), bus_bytes_per_s=None, note="does not fit: needs 2 GiB")
    line = markdown([row().as_dict(), refused.as_dict()]).splitlines()[-1]
    assert "does not fit: needs 2 GiB" in line and "None" not in line


def test_every_form_prints_an_empty_sweep():
    assert all(isinstance(printed(form, []), str) for form in FORMATS)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (None, "no offload"),
        (UVA, "uva 0.5 GiB"),
        ('{"uva": {"cpu_offload_gb": 2, "cpu_offload_params": ["mlp", "experts"]}}', "uva 2 GiB of experts+mlp"),
        ('{"prefetch": {"offload_group_size": 8, "offload_num_in_group": 2}}', "prefetch 2 of 8, step 1"),
        ('{"offload_backend": "uva", "uva": {"cpu_offload_gb":1}, "prefetch": {"offload_group_size": 8}}', "uva 1 GiB"),
    ],
)
def test_a_config_in_few_words(config, text):
    assert short_config(config) == text
