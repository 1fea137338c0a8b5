"""Which configurations a sweep runs."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.arms import (
    NO_OFFLOAD,
    budget,
    default_budgets,
    distinct,
    equal_memory,
    offloadable_bytes,
    pasteable,
)
from offload.config import OffloadConfig
from offload.errors import OffloadConfigError
from offload.plan import ParameterSpec, plan

MIB = 2**20
SPECS = [
    ParameterSpec("model.embed_tokens.weight", None, 64 * MIB),
    *(ParameterSpec(f"model.layers.{n}.mlp.{leaf}.weight", n, 3 * MIB) for n in range(8) for leaf in ("up", "down")),
]


def prefetch(group, count=1, step=1):
    fields = {"offload_group_size": group, "offload_num_in_group": count, "offload_prefetch_step": step}
    return OffloadConfig.of({"prefetch": fields})


def test_everything_is_the_layers_parameters():
    assert offloadable_bytes(SPECS) == 8 * 6 * MIB


@given(st.integers(1, 2**42))
def test_default_budgets_go_from_nothing_to_everything(total):
    budgets = default_budgets(total)
    assert len(budgets) == 6 and budgets[0] == 0 and budgets == sorted(budgets)
    assert budget(budgets[-1]).budget_bytes >= total
    assert budgets[-1] * 2**30 <= total * 1.0011 + 1


def test_default_budgets_are_short_to_write():
    assert default_budgets(212_336_640) == [0.0, 0.03956, 0.07911, 0.1187, 0.1583, 0.1978]


def test_equal_memory_frees_what_prefetch_frees():
    config = prefetch(group=2, step=1)
    opponent = equal_memory(config, SPECS)
    freed = plan(SPECS, config).freed_bytes
    assert freed == (4 - 1) * 6 * MIB
    assert opponent.resolved_backend == "uva"
    assert freed <= plan(SPECS, opponent).offloaded_bytes < freed + 3 * MIB


@pytest.mark.parametrize("config", [NO_OFFLOAD, budget(1.0), prefetch(8, step=4)], ids=["none", "uva", "frees-nothing"])
def test_no_opponent_where_nothing_is_freed_by_prefetch(config):
    assert equal_memory(config, SPECS) is None


def test_pasteable_says_only_what_differs_and_reads_back():
    config = prefetch(group=8, count=2)
    assert json.loads(pasteable(config)) == {"prefetch": {"offload_group_size": 8, "offload_num_in_group": 2}}
    assert OffloadConfig.from_json(pasteable(config)) == config
    assert pasteable(NO_OFFLOAD) is None and pasteable(budget(0)) is None


def test_the_same_configuration_runs_once():
    configs = [NO_OFFLOAD, budget(1), budget(0), prefetch(4), OffloadConfig.from_json('{"uva":{"cpu_offload_gb":"1"}}')]
    assert distinct(configs) == [NO_OFFLOAD, budget(1), prefetch(4)]


def test_a_negative_budget_is_refused_in_the_configs_words():
    with pytest.raises(OffloadConfigError, match=r"uva\.cpu_offload_gb: Input should be greater than or equal to 0"):
        budget(-1.0)
