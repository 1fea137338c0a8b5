"""Tokens and text, the chat template in its two places, and templates that are refused."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from offload.errors import ModelLoadError
from offload.tokenizer import open_tokenizer
from tests.tiny_folder import write_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path)
    return tmp_path


def with_settings(folder, **settings):
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return open_tokenizer(folder)


def rendered(folder, template, messages=MESSAGES):
    tokenizer = with_settings(folder, chat_template=template, bos_token="<b>", eos_token={"content": "<e>"})
    return tokenizer.decode(tokenizer.chat(messages))


def test_no_tokenizer_is_no_error(tmp_path):
    assert open_tokenizer(tmp_path) is None


@pytest.mark.parametrize("text", ["plain", "Zürich, 北京 🙂", "  two  spaces "])
def test_text_comes_back(text, folder):
    tokenizer = open_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    stream = tokenizer.stream()
    pieces = [stream.put(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces)


def test_bytes_that_are_no_text_are_refused(folder):
    tokenizer = open_tokenizer(folder)
    for ask in (tokenizer.encode, tokenizer.chat):
        with pytest.raises(ValueError, match=r"h\\udcff.* has characters that are no Unicode text: remove them$"):
            ask("h\udcff")


def test_special_tokens_begin_a_text_but_not_a_conversation(tmp_path):
    fast = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.add_special_tokens(["<s>"])
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = with_settings(tmp_path, bos_token="<s>", chat_template="{{ bos_token }} {{ messages[0].content }}")
    assert tokenizer.encode("a b") == [0, 1, 2]
    assert tokenizer.chat("a b") == [0, 1, 2]
    assert tokenizer.decode([0, 1]) == "a"


def test_a_template_file_comes_before_the_settings(folder):
    (folder / "chat_template.jinja").write_text("file:{{ messages[0].content }}", encoding="utf-8")
    assert rendered(folder, "settings") == "file:hi"


def test_of_several_templates_the_default_is_taken(folder):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    assert rendered(folder, named) == "default"


TEMPLATES = {
    "special tokens": ("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}", "<b>hi<e>"),
    "generation prompt": ("{% if add_generation_prompt %}go{% endif %}", "go"),
    "blocks are trimmed": ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
    "loop controls": ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
    "generation marks": ("a{% generation %}b{% endgeneration %}c", "abc"),
    "json keeps letters": ("{{ {'ü': '<'} | tojson }}", '{"ü": "<"}'),
    "undefined names are empty": ("{% if tools %}t{% endif %}{{ tools }}", ""),
    "dates": ("{{ strftime_now('%Y') | length }}", "4"),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_templates_are_rendered_as_transformers_renders_them(case, folder):
    template, expected = TEMPLATES[case]
    assert rendered(folder, template) == expected


def test_a_model_without_a_template_says_so(folder):
    tokenizer = with_settings(folder)
    with pytest.raises(ValueError, match="the model has no chat template .*: give the prompt as plain text"):
        tokenizer.chat("hi")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{% if %}", "refuses these messages: "),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages: "),
    ],
    ids=["its own refusal", "syntax", "reaching for Python"],
)
def test_a_template_that_fails_is_one_line(template, message, folder):
    with pytest.raises(ValueError) as refusal:
        rendered(folder, template)
    assert message in str(refusal.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_files_are_refused(name, folder):
    (folder / name).write_text("{")
    with pytest.raises(ModelLoadError, match=f"{name} .*: download it again"):
        open_tokenizer(folder)
