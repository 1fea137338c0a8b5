"""Draws follow the softmax at the temperature; greedy takes the largest."""

import pytest
import torch

from offload.cpu import CpuDevice
from offload.sampling import LEAST_TEMPERATURE, Sampler

DEVICE = CpuDevice()


def test_greedy_takes_the_largest_logit():
    logits = torch.randn(5, 33)
    assert torch.equal(Sampler(DEVICE)(logits)[:, 0], logits.argmax(1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_softmax(temperature):
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])
    draws = Sampler(DEVICE, temperature)(logits.expand(40_000, -1))[:, 0]
    share = torch.bincount(draws, minlength=5) / 40_000
    # The standard deviation of a share is at most 0.0025.
    torch.testing.assert_close(share, torch.softmax(logits / temperature, 0), rtol=0, atol=0.0125)
    assert share[4] == 0


def test_a_seed_repeats_the_draws_and_gives_each_row_the_same_numbers():
    logits = torch.randn(1, 500).expand(6, -1)
    one, other = Sampler(DEVICE, 2.0, seed=5), Sampler(DEVICE, 2.0, seed=5)
    draws = [one(logits) for _ in range(4)]
    assert all(torch.equal(draw, other(logits)) for draw in draws)
    assert all(len(draw.unique()) == 1 for draw in draws)
    assert len(torch.cat(draws).unique()) > 1
    assert len(Sampler(DEVICE, 2.0)(logits).unique()) > 1


def test_a_low_temperature_is_nearly_greedy():
    logits = torch.randn(64, 33)
    assert torch.equal(Sampler(DEVICE, 1e-4, seed=0)(logits)[:, 0], logits.argmax(1))


@pytest.mark.parametrize("temperature", [LEAST_TEMPERATURE, 1e-9])
def test_the_least_temperature_is_greedy_for_any_logits(temperature):
    logits = torch.randn(64, 33) * 1e4
    assert torch.equal(Sampler(DEVICE, temperature, seed=0)(logits)[:, 0], logits.argmax(1))


def test_the_largest_seed_is_one():
    assert Sampler(DEVICE, 1.0, seed=2**64 - 1)(torch.randn(2, 5)).shape == (2, 1)


def test_bf16_logits_are_drawn_in_float():
    logits = torch.randn(3000, 300).bfloat16()
    assert torch.equal(Sampler(DEVICE, 0.7, seed=1)(logits), Sampler(DEVICE, 0.7, seed=1)(logits.float()))


def test_a_device_without_numbers_needs_no_generator():
    class OnMeta(CpuDevice):
        torch_device = torch.device("meta")

    tokens = Sampler(OnMeta(), 1.0, seed=3)(torch.empty(2, 9, device="meta"))
    assert tokens.shape == (2, 1) and tokens.is_meta
