"""Generation: tokens like transformers', each sequence as if alone, and one crossing to Python per step."""

import json
import threading

import pytest
import torch
from transformers.utils.logging import disable_progress_bar

import offload
from tests.engines import CountingDevice
from tests.models.tiny import PROMPTS, reference_model
from tests.tiny_folder import write_model

disable_progress_bar()
TEXTS = ["the quick brown fox", "a", "offload it now"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(folder):
    with offload.load(folder, device="cpu") as engine:
        yield engine


def tokens_of(generations):
    return [generation.token_ids for generation in generations]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LlamaForCausalLM", {}),
        ("MistralForCausalLM", {"sliding_window": 5}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        ("Qwen3ForCausalLM", {"head_dim": 12}),
    ],
)
def test_greedy_tokens_are_those_of_transformers(name, options, tmp_path):
    theirs, _ = reference_model(name, tmp_path, eos_token_id=None, pad_token_id=0, **options)
    expected = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        out = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False)
        expected.append(out[0, len(prompt) :].tolist())
    with offload.load(tmp_path, device="cpu") as engine:
        assert tokens_of(engine.generate(PROMPTS, 12)) == expected
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert tokens_of(engine.generate([prompt], 12)) == [tokens]


def test_texts_and_token_lists_give_the_same(engine):
    from_text = engine.generate(TEXTS, 9)
    assert engine.generate(engine.encode(TEXTS), 9) == from_text
    assert engine.generate([TEXTS[0], engine.encode(TEXTS[1:2])[0]], 9) == from_text[:2]
    for generation in from_text:
        assert len(generation.token_ids) == 9
        assert generation.text == engine.parts.tokenizer.decode(generation.token_ids)


def test_no_prompts_no_generations(engine):
    assert engine.generate([], 5) == []


def test_an_end_token_stops_its_own_sequence_only(folder, tmp_path):
    def ended(**config):
        for name in ("tokenizer.json", "model.safetensors"):
            (tmp_path / name).write_bytes((folder / name).read_bytes())
        described = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**described, **config}))
        return offload.load(tmp_path, device="cpu")

    with ended(eos_token_id=None) as engine:
        free = tokens_of(engine.generate(TEXTS, 12))
    end = next(token for token in free[0] if token not in free[1])
    with ended(eos_token_id=end) as engine:
        stopped = tokens_of(engine.generate(TEXTS, 12))
        assert stopped[0] == free[0][: free[0].index(end) + 1]
        assert stopped[1] == free[1]
        assert tokens_of(engine.generate(TEXTS, 12, stop_at_eos=False)) == free
    # generation_config.json comes first, and may list several.
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, free[1][2]]}))
    with ended(eos_token_id=end) as engine:
        stopped = tokens_of(engine.generate(TEXTS, 12))
        assert stopped[1] == free[1][: free[1].index(free[1][2]) + 1]


def test_generation_ends_when_every_sequence_has(folder):
    device = CountingDevice()
    with offload.load(folder, device=device) as engine:
        first = engine.generate(["a"], 1, stop_at_eos=False)[0].token_ids[0]
        object.__setattr__(engine.parts, "end_tokens", frozenset({first}))
        device.reads = 0
        assert tokens_of(engine.generate(["a"], 50)) == [[first]]
        assert device.reads == 1


def test_a_seed_repeats_and_samples_each_sequence_as_if_alone(engine):
    sampled = tokens_of(engine.generate(TEXTS, 20, temperature=1.5, seed=3))
    assert tokens_of(engine.generate(TEXTS, 20, temperature=1.5, seed=3)) == sampled
    assert tokens_of(engine.generate(TEXTS, 20, temperature=1.5, seed=4)) != sampled
    for text, tokens in zip(TEXTS, sampled, strict=True):
        assert tokens_of(engine.generate([text], 20, temperature=1.5, seed=3)) == [tokens]


def test_without_a_seed_equal_prompts_are_sampled_apart(engine):
    one, other = tokens_of(engine.generate([TEXTS[0], TEXTS[0]], 30, temperature=2.0))
    assert one != other


def test_tokens_and_their_text_arrive_as_they_come(engine):
    seen = []
    generations = engine.generate(TEXTS, 8, on_token=lambda *event: seen.append(event))
    for index, generation in enumerate(generations):
        own = [(token, text) for where, token, text in seen if where == index]
        assert [token for token, _ in own] == generation.token_ids
        assert "".join(text for _, text in own) == generation.text.rstrip("�")
    assert [where for where, _, _ in seen[:3]] == [0, 1, 2]


def test_one_crossing_to_python_per_decode_step(folder):
    device = CountingDevice()
    with offload.load(folder, device=device) as engine:
        for prompts in (["a"], TEXTS):
            engine.generate(prompts, 1)
            device.reads = device.writes = 0
            device.marks.clear()
            engine.generate(prompts, 6, stop_at_eos=False)
            assert device.reads == 6
            assert device.marks == ["pp", "tg", "tg", "tg", "tg", "tg"]
            assert device.writes == 3  # the prompts, where they end, the positions: before the first token


