"""The expert bench: bytes of the routed experts alone, and the batch at which prefetch catches up."""

import json

import pytest

from bench import moe
from bench.subject import Subject
from offload.errors import OffloadConfigError
from offload.model_configs import find
from offload.virtual.profiles import load_profile

pytestmark = pytest.mark.filterwarnings("ignore::offload.OffloadConfigWarning")

PROFILE = "h200-pcie5"


def subject(name):
    path, name = find(name)
    return Subject(path, name, "meta", f"virtual:{PROFILE}")


@pytest.mark.parametrize("first", range(1, 66))
def test_the_meeting_batch_is_the_first_that_is_caught(first):
    asked = []

    def is_caught(batch):
        asked.append(batch)
        return batch >= first

    batches = [1, 2, 4, 8, 16, 32, 64]
    assert moe.meeting_batch(batches, is_caught) == (first if first <= 64 else None)
    assert len(asked) <= len(batches) + 5


def test_one_token_moves_the_routed_experts_and_nothing_else():
    """The figures of one sequence: exactly k/E of the bytes, and the speed that follows from it."""
    model = subject("qwen3-30b-a3b")
    race = moe.Race(model, moe.configs_of(model, step=2), steps=1, repetitions=1)
    rows = {row.backend: row for row in race.rows([1])}
    uva, prefetch = rows["uva"], rows["prefetch"]
    assert uva.offloaded_bytes == prefetch.offloaded_bytes == 48 * 128 * 3 * 2048 * 768 * 2
    assert uva.bus_bytes_per_step * 128 == uva.offloaded_bytes * 8
    assert prefetch.bus_bytes_per_step == pytest.approx(prefetch.offloaded_bytes, rel=1e-3)
    rates = load_profile(PROFILE)
    ratio = prefetch.step_s / uva.step_s
    assert ratio >= 0.9 * 16 * rates.sm_bytes_per_s / rates.ce_bytes_per_s
    assert not race.is_caught(1)


def test_a_dense_model_is_refused():
    with pytest.raises(OffloadConfigError, match="llama-3.1-8b has no experts: choose a mixture-of-experts model"):
        moe.configs_of(subject("llama-3.1-8b"), step=2)


def test_the_command_finds_the_batch_draws_and_saves(tmp_path, capsys):
    config = json.loads(find("qwen3-30b-a3b")[0].read_text())
    config |= {"num_hidden_layers": 3, "num_experts": 16, "num_experts_per_tok": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = ["--model-config", str(tmp_path / "config.json"), "--load-format", "meta", "--device", f"virtual:{PROFILE}"]
    outputs = ["--plot", str(tmp_path / "moe.png"), "--save", str(tmp_path / "moe.json")]
    assert moe.main([*argv, "-n", "1", "-b", "1,16", *outputs]) == 0
    saved = json.loads((tmp_path / "moe.json").read_text())
    batch = saved["meeting_batch"]
    assert 1 < batch <= 16
    assert f"Prefetch is as fast as uva from {batch} sequences on." in capsys.readouterr().out
    assert all(row["simulated"] for row in saved["rows"]) and len(saved["rows"]) >= 4
    assert (tmp_path / "moe.png").stat().st_size > 10_000
