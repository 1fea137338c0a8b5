"""The comparison of tokens: what counts as equal, what as a tie, and what ends the run with an error."""

import json
from types import SimpleNamespace

import pytest
import torch

import offload
from bench.judge import Judge
from bench.measure import Timing, prompts, time_decode, time_prompt
from bench.tokens import Agreement, Yardstick, compare, measure_yardstick

TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "model_type": "qwen2",
}


def test_equal_answers_agree_token_by_token():
    found = compare([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]])
    assert (found.compared, found.ties, found.wrong) == (6, 0, []) and str(found) == "6 equal"


def test_what_follows_a_difference_is_not_compared():
    found = compare([[1, 9, 8], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]])
    assert found.compared == 5 and found.wrong == ["sequence 0, token 1: 9 instead of 2"]
    assert str(found) == "WRONG: sequence 0, token 1: 9 instead of 2"


def test_a_tie_is_a_gap_below_twice_torchs_error():
    yardstick = Yardstick(gaps=[[5.0, 0.19, 5.0], [5.0, 5.0, 0.21]], torch_error=0.1)
    found = compare([[1, 9, 3], [4, 5, 9]], [[1, 2, 3], [4, 5, 6]], yardstick)
    assert found.ties == 1 and found.wrong == ["sequence 1, token 2: 9 instead of 6"]
    assert str(compare([[1, 9, 3]], [[1, 2, 3]], yardstick)) == "1 equal, 1 ties"


def test_answers_of_another_length_are_a_defect():
    with pytest.raises(ValueError, match="longer"):
        compare([[1, 2]], [[1, 2, 3]])


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(TINY))
    with offload.load(str(path), device="cpu", load_format="dummy") as engine:
        yield engine


def test_yardstick_is_measured_along_the_answers(engine):
    texts = prompts(2, 5, TINY["vocab_size"])
    answers = [generation.token_ids for generation in engine.generate(texts, 6, stop_at_eos=False)]
    yardstick = measure_yardstick(engine, texts, answers)
    assert [len(gaps) for gaps in yardstick.gaps] == [6, 6]
    assert all(gap >= 0 for gaps in yardstick.gaps for gap in gaps)
    with torch.inference_mode():
        logits = engine.parts.model.lm_head.weight.float().abs().sum(-1).max().item()
    # The two ways add in different orders: they round differently, and by little.
    assert 0 < yardstick.torch_error < 1e-5 * logits


def test_a_step_that_would_continue_another_text_measures_nothing(engine):
    (text,) = prompts(1, 5, TINY["vocab_size"])
    (answer,) = engine.generate([text], 2, stop_at_eos=False)
    other = (answer.token_ids[0] + 1) % TINY["vocab_size"]
    yardstick = measure_yardstick(engine, [text], [[other, answer.token_ids[1]]])
    assert yardstick.torch_error == 0


def fake(backend, kind="cpu"):
    device = SimpleNamespace(torch_device=torch.device(kind))
    return SimpleNamespace(parts=SimpleNamespace(device=device, plan=SimpleNamespace(backend=backend), vocabulary=9))


def timing(*answers):
    return Timing((1.0,) * len(answers), tuple(answers))


def test_judge_takes_the_first_run_as_reference_and_names_the_fault(capsys):
    judge = Judge()
    assert judge.verdict(fake(None), "tg", 1, 2, timing(((1, 2, 3),), ((1, 2, 3),))) == "reference"
    assert judge.verdict(fake("uva"), "tg", 1, 2, timing(((1, 2, 3),))) == "3 equal"
    assert judge.exit_code() == 0
    assert judge.summary() == "Tokens: 9 compared with the run without offload, all equal."
    assert judge.verdict(fake("prefetch"), "tg", 1, 2, timing(((1, 7, 3),))).startswith("WRONG: sequence 0, token 1")
    assert judge.exit_code() == 1
    assert "7 instead of 2" in judge.summary()
    assert capsys.readouterr().err.startswith("offload: fatal: tokens differ without a tie to explain it")


def test_judge_compares_repetitions_of_the_reference_too():
    assert Judge().verdict(fake(None), "tg", 1, 1, timing(((1, 2),), ((1, 3),))).startswith("WRONG")


def test_judge_compares_each_test_and_batch_with_its_own():
    judge = Judge()
    judge.verdict(fake(None), "pp", 1, 4, timing(((5,),)))
    assert judge.verdict(fake("uva"), "pp", 2, 4, timing(((6,), (6,)))) == "reference"


class LooksLikeCuda:
    """A CPU engine that says it runs on CUDA, where ties may happen."""

    def __init__(self, engine, backend):
        self._engine = engine
        device = SimpleNamespace(torch_device=torch.device("cuda"))
        plan = SimpleNamespace(backend=backend)
        self.parts = SimpleNamespace(model=engine.parts.model, vocabulary=TINY["vocab_size"], device=device, plan=plan)

    def __getattr__(self, name):
        return getattr(self._engine, name)


@pytest.mark.parametrize("kind", ["pp", "tg"])
def test_on_cuda_a_wide_gap_is_never_a_tie(engine, kind):
    judge = Judge()
    first = time_prompt(engine, 2, 5, 1) if kind == "pp" else time_decode(engine, 2, 5, 1)
    assert judge.verdict(LooksLikeCuda(engine, None), kind, 2, 5, first) == "reference"
    assert judge.verdict(LooksLikeCuda(engine, "uva"), kind, 2, 5, first) == f"{2 if kind == 'pp' else 16} equal"
    (yardstick,) = judge._yardsticks.values()
    assert len(yardstick.gaps) == 2 and 0 < yardstick.torch_error < 1e-4 < min(map(min, yardstick.gaps))
    others = tuple(tuple((token + 1) % TINY["vocab_size"] for token in answer) for answer in first.tokens[0])
    assert judge.verdict(LooksLikeCuda(engine, "uva"), kind, 2, 5, timing(others)).startswith("WRONG")


def test_on_cuda_a_tie_is_forgiven_to_uva_and_not_to_prefetch(engine):
    judge = Judge()
    answers = ((1, 2, 3),)
    judge.verdict(fake(None), "tg", 1, 2, timing(answers))
    judge._yardsticks[("tg", 1, 2)] = Yardstick([[9.0, 0.1, 9.0]], torch_error=0.1)
    assert judge.verdict(fake("uva"), "tg", 1, 2, timing(((1, 7, 3),))) == "1 equal, 1 ties"
    assert judge.verdict(fake("prefetch"), "tg", 1, 2, timing(((1, 7, 3),))).startswith("WRONG")


def test_judge_without_a_baseline_says_so():
    judge = Judge()
    judge.verdict(fake("uva"), "tg", 1, 1, timing(((1, 2),)))
    judge.verdict(fake("uva"), "tg", 1, 1, timing(((1, 2),)))
    assert "with the first run that fits" in judge.summary()


def test_meta_has_no_tokens_to_judge():
    judge = Judge()
    assert judge.verdict(fake("uva", "meta"), "tg", 1, 1, timing(((0, 0),))) == ""
    assert judge.summary() == "Tokens: none to compare."


def test_agreements_add_up():
    total = Agreement(3, 1, [])
    total.add(Agreement(2, 1, ["x"]))
    assert total == Agreement(5, 2, ["x"])
