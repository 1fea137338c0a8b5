"""The kernel bench without its GPU: bytes, bounds, turns, verdicts, and what it says where nothing can be timed."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from bench import kernel_gpu, kernels
from bench.kernel_cases import Case, Measured, cases, parse_shapes, verdicts
from offload.errors import OffloadConfigError

DEVICE = SimpleNamespace(
    sm_bytes_per_s=40e9, ce_bytes_per_s=50e9, hbm_bytes_per_s=4e12, half_flops_per_s=8e14, single_flops_per_s=6e13
)


def case(way, M=16, N=4096, K=4096):
    return Case(M, N, K, torch.bfloat16, way)


def measured(way, seconds, **shape):
    return Measured(case(way, **shape), (seconds, 2 * seconds, seconds / 2), 40e9, 50e9)


def test_skinny_is_left_out_where_it_does_not_apply():
    ways = {M: [c.way for c in cases([M], [(64, 32)], torch.float16)] for M in (256, 257)}
    assert ways[256] == ["skinny", "wide", "staged", "resident", "view", "copy"]
    assert ways[257] == ways[256][1:]


@pytest.mark.parametrize(
    "way, bus_bytes, device_bytes, link",
    [
        ("skinny", 32 << 20, 256 << 10, "sm"),
        ("wide", 32 << 20, (64 << 20) + (256 << 10), "sm"),
        ("staged", 32 << 20, (64 << 20) + (256 << 10), "ce"),
        ("copy", 32 << 20, (64 << 20) + (256 << 10), "ce"),
        ("view", 32 << 20, 256 << 10, "sm"),
        ("resident", 0, (32 << 20) + (256 << 10), "sm"),
    ],
)
def test_bytes(way, bus_bytes, device_bytes, link):
    assert (case(way).bus_bytes, case(way).device_bytes, case(way).link) == (bus_bytes, device_bytes, link)


@pytest.mark.parametrize(
    "way, M, expected_s",
    [
        ("skinny", 16, (32 << 20) / 40e9),
        ("staged", 16, (32 << 20) / 50e9),
        ("resident", 16, ((32 << 20) + (256 << 10)) / 4e12),
        ("wide", 100_000, 2 * 100_000 * 4096 * 4096 / 8e14),
    ],
    ids=["bus", "copies", "device-memory", "flops"],
)
def test_bound(way, M, expected_s):
    assert case(way, M=M).bound_s(DEVICE) == pytest.approx(expected_s)


def test_shares_use_the_median():
    row = measured("skinny", (32 << 20) / 30e9)
    assert row.weight_bytes_per_s == pytest.approx(30e9)
    assert row.share("sm") == pytest.approx(0.75) and row.share("ce") == pytest.approx(0.6)
    assert measured("resident", 1e-3).share("sm") is None


def test_verdicts():
    at_rate = (32 << 20) / 40e9
    rows = [
        measured("skinny", at_rate / 0.96),
        measured("view", at_rate / 0.97),
        measured("staged", (32 << 20) / 50e9 / 0.92),
        measured("wide", at_rate / 0.5, M=2049),
        measured("wide", at_rate / 0.5, M=2048),
        measured("wide", at_rate, M=300, N=1024),
    ]
    found = verdicts(rows)
    assert [line.partition(":")[0] for line in found] == [
        "skinny at M=16, weight 4096 x 4096",
        "staged at M=16, weight 4096 x 4096",
        "wide at M=2048, weight 4096 x 4096",
    ]
    assert "slower than F.linear on a view" in found[0] and "0.920 of the ce rate" in found[1]


def test_ways_take_turns_and_the_first_turn_warms_up():
    order = []

    def clock(todo):
        for call in todo:
            call()
        return [float(len(order))] * len(todo)

    ways = [lambda number, way=way: order.append((way, number)) for way in "ab"]
    assert kernel_gpu.interleaved(ways, 2, clock) == [(4.0, 6.0), (4.0, 6.0)]
    assert order == [("a", 0), ("b", 1), ("a", 2), ("b", 3), ("a", 4), ("b", 5)]


@pytest.mark.parametrize("count", [1, 2, 3, 10, 512])
def test_weights_are_all_visited(count):
    assert {kernel_gpu.scattered(number, count) for number in range(count)} == set(range(count))


def test_pool_cuts_its_memory_into_weights_on_lines(monkeypatch):
    monkeypatch.setattr(kernel_gpu, "page_lock", lambda slab: None)
    monkeypatch.setattr(kernel_gpu, "_PATTERN_BYTES", 4096)
    pool = kernel_gpu.HostPool(10_000)
    weights = pool.weights(5, 33, torch.bfloat16)
    assert len(weights) in (25, 26) and all(weight.data_ptr() % 128 == 0 for weight in weights)
    offsets = [weight.data_ptr() - weights[0].data_ptr() for weight in weights]
    assert offsets == list(range(0, len(weights) * 384, 384))
    assert all(weight.isfinite().all() and weight.count_nonzero() > 100 for weight in weights)
    with pytest.raises(ValueError, match="does not fit a pool of 10000: raise --pool-gib"):
        pool.weights(100, 100, torch.float32)


@pytest.mark.parametrize("text", ["4096", "4096x", "0x4", "4x4x4", "axb"])
def test_shapes_are_refused(text):
    with pytest.raises(OffloadConfigError, match="is no list of shapes NxK"):
        parse_shapes(text)


def test_no_rows_are_refused():
    with pytest.raises(OffloadConfigError, match="--rows 0: a product without rows reads nothing"):
        list(cases([4, 0], [(64, 32)], torch.float16))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time")
class TestWithoutGpu:
    """Bytes and bounds only, and said so."""

    def test_table(self, capsys):
        assert kernels.main(["--shapes", "4096x4096,64x32", "-m", "1,512"]) == 0
        text = capsys.readouterr().out
        assert "nothing was timed" in text and "h200-pcie5" in text
        assert "skinny *" in text and "wide *" in text and "median" not in text

    def test_json(self, capsys):
        assert kernels.main(["--shapes", "4096x4096", "-m", "1", "-o", "json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["measured"] is False
        assert {row["way"]: row["bus_bytes"] for row in result["rows"]}["skinny"] == 32 << 20

    def test_nothing_to_save(self, tmp_path):
        with pytest.raises(OffloadConfigError, match="nothing was measured and --save has nothing to write"):
            kernels.main(["--save", str(tmp_path / "kernels.json")])


def test_table_of_speeds():
    rows = [measured("skinny", (32 << 20) / 30e9), measured("resident", 1e-4)]
    text = kernels.speeds(rows)
    assert "30.0 | 0.750 | 0.600 |" in text and text.splitlines()[-1].endswith("|     - |     - |")
    assert json.loads(json.dumps(rows[0].as_dict()))["way"] == "skinny"


@pytest.fixture
def fake_gpu(monkeypatch):
    """A link of 40 and 50 GB/s, a clock that ticks by milliseconds, and no GPU behind them."""
    probed = []

    def probe(device, *, footprint_bytes):
        probed.append(footprint_bytes)
        return SimpleNamespace(sm_bytes_per_s=40e9, ce_bytes_per_s=50e9)

    monkeypatch.setattr("offload_kernels.probe", probe)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(kernel_gpu, "HostPool", lambda size_bytes: nullcontext())
    monkeypatch.setattr(kernel_gpu, "calls", lambda case, pool, device: lambda number: None)
    monkeypatch.setattr(kernel_gpu, "time_on_device", lambda todo: [1e-3 * (i + 1) for i in range(len(todo))])
    monkeypatch.setattr(
        kernels, "machine", lambda: {"cpu": "c", "cores": 1, "torch_threads": 1, "memory_bytes": 1, "gpus": []}
    )
    monkeypatch.setattr(kernels, "document", lambda name, argv, rows, **more: {"rows": rows, **more})
    return probed


def test_measuring_probes_the_link_at_the_footprint_of_the_pool(fake_gpu):
    rows = list(kernels.measure(list(cases([1, 300], [(64, 32)], torch.bfloat16)), 1 << 30, 2))
    assert fake_gpu == [(1 << 30,)]
    assert [(row.case.M, row.case.way) for row in rows[:2]] == [(1, "skinny"), (1, "wide")] and len(rows) == 11
    assert [row.samples_s for row in rows[5:7]] == [(6e-3, 6e-3), (1e-3, 1e-3)]
    assert rows[0].sm_bytes_per_s == 40e9


def test_report_with_a_gpu(fake_gpu, capsys, tmp_path):
    arguments = ["--shapes", "4096x4096", "-m", "1", "-r", "3", "--save", str(tmp_path / "kernels.json")]
    assert kernels.main(arguments) == 0
    text = capsys.readouterr().out
    assert "Link: kernel loads (sm) 40.0 GB/s, the copy engine (ce) 50.0 GB/s." in text and "| skinny * |" in text
    assert "Short of target: wide at M=1" in text
    saved = json.loads((tmp_path / "kernels.json").read_text())
    assert saved["link"]["ce_bytes_per_s"] == 50e9 and len(saved["rows"]) == 6 and saved["short_of_target"]
