"""The same engine, backends and models on a virtual GPU: equal tokens, no race, the planned bytes, explained times."""

import json
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.engine import load
from offload.errors import ModelLoadError
from offload.model_configs import find
from offload.virtual import VirtualDevice, VirtualOutOfMemoryError
from tests.test_prefetch import not_shared, poison_after_use, shared_between_layers, shared_within_a_layer
from tests.toys import TOKENS, Toy, logits, offloaded, prefetch

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
PROMPTS = [[5, 3, 96, 1], [11, 12]]


@pytest.fixture(scope="session")
def config_of(tmp_path_factory):
    """Write a config.json with these differences from the tiny one and return its path."""
    folder = tmp_path_factory.mktemp("configs")

    def write(**changes):
        path = folder / f"{len(list(folder.iterdir()))}.json"
        path.write_text(json.dumps({**TINY, **changes}))
        return str(path)

    return write


def tokens(engine, count=5, prompts=PROMPTS):
    return [answer.token_ids for answer in engine.generate(prompts, count, stop_at_eos=False)]


@given(
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    group=st.integers(1, 6),
    count=st.integers(1, 6),
    step=st.integers(1, 6),
    share=st.sampled_from([not_shared, shared_within_a_layer, shared_between_layers]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=25, deadline=None)
def test_any_ring_races_nowhere_and_moves_what_was_planned(widths, group, count, step, share, dtype):
    count = min(count, group)
    if len(widths) <= group - count:
        return
    device = VirtualDevice("h200-pcie5")
    model, plain = share(Toy(widths)).to(dtype), share(Toy(widths)).to(dtype)
    backend, plan = offloaded(model, prefetch(group, count, step), device)
    poison_after_use(model, backend)
    expected = logits(plain).float().tolist()
    with device.active():
        for _ in range(4):
            assert device.to_host(model(TOKENS).float()) == expected
            device.mark_step("tg")
    moving = [layer for k, layer in enumerate(plan.offloaded_layers) if plan.next_owner(k) != k]
    assert device.step_report().bus_bytes == sum(backend._slab.layer(layer).numel() for layer in moving)
    assert all(report.bound.bound_s * 10**12 <= round(report.step_s * 1e12) for report in device.step_reports()[1:])
    backend.close()


CONFIGS = {
    "none": None,
    "uva": {"uva": {"cpu_offload_gb": 3e-5}},
    "uva-all": {"uva": {"cpu_offload_gb": 1}},
    "step-1": prefetch(2, 1, 1),
    "step-2": prefetch(3, 2, 2),
    "all": prefetch(1, 1, 3),
    "held": prefetch(2, 1, 9),
}


@pytest.mark.filterwarnings("ignore::offload.OffloadConfigWarning")
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_tokens_are_those_of_the_model_without_offload(config_of, config, graph):
    path = config_of(num_hidden_layers=5)
    with load(path, None, "cpu", load_format="dummy") as engine:
        expected = tokens(engine)
    device = VirtualDevice("h200-pcie5")
    with load(path, config, device, load_format="dummy", graph=graph) as engine:
        # Several generations, of other shapes too: nothing of one may stand in the way of the next.
        assert tokens(engine) == expected
        assert tokens(engine, 3, PROMPTS[:1]) == [expected[0][:3]]
        assert tokens(engine) == expected
    for report in device.step_reports():
        assert report.bound.bound_s * 10**12 <= round(report.step_s * 1e12)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("config", [CONFIGS["uva"], CONFIGS["step-2"]], ids=["uva", "prefetch"])
def test_meta_takes_the_same_simulated_time(config_of, config, graph):
    path = config_of(num_hidden_layers=5)

    def times(device, load_format):
        with load(path, config, device, load_format=load_format, graph=graph) as engine:
            device.mark_step("load")
            tokens(engine)
        return [(r.name, r.step_s, r.bound.bound_s, r.idle_s, r.bus_bytes) for r in device.step_reports()[1:]]

    without_memory = VirtualDevice("h200-pcie5", "meta")
    without_memory.numerics.remember = False
    real = times(VirtualDevice("h200-pcie5"), "dummy")
    assert [row[0] for row in real] == ["pp", "tg", "tg", "tg", "tg"]
    assert times(without_memory, "meta") == real
    assert times(VirtualDevice("h200-pcie5", "meta"), "meta") == real


@pytest.mark.filterwarnings("ignore::offload.OffloadConfigWarning")
@pytest.mark.parametrize("config", [CONFIGS["uva-all"], prefetch(1, 1, 2)], ids=["uva", "prefetch"])
def test_a_mixture_of_experts(config_of, config):
    path = config_of(num_hidden_layers=3, **EXPERTS)
    with load(path, None, "cpu", load_format="dummy") as engine:
        expected = tokens(engine)
    with load(path, config, "virtual:h200-pcie5", load_format="dummy") as engine:
        assert tokens(engine) == expected

    def times(remember):
        device = VirtualDevice("h200-pcie5", "meta")
        device.numerics.remember = remember
        with load(path, config, device, load_format="meta") as engine:
            device.mark_step("load")
            tokens(engine)
        return [(r.name, r.step_s, r.idle_s, r.bus_bytes) for r in device.step_reports()]

    assert times(True) == times(False)


def test_a_captured_step_is_issued_sooner(config_of):
    path = config_of(num_hidden_layers=5)
    last = {}
    for graph in (False, True):
        device = VirtualDevice("h200-pcie5")
        with load(path, None, device, load_format="dummy", graph=graph) as engine:
            tokens(engine)
        last[graph] = device.step_report()
    assert "issued late" in last[False].idle_s
    assert last[True].idle_s.get("issued late", 0) < last[False].idle_s["issued late"] / 2


def test_two_engines_in_one_process(config_of):
    path = config_of(num_hidden_layers=4)
    with load(path, None, "cpu", load_format="dummy") as engine:
        expected = tokens(engine)
    one = load(path, prefetch(1, 1, 2), "virtual:h200-pcie5", load_format="dummy")
    other = load(path, prefetch(2, 1, 1), one.parts.device, load_format="dummy")
    with one, other:
        for _ in range(2):
            assert tokens(one) == expected
            assert tokens(other) == expected


def test_a_second_thread_waits_for_its_turn(config_of):
    path = config_of(num_hidden_layers=4)
    with load(path, prefetch(1, 1, 2), "virtual:h200-pcie5", load_format="dummy") as engine:
        expected = tokens(engine)
        found = []
        threads = [threading.Thread(target=lambda: found.append(tokens(engine))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [expected] * 3


@pytest.mark.parametrize("layer", range(4))
def test_ctrl_c_in_a_layer(config_of, layer):
    path = config_of(num_hidden_layers=4)
    with load(path, prefetch(1, 1, 2), "virtual:h200-pcie5", load_format="dummy") as engine:
        expected = tokens(engine)

        def interrupt(*_):
            raise KeyboardInterrupt

        handle = engine.parts.model.layers[layer].mlp.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            tokens(engine)
        handle.remove()
        assert tokens(engine) == expected


def test_a_model_that_does_not_fit_is_refused_with_what_there_is(config_of, toy):
    path = config_of(num_hidden_layers=4)
    device = VirtualDevice(toy(memory_bytes=100_000))
    with pytest.raises(ModelLoadError, match="memory"):
        load(path, None, device, load_format="dummy")
    device = VirtualDevice(toy(memory_bytes=260_000))
    with load(path, {"uva": {"cpu_offload_gb": 1}}, device, load_format="dummy") as engine:
        with pytest.raises((ModelLoadError, VirtualOutOfMemoryError)):
            tokens(engine, 100, [[1] * 20] * 64)


def test_meta_needs_a_virtual_device(config_of):
    path = config_of(num_hidden_layers=1)
    with pytest.raises(ModelLoadError, match="use virtual:NAME"):
        load(path, None, "cpu", load_format="meta")
    with load(path, None, "virtual:h200-pcie5", load_format="meta") as engine:
        assert tokens(engine, 2) == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("config", "share"), [(prefetch(2, 1, 2), 0.99), ({"uva": {"cpu_offload_gb": 64}}, 0.97)], ids=["prefetch", "uva"]
)
def test_a_70b_half_offloaded_comes_close_to_its_bound(config, share):
    device = VirtualDevice("h200-pcie5", "meta")
    with load(str(find("llama-3.1-70b")[0]), config, device, load_format="meta") as engine:
        decoding = engine.start([[1] * 16], 32)
        for _ in range(2):
            engine.decode_step(decoding)
    report = device.step_report()
    assert report.bus_bytes > 60 << 30
    assert report.share_of_bound >= share
