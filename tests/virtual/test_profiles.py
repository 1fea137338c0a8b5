"""Every number of a profile has a source, and a file of one's own reads like a shipped one."""

import json

import pytest

from offload.device import open_device
from offload.errors import ModelLoadError
from offload.virtual import load_profile, shipped_profiles
from offload.virtual.profiles import dump_profile, parse_profile


def test_the_profiles_that_are_promised():
    assert {"rtx4090-pcie4", "a100-pcie4", "h200-pcie5", "gh200"} <= set(shipped_profiles())


@pytest.mark.parametrize("profile", shipped_profiles().values(), ids=shipped_profiles())
def test_numbers_are_plausible_and_sourced(profile):
    assert all(len(source) > 20 for source in profile.sources.values())
    assert profile.half_flops_per_s > profile.single_flops_per_s
    assert profile.hbm_bytes_per_s > 5 * profile.bus_bytes_per_s >= 5 * profile.sm_bytes_per_s
    assert profile.host_memory_bytes > profile.memory_bytes
    assert profile.kernel_ps == 2_000_000


def test_a_file_comes_back_as_it_was_written(tmp_path):
    profile = load_profile("gh200")
    path = tmp_path / "mine.json"
    path.write_text(dump_profile(profile))
    assert load_profile(str(path)) == profile
    device = open_device(f"virtual:{path}")
    assert device.name == "virtual:gh200" and device.simulated


@pytest.mark.parametrize(
    ("field", "entry", "message"),
    [
        ("sm_bytes_per_s", {"value": 0, "source": "probe"}, "positive whole number"),
        ("sm_bytes_per_s", {"value": 1.5, "source": "probe"}, "positive whole number"),
        ("kernel_s", {"value": "2", "source": "probe"}, "number of seconds"),
        ("sm_bytes_per_s", {"value": float("inf"), "source": "probe"}, "positive whole number"),
        ("sm_bytes_per_s", {"value": True, "source": "probe"}, "positive whole number"),
        ("kernel_s", {"value": float("nan"), "source": "probe"}, "number of seconds"),
        ("kernel_s", {"value": 1e300, "source": "probe"}, "number of seconds"),
        ("kernel_s", {"value": -1e-6, "source": "probe"}, "number of seconds"),
        ("kernel_s", {"value": 1e-6, "source": ""}, "with a source"),
        ("kernel_s", 1e-6, "with a source"),
        ("speed", {"value": 1, "source": "probe"}, "differs in .*speed"),
    ],
)
def test_faulty_files_are_refused(field, entry, message):
    document = json.loads(dump_profile(load_profile("gh200")))
    document["numbers"][field] = entry
    with pytest.raises(ModelLoadError, match=message):
        parse_profile(document, "mine.json")


@pytest.mark.parametrize("name", ["", None, ["mine"], 7])
def test_a_profile_needs_a_name(name):
    with pytest.raises(ModelLoadError, match="needs a name"):
        parse_profile({**json.loads(dump_profile(load_profile("gh200"))), "name": name}, "mine.json")


def test_unknown_names_list_the_known(tmp_path):
    with pytest.raises(ModelLoadError, match="no profile 'h300'; shipped are rtx4090-pcie4"):
        open_device("virtual:h300")
    with pytest.raises(ModelLoadError, match="no such profile file"):
        open_device(f"virtual:{tmp_path}/none.json")


@pytest.mark.parametrize(
    "text", ["{", "[1]", "{}", '{"name": "mine", "numbers": null}', '{"name": "mine", "numbers": [[]]}']
)
def test_a_file_that_holds_no_profile(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ModelLoadError, match="mine.json"):
        load_profile(str(path))
