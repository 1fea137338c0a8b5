"""The shipped model configurations have the published sizes."""

import pytest

from offload.errors import ModelLoadError
from offload.folder import read_json_object
from offload.model_configs import find, shipped
from offload.models import parameter_specs

# Parameters in units of 10^9, from the names of the models and their reports.
BILLIONS = {
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.09,
}


def test_every_model_that_is_promised():
    assert shipped() == sorted(BILLIONS)


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters(name):
    path, called = find(name)
    config = read_json_object(path, "")
    assert called == name and config["source"] and config["torch_dtype"] == "bfloat16"
    parameters = sum(spec.nbytes for spec in parameter_specs(config)) / 2
    assert parameters / 1e9 == pytest.approx(BILLIONS[name], abs=0.005)


def test_a_file_of_ones_own(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "small.json").write_text("{}")
    assert find(str(folder / "config.json"))[1] == "my-model"
    assert find(str(folder / "small.json"))[1] == "small"


def test_what_is_not_there():
    with pytest.raises(ModelLoadError, match="one of llama-3.1-70b, llama-3.1-8b"):
        find("llama-4")