def test_steps_one_at_a_time_are_what_generate_runs(engine):
    token_lists = engine.encode(TEXTS)
    decoding = engine.start(token_lists, 40)
    rows = [decoding.last, *(engine.decode_step(decoding) for _ in range(5))]
    expected = tokens_of(engine.generate(TEXTS, 6, stop_at_eos=False))
    assert [list(column) for column in zip(*rows, strict=True)] == expected


def test_a_batch_ends_when_its_context_is_used_or_another_starts(engine):
    decoding = engine.start([[1, 2, 3]], 5)
    engine.decode_step(decoding)
    engine.decode_step(decoding)
    with pytest.raises(ValueError, match="the cache holds 5 tokens per sequence, and all are used"):
        engine.decode_step(decoding)
    engine.start([[1]], 5)
    with pytest.raises(ValueError, match="this batch has ended, because another was started"):
        engine.decode_step(decoding)
    with pytest.raises(ValueError, match="there are no prompts"):
        engine.start([], 5)
    with pytest.raises(ValueError, match="the longest prompt has 3 tokens, the context is 2: make it longer"):
        engine.start([[1], [1, 2, 3]], 2)


@pytest.mark.parametrize("disturb", ["generate", "close"])
def test_a_batch_ends_when_its_own_listener_starts_another_or_closes(folder, disturb):
    with offload.load(folder, None, "cpu") as engine:
        act = {"generate": lambda: engine.generate(["b"], 1), "close": engine.close}[disturb]
        with pytest.raises(ValueError, match="this batch has ended, because another was started or the engine closed"):
            engine.generate(["a"], 3, on_token=lambda *_: act(), stop_at_eos=False)


def test_the_cache_is_as_long_as_the_call_needs_or_as_asked(folder):
    def cache_bytes(engine, batch, context):
        shape = engine.parts.model.cache_shape
        return 2 * shape.layers * shape.heads * shape.head_dim * batch * context * 4

    with offload.load(folder, device="cpu") as engine:
        assert engine.report().kv_bytes == 0
        engine.generate([[1, 2, 3], [4]], 7)
        assert engine.report().kv_bytes == cache_bytes(engine, 2, 10)
    with offload.load(folder, device="cpu", max_context=33) as engine:
        assert engine.context == 33
        short = tokens_of(engine.generate([[1, 2, 3], [4]], 7))
        assert engine.report().kv_bytes == cache_bytes(engine, 2, 33)
        assert tokens_of(engine.generate([[1, 2, 3], [4]], 30))[0][:7] == short[0]
        assert engine.report().device_bytes == engine.report().resident_bytes + engine.report().kv_bytes


def test_what_an_old_cache_holds_does_not_show(engine):
    expected = tokens_of(engine.generate(TEXTS, 9))
    with torch.inference_mode():
        engine._memory.fill_(255)
    assert tokens_of(engine.generate(TEXTS, 9)) == expected


def test_dtype_of_the_weights_is_the_one_asked_for(folder):
    with offload.load(folder, device="cpu", dtype="bfloat16") as engine:
        assert {parameter.dtype for parameter in engine.parts.model.parameters()} == {torch.bfloat16}
        engine.generate([[1, 2]], 3)
        shape = engine.parts.model.cache_shape
        assert engine.report().kv_bytes == 2 * shape.layers * shape.heads * shape.head_dim * 5 * 2


def test_random_weights_need_a_config_alone(folder, tmp_path):
    config = tmp_path / "elsewhere.json"
    config.write_bytes((folder / "config.json").read_bytes())
    with offload.load(config, device="cpu", load_format="dummy") as engine:
        generation = engine.generate([[1, 2, 3]], 4)[0]
        assert generation.text is None and len(generation.token_ids) == 4


def test_chat_prompts_are_tokens_in_the_models_form(engine):
    text = engine.parts.tokenizer.decode(engine.chat_prompt("hello"))
    assert text == "<user>hello"
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "kind"}]
    assert engine.parts.tokenizer.decode(engine.chat_prompt(messages)) == "<system>be<user>kind"


def test_close_gives_everything_back_and_ends_the_engine(folder):
    engine = offload.load(folder, device="cpu")
    engine.generate(["a"], 2)
    assert engine.report().device_bytes > 0
    engine.close()
    engine.close()
    report = engine.report()
    assert (report.device_bytes, report.locked_bytes, report.survivors) == (0, 0, ())
    with pytest.raises(ValueError, match="the engine is closed: load the model again"):
        engine.generate(["a"], 2)


def test_a_second_thread_waits(engine):
    inside, release, order = threading.Event(), threading.Event(), []

    def slow(index, token, text):
        inside.set()
        assert release.wait(30)
        order.append("first")

    threads = [
        threading.Thread(target=engine.generate, args=(["a"], 1), kwargs={"on_token": slow}),
        threading.Thread(target=engine.generate, args=(["b"], 1, 0.0, None, True, lambda *_: order.append("second"))),
    ]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    assert not order
    release.set()
    for thread in threads:
        thread.join(30)
    assert order == ["first", "second"]


def test_an_interrupted_generation_leaves_an_engine_that_works(engine):
    expected = engine.generate(TEXTS, 6)

    def interrupt(index, token, text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(TEXTS, 6, on_token=interrupt)
    assert engine.generate(TEXTS, 6) == expected
