"""The example model against transformers: 20 prompts, 32 greedy tokens each, in fp32, where no two logits tie."""

import pytest
import torch

import offload
from bench.prepare import SMOLLM2, prepare_smollm2

NEW = 32
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a",
    "Water boils at",
    "def fibonacci(n):",
    "The largest planet in our solar system is",
    "A short poem about the sea:\n",
    "1, 2, 4, 8, 16,",
    "Photosynthesis is the process by which",
    "In 1969,",
    "The opposite of hot is",
    "To make a cup of tea, first",
    "Q: What is the speed of light?\nA:",
    "Dear Sir or Madam,",
    "The three primary colours are",
    "She opened the door and saw",
    "import numpy as np\n",
    "Die Hauptstadt von Deutschland ist",
    "Gravity is a force that",
    "My favourite book is",
    "x",
]


@pytest.fixture(scope="module")
def folder():
    prepare_smollm2(SMOLLM2)
    return SMOLLM2


@pytest.fixture(scope="module")
def engine(folder):
    with offload.load(folder, device="cpu", dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(folder, engine):
    """Transformers' tokens: a batch padded on the left, which is its way of being ragged."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    assert engine.encode(PROMPTS) == tokenizer(PROMPTS)["input_ids"]
    with torch.inference_mode():
        tokens = model.generate(**batch, max_new_tokens=NEW, do_sample=False)
    answers = tokens[:, batch["input_ids"].shape[1] :].tolist()
    (end,) = engine.parts.end_tokens
    return [answer[: answer.index(end) + 1] if end in answer else answer for answer in answers]


def tokens_of(generations):
    return [generation.token_ids for generation in generations]


def test_one_prompt_at_a_time(engine, expected):
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        assert tokens_of(engine.generate([prompt], NEW)) == [answer], prompt


def test_ragged_batches_of_four(engine, expected):
    for first in range(0, len(PROMPTS), 4):
        batch = slice(first, first + 4)
        assert tokens_of(engine.generate(PROMPTS[batch], NEW)) == expected[batch]


CONFIGS = {
    "uva": {"uva": {"cpu_offload_gb": 0.05}},
    "uva-one-weight": {"uva": {"cpu_offload_gb": 1e-9}},
    "uva-all": {"uva": {"cpu_offload_gb": 1}},
    "uva-mlp": {"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["mlp"]}},
    "uva-norms": {"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["input_layernorm", "o_proj"]}},
    "uva-layer": {"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["layers.3", "layers.29"]}},
    "prefetch": {"prefetch": {"offload_group_size": 4, "offload_num_in_group": 2, "offload_prefetch_step": 2}},
    "prefetch-all": {"prefetch": {"offload_group_size": 1}},
    "prefetch-odd": {"prefetch": {"offload_group_size": 7, "offload_num_in_group": 3, "offload_prefetch_step": 5}},
    "prefetch-last": {"prefetch": {"offload_group_size": 30}},
    "prefetch-all-slots": {"prefetch": {"offload_group_size": 10, "offload_prefetch_step": 6}},
    "prefetch-some": {"prefetch": {"offload_group_size": 3, "offload_params": ["qkv_proj", "down_proj"]}},
}
SHORT = 6


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def plain(request, folder):
    """The dtype, and the tokens of a ragged batch without offload."""
    with offload.load(folder, device="cpu", dtype=request.param) as engine:
        return request.param, tokens_of(engine.generate(PROMPTS[:3], SHORT))


@pytest.mark.filterwarnings("ignore::offload.OffloadConfigWarning")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_tokens_when_offloaded_three_times_in_a_row(name, folder, plain):
    dtype, expected = plain
    with offload.load(folder, CONFIGS[name], "cpu", dtype=dtype) as engine:
        for _ in range(3):
            assert tokens_of(engine.generate(PROMPTS[:3], SHORT)) == expected


@pytest.mark.filterwarnings("ignore::offload.OffloadConfigWarning")
@pytest.mark.parametrize("name", ["uva", "prefetch"])
def test_transformers_tokens_when_offloaded(name, folder, expected):
    with offload.load(folder, CONFIGS[name], "cpu", dtype="float32") as engine:
        assert tokens_of(engine.generate(PROMPTS[:4], NEW)) == expected[:4]


def test_a_conversation_is_encoded_as_transformers_does(engine, folder):
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, add_generation_prompt=True)
    theirs = theirs if isinstance(theirs, list) else theirs["input_ids"]
    assert engine.chat_prompt(messages) == theirs
    assert engine.chat_prompt(messages[0]["content"]) == theirs


def test_the_model_speaks_english(folder):
    with offload.load(folder, device="cpu") as engine:
        answer = engine.generate([engine.chat_prompt("What is the capital of France?")], NEW)[0]
        assert "Paris" in answer.text
        assert answer.token_ids[-1] in engine.parts.end_tokens
