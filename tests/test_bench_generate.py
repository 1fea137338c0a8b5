"""Our decode steps against another library's, token by token."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.__main__ import main
from bench.generate import Result, Stopwatch, Target, agreeing, matrix_products, targets_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random model as transformers saves it."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 120}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    # Every token ends a sequence, so that a library that stops there would show.
    config = LlamaConfig(max_position_embeddings=128, eos_token_id=list(range(120)), **heads, **sizes)
    path = tmp_path_factory.mktemp("small") / "small"
    LlamaForCausalLM(config).float().save_pretrained(path)
    return path


@pytest.mark.parametrize("library", ["transformers", "accelerate"])
def test_every_arm_makes_the_same_number_of_tokens_and_the_same_ones(folder, tmp_path, capsys, library):
    words = ["--model", str(folder), "--device", "cpu", "-n", "4", "-p", "5", "-r", "2", "-o", "json"]
    assert main(["generate", "--against", library, *words, "--save", str(tmp_path / "kept.json")]) == 0
    rows = {row["backend"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    foreign = {"transformers plain", "transformers offload_"} if library == "accelerate" else set()
    alone = {"products alone", "torch's products alone", "plain copy"}
    assert set(rows) == {library, "none", "uva", "prefetch", *alone, *foreign}
    assert all(len(row["samples_s"]) == 8 and min(row["samples_s"]) > 0 for row in rows.values())
    assert rows["none"]["offloaded_bytes"] == 0
    assert rows["uva"]["offloaded_bytes"] == rows["prefetch"]["offloaded_bytes"] > 0
    kept = json.loads((tmp_path / "kept.json").read_text())
    # In fp32 there are no ties: the same tokens, or one of both is wrong. Two rounds of five tokens.
    assert "tokens chosen alike before the first difference: 10 of 10" in kept["facts"]
    if foreign:
        assert rows["transformers offload_"]["offloaded_bytes"] > 0
    assert len(kept["targets"]) == 3


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--model", "x", "--device", "virtual:h200-pcie5"], "has simulated times"),
        (["--model-config", "x.json"], "give --model DIR with safetensors"),
        (["--model", "x", "--load-format", "dummy"], "give --model DIR with safetensors"),
        (["--model", "x", "-n", "0"], "not a whole number of at least 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(capsys, words, line):
    assert main(["generate", "--against", "transformers", *words]) == 2
    assert line in capsys.readouterr().err


def test_targets_compare_medians_with_their_limits():
    times = {"none": 2.0, "uva": 2.5, "prefetch": 2.9, "plain copy": 1.0, "transformers": 2.4, "products alone": 1.5}
    times |= {"transformers plain": 4.0, "transformers offload_": 5.0}
    result = Result({name: [value, 99.0, value / 9, value, value] for name, value in times.items()}, {}, 0, 0, "cpu")
    speedup, uva, prefetch = targets_of(result, "transformers")
    assert speedup.value == pytest.approx(1.2) and speedup.limit == 1.2
    assert uva.value == pytest.approx(0.8) and not uva.is_reached
    *_, in_place = targets_of(result, "accelerate")
    assert in_place.value == pytest.approx(0.8) and not in_place.is_reached
    assert prefetch.limit == pytest.approx(3000) and prefetch.value == pytest.approx(2900) and prefetch.is_reached


@pytest.mark.parametrize(
    ("value", "is_ceiling", "reached"), [(1.0, False, True), (0.9, False, False), (1.0, True, True), (1.1, True, False)]
)
def test_a_target_is_a_floor_or_a_ceiling(value, is_ceiling, reached):
    target = Target("x", value, 1.0, " ms", is_ceiling)
    assert target.is_reached is reached and ("reached" if reached else "MISSED") in str(target)


def test_a_round_gives_every_arm_one_turn_and_waits_for_the_device():
    calls = []
    watch = Stopwatch({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, lambda: calls.append("wait"))
    watch.round()
    watch.round()
    assert calls == ["a", "wait", "b", "wait"] * 2
    assert [len(values) for values in watch.samples_s.values()] == [2, 2]


def test_products_are_those_of_every_linear_layer_and_a_tied_head():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.RMSNorm(3), torch.nn.Linear(3, 5, bias=False))
    seen = []
    for by_torch in (False, True):
        seen.clear()
        with _Counting(seen):
            matrix_products(model, by_torch)()
        assert seen == [(1, 3), (1, 5)]


class _Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the shape of what every product gives."""

    def __init__(self, seen):
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if "mm" in str(function) or "linear" in str(function):
            self._seen.append(tuple(out.shape))
        return out


def test_agreement_ends_at_the_first_difference():
    assert agreeing([1, 2, 3, 4], [1, 2, 9, 4]) == 2 and agreeing([1, 2], [1, 2]) == 2
