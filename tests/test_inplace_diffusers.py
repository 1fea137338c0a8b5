"""`offload_` under diffusers' own models, where diffusers is installed: the same outputs, every weight back."""

import pytest
import torch

import offload

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore")

SELECTORS = ["ff", "attn1", "resnets", "attentions"]
CONFIGS = {
    "uva": {"uva": {"cpu_offload_gb": 1, "cpu_offload_params": SELECTORS}},
    "prefetch": {"prefetch": {"offload_group_size": 1, "offload_params": SELECTORS}},
}


def unet():
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    text = torch.randn(1, 5, 16)
    return model, lambda x: model(x, torch.tensor([3]), encoder_hidden_states=text).sample


def dit():
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=3, sample_size=8, num_embeds_ada_norm=10
    )
    return model, lambda x: model(x, timestep=torch.tensor([3]), class_labels=torch.tensor([1])).sample


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("make", [unet, dit])
def test_outputs_are_the_same_and_weights_come_back(make, config):
    torch.manual_seed(0)
    model, run = make()
    model.eval()
    x = torch.randn(1, 4, 8, 8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.inference_mode():
        expected = run(x)
        with offload.offload_(model, config, device="cpu") as handle:
            assert handle.plan.offloaded
            for _ in range(2):
                assert torch.equal(run(x), expected)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_part_that_is_called_outside_its_layer_is_refused():
    """DiT takes an embedding out of its first block; offloaded with the block, it would not be there."""
    model, run = dit()
    with (
        offload.offload_(model, {"prefetch": {"offload_group_size": 1}}, device="cpu"),
        torch.inference_mode(),
        pytest.raises(ValueError, match="ran without its layer being called"),
    ):
        run(torch.randn(1, 4, 8, 8))
