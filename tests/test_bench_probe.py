"""The probe's table and profile, made from given measurements; a GPU is needed for real ones."""

import pytest

from bench.__main__ import main
from bench.gpu_rates import GpuRates
from bench.probe import profile_of, table
from offload.device import open_device
from offload.virtual.profiles import dump_profile, load_profile
from offload_kernels.link import Measurement, rates_of

GIB = 1 << 30
LINK = rates_of(
    [
        Measurement("sm", GIB, 8, 4, 128, 0.03, GIB / 0.03),
        Measurement("sm", GIB, 22, 4, 128, 0.025, GIB / 0.025),
        Measurement("ce", GIB, 0, 0, 0, 0.02, GIB / 0.02),
    ]
)
RATES = GpuRates(4 * 10**12, 8 * 10**14, 5 * 10**13, 2e-6, 1.5e-6, 4.5e-6, 6e-6)


def test_the_table_marks_the_best():
    header, _, *rows = table(LINK)
    assert header.startswith("| footprint GiB |")
    assert rows == [
        "| 1 | kernel loads | 8 | 4 | 128 | 35.79 |",
        "| 1 | kernel loads | 22 | 4 | 128 | 42.95 best |",
        "| 1 | copy engine | - | - | - | 53.69 |",
    ]


def test_a_measured_profile_is_a_virtual_gpu(tmp_path):
    profile = profile_of("NVIDIA Test 9000", 90, 80 * GIB, 512 * GIB, LINK, RATES)
    path = tmp_path / "mine.json"
    path.write_text(dump_profile(profile))
    assert load_profile(str(path)) == profile
    assert open_device(f"virtual:{path}").name == "virtual:nvidia-test-9000"
    assert (profile.sm_bytes_per_s, profile.ce_bytes_per_s) == (int(GIB / 0.025), int(GIB / 0.02))
    assert profile.sources["sm_bytes_per_s"].endswith("NVIDIA Test 9000, 1 GiB of host memory")
    assert profile.issue_s == 4.5e-6


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["--device", "cpu"], 2, "only a CUDA GPU has a link to measure"),
        (["--device", "cuda:99"], 3, "no device"),
        (["--save-profile", "mine.txt"], 2, "ends in .json"),
        (["--footprint", "x"], 2, "is not a number"),
    ],
)
def test_refusals(capsys, words, code, line):
    assert main(["probe", *words]) == code
    assert line in capsys.readouterr().err


@pytest.mark.gpu
def test_this_gpu(tmp_path, capsys):
    path = tmp_path / "mine.json"
    assert main(["probe", "--footprint", "0.25", "--programs", "22", "-r", "2", "--save-profile", str(path)]) == 0
    assert "kernel loads" in capsys.readouterr().out
    profile = load_profile(str(path))
    assert profile.hbm_bytes_per_s > 3 * profile.bus_bytes_per_s
    assert profile.half_flops_per_s > profile.single_flops_per_s
    assert 0 < profile.kernel_s < profile.issue_s < 1e-3
