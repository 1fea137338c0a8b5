"""Which device a name opens, and what is said when there is none."""

import pytest
import torch

from offload.cpu import CpuDevice
from offload.device import FreeMemory, open_device, require_memory
from offload.errors import ModelLoadError


def test_cpu_by_name() -> None:
    device = open_device("cpu")
    assert isinstance(device, CpuDevice) and device.name == "cpu" and device.torch_device.type == "cpu"
    assert open_device(torch.device("cpu")).name == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the answer with a GPU is the GPU")
def test_without_a_gpu_no_name_means_the_cpu() -> None:
    assert open_device().name == "cpu"


def test_a_virtual_gpu_by_name() -> None:
    assert open_device("virtual:h200-pcie5").name == "virtual:h200-pcie5"


@pytest.mark.parametrize("name", ["cuda:999", "cuda:-1", "cuda:1x", "tpu", "", "CPU", "cuda:99999999999", 3])
def test_an_unknown_device_is_refused_with_those_that_exist(name: object) -> None:
    with pytest.raises(ModelLoadError, match=rf'^no device "{name}" here: choose one of cpu.*virtual:NAME$'):
        open_device(name)


@pytest.mark.gpu
def test_a_gpu_by_name() -> None:
    assert open_device().name == open_device("cuda").name == open_device("cuda:0").name == "cuda:0"


def test_an_allocation_that_does_not_fit_names_both_numbers() -> None:
    memory = FreeMemory(free_bytes=3 * 2**29, total_bytes=2**34)
    require_memory("cuda:0", 3 * 2**29, memory, "offload more")
    with pytest.raises(
        ModelLoadError, match=r"^not enough memory on cuda:0: needs 2\.000 GiB, has 1\.500 GiB; offload more$"
    ):
        require_memory("cuda:0", 2**31, memory, "offload more")
