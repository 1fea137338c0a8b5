"""What `import offload` gives, and what it costs."""

import importlib.metadata
import subprocess
import sys

import pytest

import offload

NAMES = {
    "OffloadConfig",
    "OffloadConfigError",
    "OffloadConfigWarning",
    "ModelLoadError",
    "load",
    "Engine",
    "Generation",
    "MemoryReport",
    "offload_",
}


def test_the_public_names_are_these():
    assert set(offload.__all__) == NAMES and len(offload.__all__) == len(NAMES)
    assert NAMES | {"__version__"} <= set(dir(offload))


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_public_name_is_there_and_explained(name):
    assert getattr(offload, name).__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'offload' has no attribute 'offlod'"):
        _ = offload.offlod


def test_errors_are_what_callers_catch():
    assert issubclass(offload.OffloadConfigError, ValueError)
    assert issubclass(offload.OffloadConfigWarning, UserWarning)
    assert issubclass(offload.ModelLoadError, RuntimeError)


def test_the_version_is_the_distributions():
    assert importlib.metadata.version("weight-offload") == offload.__version__


@pytest.mark.parametrize(
    "statement",
    [
        "import offload",
        "from offload import OffloadConfig, OffloadConfigError, OffloadConfigWarning, ModelLoadError",
        "import offload.plan",
        "import offload.suggest",
        "import offload.cli",
    ],
)
def test_configurations_and_plans_need_no_torch(statement):
    code = f"{statement}; import sys; print(sorted({{'torch', 'triton', 'numpy', 'safetensors'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
