"""Plans against vLLM's recorded selections, and their arithmetic against a second, plain telling of the rules."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.config import OffloadConfig
from offload.errors import OffloadConfigError
from offload.plan import ParameterSpec, Plan, aligned, plan

DATA = json.loads((Path(__file__).parent / "data" / "plan.json").read_text())
SIZES_BYTES = {
    "a.weight": 1000,
    "a.bias": 4,
    "b.gate.weight": 128,
    "b.experts.w": 5000,
    "empty": 0,
}


def spec(name, layer, nbytes, storage=None):
    return ParameterSpec(name, layer, nbytes, storage)


def model(layers, sizes_bytes=SIZES_BYTES, prefix="model.layers."):
    """A model with an embedding, `layers` equal layers and a head."""
    inside = [spec(f"{prefix}{i}.{name}", i, size) for i in range(layers) for name, size in sizes_bytes.items()]
    return [spec("embed.weight", None, 10**6), *inside, spec("head.weight", None, 10**6)]


def uva(nbytes, *selectors):
    return OffloadConfig.of({"uva": {"cpu_offload_gb": nbytes / 1024**3, "cpu_offload_params": list(selectors)}})


def prefetch(group, count, step, *selectors):
    fields = {"offload_group_size": group, "offload_num_in_group": count, "offload_prefetch_step": step}
    return OffloadConfig.of({"prefetch": fields | {"offload_params": list(selectors)}})


@pytest.mark.parametrize("prefix", ["", "model.", "model.decoder.blocks."], ids=["bare", "model", "foreign"])
@pytest.mark.parametrize("case", DATA["cases"], ids=lambda case: json.dumps(case["config"]))
def test_cases(case, prefix):
    layer = DATA["layer_parameters"][case["model"]]
    parameters = [
        spec(f"{prefix}layers.{i}.{p['name']}", i, p["nbytes"]) for i in range(case["num_layers"]) for p in layer
    ]
    made = plan(parameters, OffloadConfig.of(case["config"]))
    assert [name.removeprefix(prefix) for name in made.offloaded] == case["offloaded"]
    assert made.offloaded_bytes == case["offloaded_bytes"]
    for field in case.keys() & {"offloaded_layers", "refill_order"}:
        assert list(getattr(made, field)) == case[field]
    assert made.copies_per_pass == case.get("copies_per_pass", 0)


def test_every_case_is_used():
    assert len(DATA["cases"]) == 29


def test_no_offload_is_an_empty_plan():
    assert plan(model(4), OffloadConfig()) == Plan()
    disabled = OffloadConfig.of({"offload_backend": "uva", "prefetch": {"offload_group_size": 2}})
    assert plan(model(4), disabled) == Plan()


def test_a_plan_does_not_change():
    with pytest.raises(AttributeError):
        plan(model(2), uva(1)).slots = 3


# Storages 0..2 are shared by whoever has them; None is a parameter of its own.
PARAMETERS = st.lists(
    st.tuples(
        st.sampled_from([None, 0, 1, 2, 3, 4, 5]),
        st.sampled_from(["a.weight", "a.bias", "b.experts.w", "norm"]),
        st.sampled_from([0, 1, 100, 128, 129, 1000]),
        st.sampled_from([None, None, None, 0, 1, 2]),
    ),
    max_size=30,
)


def parameters_of(drawn):
    shared_bytes = {0: 64, 1: 256, 2: 0}
    return [
        spec(f"layers.{layer}.{i}x.{name}" if layer is not None else f"out.{i}", layer, shared_bytes.get(s, size), s)
        for i, (layer, name, size, s) in enumerate(drawn)
    ]


def stays_on_device(parameter, parameters, one_layer_only):
    users = {other.layer for other in parameters if other.identity == parameter.identity}
    return parameter.nbytes == 0 or None in users or (one_layer_only and len(users) > 1)


@given(PARAMETERS, st.integers(1, 4000), st.sampled_from([(), ("a",), ("experts.w", "norm"), ("layers.2",)]))
def test_uva_takes_weights_in_order_until_the_budget_is_reached(drawn, budget_bytes, selectors):
    parameters = parameters_of(drawn)
    made = plan(parameters, uva(budget_bytes, *selectors))
    taken, spent_bytes = set(), 0
    in_layers = sorted((p for p in parameters if p.layer is not None), key=lambda p: p.layer)
    for parameter in in_layers:
        if spent_bytes >= budget_bytes:
            break
        wanted = not selectors or any(f".{text}." in f".{parameter.name}." for text in selectors)
        if wanted and not stays_on_device(parameter, parameters, False) and parameter.identity not in taken:
            taken.add(parameter.identity)
            spent_bytes += parameter.nbytes
    assert made.offloaded == tuple(p.name for p in in_layers if p.identity in taken)
    assert made.offloaded_bytes == made.freed_bytes == spent_bytes
    assert made.offloaded_layers == tuple(sorted({p.layer for p in in_layers if p.identity in taken}))
    assert (made.slots, made.slot_bytes, made.refill_order, made.stalling_layers) == (0, 0, (), ())


@given(PARAMETERS, st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.sampled_from([(), ("a",)]))
def test_prefetch_takes_the_last_layers_of_each_group(drawn, group, count, step, selectors):
    parameters = parameters_of(drawn)
    count = min(count, group)
    made = plan(parameters, prefetch(group, count, step, *selectors))
    taken = {
        p.identity
        for p in parameters
        if p.layer is not None
        and p.layer % group >= group - count
        and (not selectors or ".a." in p.name)
        and not stays_on_device(p, parameters, True)
    }
    in_layers = sorted((p for p in parameters if p.layer is not None), key=lambda p: p.layer)
    assert made.offloaded == tuple(p.name for p in in_layers if p.identity in taken)
    assert made.slots == min(step, len(made.offloaded_layers))
    assert made.slot_bytes == sum(made.slot_sizes_bytes)
    assert made.freed_bytes == made.offloaded_bytes - made.slot_bytes
    for ordinal, nbytes in enumerate(made.region_bytes):
        assert nbytes <= made.slot_sizes_bytes[made.slot_of(ordinal)]
        assert made.slot_of(made.next_owner(ordinal)) == made.slot_of(ordinal)


@given(PARAMETERS, st.booleans())
def test_regions_count_every_weight_once_aligned(drawn, by_uva):
    parameters = parameters_of(drawn)
    made = plan(parameters, uva(10**9) if by_uva else prefetch(1, 1, 1))
    expected = dict.fromkeys(made.offloaded_layers, 0)
    owned = {}
    for spec_ in parameters:
        if spec_.name in made.offloaded:
            owned.setdefault(spec_.identity, []).append(spec_)
    for specs in owned.values():
        expected[min(each.layer for each in specs)] += aligned(specs[0].nbytes)
    assert dict(zip(made.offloaded_layers, made.region_bytes, strict=True)) == expected
    assert made.offloaded_bytes == sum(specs[0].nbytes for specs in owned.values())


@pytest.mark.parametrize(("nbytes", "expected"), [(0, 0), (1, 128), (127, 128), (128, 128), (129, 256)])
def test_alignment(nbytes, expected):
    assert aligned(nbytes) == expected


def test_a_slot_is_as_large_as_the_largest_layer_that_will_be_in_it():
    sizes_bytes = [100, 300, 500, 200, 50]
    made = plan([spec(f"layers.{i}.w", i, n) for i, n in enumerate(sizes_bytes)], prefetch(1, 1, 2))
    assert made.slot_sizes_bytes == (512, 384)
    assert made.slot_bytes == 896 and made.freed_bytes == 1150 - 896


def test_a_parameter_shared_by_two_layers_counts_once_and_has_both_names():
    parameters = [spec("layers.0.w", 0, 100, "w"), spec("layers.1.v", 1, 50), spec("layers.1.w", 1, 100, "w")]
    made = plan(parameters, uva(10**6))
    assert made.offloaded == ("layers.0.w", "layers.1.v", "layers.1.w") and made.offloaded_bytes == 150
    assert made.region_bytes == (128, 128)


def test_a_shared_parameter_is_on_the_host_in_a_layer_that_the_budget_did_not_reach():
    parameters = [spec("layers.0.w", 0, 100, "w"), spec("layers.5.w", 5, 100, "w")]
    made = plan(parameters, uva(1))
    assert made.offloaded_layers == (0, 5) and made.offloaded_bytes == 100


def test_a_layer_parameter_tied_to_the_embedding_stays_with_a_warning():
    parameters = [spec("embed", None, 100, 1), spec("layers.0.tied", 0, 100, 1), spec("layers.0.w", 0, 7)]
    for config in (uva(10**6), prefetch(1, 1, 1)):
        made = plan(parameters, config)
        assert made.offloaded == ("layers.0.w",)
        assert '"layers.0.tied" stay on the device' in made.warnings[0]


def test_prefetch_keeps_what_two_layers_share_and_takes_what_one_layer_names_twice():
    parameters = [
        spec("layers.0.w", 0, 100, "between"),
        spec("layers.0.u", 0, 9, "within"),
        spec("layers.0.u2", 0, 9, "within"),
        spec("layers.1.w", 1, 100, "between"),
        spec("layers.1.v", 1, 30),
    ]
    made = plan(parameters, prefetch(1, 1, 1))
    assert made.offloaded == ("layers.0.u", "layers.0.u2", "layers.1.v") and made.offloaded_bytes == 39
    assert made.region_bytes == (128, 128)
    assert "shared" in made.warnings[0]


def test_layers_are_walked_by_index_whatever_their_order():
    parameters = [spec("layers.1.w", 1, 10), spec("layers.0.w", 0, 10), spec("layers.1.b", 1, 10)]
    assert plan(parameters, uva(10**6)).offloaded == ("layers.0.w", "layers.1.w", "layers.1.b")


def test_parameters_without_elements_are_skipped():
    parameters = [spec("layers.0.empty", 0, 0), spec("layers.0.w", 0, 8), spec("layers.1.empty", 1, 0)]
    assert plan(parameters, uva(1)).offloaded == ("layers.0.w",)
    assert plan(parameters, prefetch(1, 1, 1)).offloaded_layers == (0,)
    assert plan(parameters, uva(1, "empty")).unmatched_selectors == ()


def test_selectors_by_full_path_take_one_layer():
    for selector in ("model.layers.2", "layers.2"):
        assert set(plan(model(4), uva(10**9, selector)).offloaded_layers) == {2}
    made = plan(model(4), prefetch(1, 1, 1, "model.layers.2.b.experts", "layers.1.a"))
    assert made.offloaded == ("model.layers.1.a.weight", "model.layers.1.a.bias", "model.layers.2.b.experts.w")


def test_selectors_match_below_the_layer_only():
    made = plan(model(2), uva(10**9, "model", "layers", "0", "embed", "head"))
    assert made.offloaded == () and made.unmatched_selectors == ("0", "embed", "head", "layers", "model")


def test_a_rank_that_holds_later_layers_numbers_them_itself():
    parameters = [spec(f"model.layers.{i + 16}.w", i, 10) for i in range(4)]
    made = plan(parameters, prefetch(2, 1, 1, "model.layers.17"))
    assert made.offloaded == ("model.layers.17.w",) and made.offloaded_layers == (1,)


def test_a_refused_plan_says_why_when_asked():
    made = plan(model(2), uva(10**9, "expert"))
    with pytest.raises(OffloadConfigError, match='"expert" matches no parameter .*"experts"'):
        made.require_offload()
    plan(model(2), uva(10**9)).require_offload()
    plan(model(2), OffloadConfig()).require_offload()


@pytest.mark.benchmark(group="plan")
@pytest.mark.parametrize("selectors", [(), ("experts", "norm.weight", "layers.3", "absent")], ids=["all", "selected"])
@pytest.mark.parametrize("backend", ["uva", "prefetch"])
def test_a_large_model_is_planned_quickly(benchmark, backend, selectors):
    """100 layers x 400 parameters; `--benchmark-enable` prints the time."""
    names = [f"experts.{i}.w.weight" for i in range(390)] + [f"{i}norm.weight" for i in range(10)]
    parameters = [spec(f"model.layers.{i}.{n}", i, 1000, (i, n)) for i in range(100) for n in names]
    config = uva(2**30, *selectors) if backend == "uva" else prefetch(1, 1, 1, *selectors)
    made = benchmark(plan, parameters, config)
    assert len(made.offloaded) == (40_000 if not selectors else 39_010)
