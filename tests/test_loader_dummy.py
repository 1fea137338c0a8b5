"""Random weights without files: the same for a name wherever it lives, of a sensible size, and quick."""

import zlib

import pytest
import torch

from offload import dummy
from offload.dummy import BLOCK_ELEMENTS, DummyWeights
from tests.test_loader_reader import Accelerator, remote


class Copier(Accelerator):
    """Also issues operators, and copies within the device in order."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = 0

    def active(self):
        return self

    def __enter__(self):
        self.inside += 1

    def __exit__(self, *_):
        self.inside -= 1

    def copy(self, destination, source):
        assert self.inside, "an operator outside of active()"
        super().copy(destination, source)


def filled(name, shape, dtype=torch.float32, seed=0, on_device=False) -> torch.Tensor:
    device = Copier()
    reader = DummyWeights(seed).reader(device)
    destination = torch.full(shape, float("nan"), dtype=dtype)
    reader.read_into(name, remote(destination) if on_device else destination)
    reader.close()
    reader.close()
    assert (device.allocated != []) == on_device
    assert not destination.isnan().any()
    return destination


def test_the_block_has_a_prime_length():
    assert all(BLOCK_ELEMENTS % divisor for divisor in range(2, 1025))


@pytest.mark.parametrize("shape", [(1,), (), (7, 3), (BLOCK_ELEMENTS,), (3, 700_001), (5, 1024, 1024)])
def test_every_element_is_written_and_equal_on_host_and_device(shape):
    on_host = filled("a.weight", shape)
    assert torch.equal(on_host, filled("a.weight", shape, on_device=True))


def test_names_and_seeds_differ_and_repeat():
    first = filled("a.weight", (64, 64))
    assert torch.equal(first, filled("a.weight", (64, 64)))
    assert not torch.equal(first, filled("b.weight", (64, 64)))
    assert not torch.equal(first, filled("a.weight", (64, 64), seed=1))


def test_a_weight_is_the_same_in_every_process():
    noise = torch.randn(BLOCK_ELEMENTS, generator=torch.Generator().manual_seed(5))
    start = zlib.crc32(b"a.weight") % BLOCK_ELEMENTS
    assert torch.equal(filled("a.weight", (2, 4), seed=5).view(-1), noise[start : start + 8] * 0.5)


def test_a_weight_does_not_depend_on_what_is_loaded_beside_it():
    reader = DummyWeights().reader(Copier())
    for name in ("z.weight", "norm.weight", "a.weight"):
        last = torch.empty(64, 64) if name != "norm.weight" else torch.empty(64)
        reader.read_into(name, last)
    reader.close()
    assert torch.equal(last, filled("a.weight", (64, 64)))


def test_matrices_keep_variance_norms_scale_by_one_biases_are_small():
    matrix = filled("mlp.weight", (300, 4096))
    assert abs(matrix.std() * 64 - 1) < 0.02 and abs(matrix.mean() * 64) < 0.01
    norm, bias = filled("norm.weight", (4096,)), filled("q_proj.bias", (4096,))
    assert abs(norm.mean() - 1) < 0.01 and 0.015 < norm.std() < 0.025
    assert abs(bias.mean()) < 0.01 and 0.015 < bias.std() < 0.025


def test_no_two_rows_are_equal_although_the_block_repeats():
    rows = filled("embed.weight", (4096, 1024), torch.float32)
    assert rows[:, :8].unique(dim=0).shape[0] == 4096


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_any_float_dtype(dtype):
    expected = filled("a.weight", (64, 64)).to(dtype)
    assert torch.allclose(filled("a.weight", (64, 64), dtype).double(), expected.double(), atol=1e-2)


def test_meta_and_empty_destinations_are_left_alone():
    reader = DummyWeights().reader(Copier())
    reader.read_into("a", torch.empty(4, device="meta"))
    reader.read_into("a", torch.empty(0))
    assert not reader._blocks
    reader.close()


def test_blocks_are_made_once_per_scale(monkeypatch):
    made = []
    whole = dummy.map_anonymous
    monkeypatch.setattr(dummy, "map_anonymous", lambda nbytes: made.append(nbytes) or whole(nbytes))
    reader = DummyWeights().reader(Copier())
    for layer in range(9):
        reader.read_into(f"{layer}.weight", torch.empty(4, 8))
        reader.read_into(f"{layer}.norm.weight", torch.empty(8))
    reader.close()
    assert len(made) == 2
