"""Rotary frequencies are transformers' own, bit for bit, from the new keys and from the old ones."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from offload.models.rope import Rotary, attention_factor, inverse_frequencies, read_rope

SCALINGS = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-options": {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
    "yarn-attention-factor": {"factor": 2.0, "original_max_position_embeddings": 4096, "attention_factor": 1.25},
    "yarn-of-whole-context": {"factor": 4.0},
}
THETA, HEAD_DIM, CONTEXT = 500_000.0, 128, 131_072


@pytest.mark.parametrize("case", SCALINGS)
def test_frequencies_equal_those_of_transformers(case):
    kind, options = case.split("-")[0], SCALINGS[case]
    config = LlamaConfig(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": kind, "rope_theta": THETA, **options},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    new = {"rope_parameters": {"rope_type": kind, "rope_theta": THETA, **options}}
    old = {"rope_scaling": {"type": kind, **options}, "rope_theta": THETA}
    for keys in (new, old):
        rope = read_rope(keys, HEAD_DIM, CONTEXT)
        actual = inverse_frequencies(rope, torch.device("cpu"))
        torch.testing.assert_close(actual, expected, rtol=2e-7, atol=0)
        assert attention_factor(rope) == pytest.approx(factor, rel=1e-12)


def test_default_frequencies_from_either_place_of_theta():
    expected = 1.0 / THETA ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    for keys in ({"rope_theta": THETA}, {"rope_parameters": {"rope_theta": THETA, "rope_type": "default"}}):
        rope = read_rope({**keys, "rope_scaling": None}, HEAD_DIM, CONTEXT)
        assert torch.equal(inverse_frequencies(rope, torch.device("cpu")), expected)
    assert read_rope({}, HEAD_DIM, CONTEXT).theta == 10_000.0


def test_a_rotation_turns_channel_pairs_and_keeps_lengths():
    rotary = Rotary(read_rope({}, 6, 64))
    rotary.prepare(torch.device("cpu"))
    heads = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2], [7, 0, 63]])
    turned = rotary(positions, torch.float64)(heads)
    assert torch.equal(turned[0, 0], heads[0, 0]) and torch.equal(turned[1, 1], heads[1, 1])
    as_complex = torch.complex(heads[..., :3], heads[..., 3:])
    angles = positions[..., None, None] * inverse_frequencies(read_rope({}, 6, 64), torch.device("cpu"))
    expected = as_complex * torch.polar(torch.ones_like(angles), angles).to(torch.complex128)
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), -1), rtol=0, atol=1e-6)
