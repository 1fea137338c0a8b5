"""What a plan says of itself: each text, its remedy, and silence where all is well."""

import pytest

from offload.config import OffloadConfig
from offload.plan import ParameterSpec, plan

LAYER = {
    "norm.weight": 64,
    "self_attn.qkv_proj.weight": 300,
    "self_attn.o_proj.weight": 100,
    "mlp.down_proj.weight": 500,
}


def model(layers):
    return [ParameterSpec(f"model.layers.{i}.{n}", i, size) for i in range(layers) for n, size in LAYER.items()]


def uva(gb, *selectors):
    return OffloadConfig.of({"uva": {"cpu_offload_gb": gb, "cpu_offload_params": list(selectors)}})


def prefetch(group, count, step, *selectors):
    fields = {"offload_group_size": group, "offload_num_in_group": count, "offload_prefetch_step": step}
    return OffloadConfig.of({"prefetch": fields | {"offload_params": list(selectors)}})


def one_warning(config, layers=6):
    (text,) = plan(model(layers), config).warnings
    return text


def refusal(config, parameters):
    made = plan(parameters, config)
    assert made.offloaded == () and made.refusal and "\n" not in made.refusal
    return made.refusal


@pytest.mark.parametrize("config", [uva(1), uva(1, "mlp"), prefetch(3, 1, 1), prefetch(3, 2, 2, "mlp")], ids=str)
def test_a_good_plan_says_nothing(config):
    made = plan(model(9), config)
    assert made.offloaded and made.warnings == () and made.refusal is None


def test_a_selector_without_a_match_names_the_nearest():
    assert one_warning(uva(1, "mlp", "q_proj")) == (
        'selector "q_proj" matches no parameter of a decoder layer (nearest: "qkv_proj", "o_proj", "down_proj")'
    )


def test_a_selector_near_nothing_is_shown_what_there_is():
    assert 'names are such as "mlp.down_proj.weight"' in one_warning(uva(1, "mlp", "zzzz"))


def test_a_selector_that_the_budget_does_not_reach():
    text = one_warning(uva(100 / 2**30, "o_proj", "layers.4.mlp"))
    assert text.startswith('selector "layers.4.mlp" takes nothing: the budget is spent') and "raise" in text


def test_a_selector_outside_the_chosen_layers():
    text = one_warning(prefetch(3, 1, 1, "mlp", "layers.0"))
    assert text.startswith('selector "layers.0" takes nothing') and "(2, 5)" in text


def test_slots_for_every_layer_free_nothing():
    assert one_warning(prefetch(2, 1, 3)) == (
        "offload_prefetch_step (3) is not below the number of offloaded layers (3), so that the slots hold them all "
        "and no device memory is freed: use a step below 3"
    )
    assert "offload more layers" in one_warning(prefetch(6, 1, 1))


def test_layers_that_stall():
    text = one_warning(prefetch(4, 2, 1), layers=24)
    assert text.startswith("layers 3, 7, 11, 15, 19, 23 always wait") and text.endswith("use offload_prefetch_step 2")
    assert one_warning(prefetch(1, 1, 1), layers=2).endswith("offload fewer layers of each group")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (uva(1, "expert", "w9"), 'selector "expert" matches no'),
        (uva(1, "expert", "w9"), 'selector "w9" matches no'),
        (prefetch(8, 2, 1), "the first offloaded layer is 6, and the model has 5 layers, use an offload_group_size of"),
        (prefetch(3, 1, 1, "layers.0"), 'selectors "layers.0" match only outside the layers'),
        (uva(1e-10), "cpu_offload_gb (1e-10) is less than one byte"),
    ],
)
def test_why_nothing_is_offloaded(config, reason):
    assert reason in refusal(config, model(5))


def test_a_refusal_is_not_also_a_warning():
    made = plan(model(5), prefetch(3, 1, 1, "layers.0"))
    assert made.refusal and made.warnings == ()


def test_nothing_to_offload_in_the_model_itself():
    assert "no decoder layers" in refusal(uva(1), [ParameterSpec("embed", None, 5)])
    assert "no decoder layers" in refusal(prefetch(1, 1, 1), [])
    assert "zero elements" in refusal(uva(1), [ParameterSpec("layers.0.w", 0, 0)])
    assert "zero elements" in refusal(prefetch(1, 1, 1), [ParameterSpec("layers.0.w", 0, 0)])


@pytest.mark.parametrize("selectors", [(), ("w",)], ids=["all", "selected"])
def test_nothing_is_left_when_all_is_shared(selectors):
    parameters = [ParameterSpec(f"layers.{i}.w", i, 8, "one") for i in range(3)]
    text = refusal(prefetch(1, 1, 1, *selectors), parameters)
    assert '"layers.0.w", "layers.1.w", "layers.2.w" stay on the device' in text and "select other" in text
