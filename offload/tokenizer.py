"""Text to tokens and back, and the chat template: what a folder's `tokenizer.json` and Jinja template say.

A model needs none of this to generate from token lists, so a folder without a tokenizer is no error until text is
asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from offload.errors import ModelLoadError
from offload.folder import read_json_object
from offload.text import shortened

Message = Mapping[str, Any]

TEMPLATE_FILE = "chat_template.jinja"


class Tokenizer:
    """The tokenizer of one model.

    Args:
        fast: of the tokenizers library.
        template: Jinja text of the chat template, None where the model has none.
        special: the special tokens that templates may name ("bos_token", ...).
    """

    def __init__(self, fast: FastTokenizer, template: str | None, special: Mapping[str, str]) -> None:
        self._fast = fast
        self._template = template
        self._special = dict(special)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, with the special tokens that the model begins a text with.

        Raises:
            ValueError: it is no Unicode text.
        """
        return self._tokens(text, special=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, without special tokens."""
        return self._fast.decode(list(token_ids), skip_special_tokens=True)

    def chat(self, messages: str | Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation, up to where the model's answer begins.

        Args:
            messages: one user's text, or messages with "role" and "content".

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        if self._template is None:
            raise ValueError(f"the model has no chat template ({TEMPLATE_FILE}): give the prompt as plain text")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        try:
            template = _environment().from_string(self._template)
            text = template.render(messages=messages, add_generation_prompt=True, **self._special)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return self._tokens(text, special=False)

    def _tokens(self, text: str, special: bool) -> list[int]:
        try:
            return self._fast.encode(text, add_special_tokens=special).ids
        except TypeError as error:  # what the library says of a lone surrogate
            raise ValueError(f"{shortened(text)} has characters that are no Unicode text: remove them") from error

    def stream(self) -> TextStream:
        """Return what turns the tokens of one answer into text as they come."""
        return TextStream(self._fast)


class TextStream:
    """The text of tokens that arrive one by one: a piece is held back until its last character is whole."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        self._stream = DecodeStream(skip_special_tokens=True)

    def put(self, token_id: int) -> str:
        """Return the text that this token completes, "" if it completes none."""
        return self._stream.step(self._fast, token_id) or ""


def open_tokenizer(folder: Path) -> Tokenizer | None:
    """Open the tokenizer of a model's folder; None if it has none.

    Raises:
        ModelLoadError: its files are damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        fast = FastTokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelLoadError(f"tokenizer.json cannot be read ({shortened(str(error))}): download it again") from error
    settings_path = folder / "tokenizer_config.json"
    settings = read_json_object(settings_path, "download it again") if settings_path.is_file() else {}
    return Tokenizer(fast, _template(folder, settings), _special_tokens(settings))


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens stand as text or as an object with the text as its content."""
    found = {}
    for name, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is only what it contains."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """A template comes with the model's files, so it runs without access to Python; set up as transformers does."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
