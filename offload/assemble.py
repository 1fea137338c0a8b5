"""Everything between a path and a model that runs, refused as early as possible.

In order: the configuration, `config.json` and the architecture, the plan, the files' headers, free memory, the
tokenizer, and only then the weights. What was reserved before a refusal, an error or Ctrl-C is given back.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from offload.backend import Backend, make_backend, specs_of, weights_of
from offload.config import OffloadConfig
from offload.device import Device, open_device
from offload.errors import ModelLoadError, OffloadConfigWarning
from offload.folder import expanded, model_folder, read_config, read_json_object
from offload.loader import LoadFormat, load_weights, open_source
from offload.models import Architecture, architecture, build
from offload.plan import Plan, plan
from offload.text import gib, shortened
from offload.tokenizer import Tokenizer, open_tokenizer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """A model that runs, and what it runs with.

    Attributes:
        folder: of the model's files.
        config: what the user asked for.
        plan: what is offloaded.
        model: attached to its weights.
        backend: holds the weights.
        device: where it runs.
        dtype: of the weights.
        tokenizer: None if the folder has none.
        end_tokens: tokens that end an answer.
        vocabulary: number of tokens.
        owned: closed with the parts: the backend, and the device if it was opened here.
    """

    folder: Path
    config: OffloadConfig
    plan: Plan
    model: Architecture
    backend: Backend
    device: Device
    dtype: torch.dtype
    tokenizer: Tokenizer | None
    end_tokens: frozenset[int]
    vocabulary: int
    owned: ExitStack = field(repr=False)

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            ValueError: there is none.
        """
        if self.tokenizer is None:
            raise ValueError(f"{shortened(str(self.folder))} has no tokenizer.json: give token lists, or add the file")
        return self.tokenizer

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self.owned.close()


def assemble(
    path: str | Path,
    offload_config: OffloadConfig | Mapping[str, Any] | str | None,
    device: Device | torch.device | str | None,
    dtype: torch.dtype | str | None,
    load_format: LoadFormat,
    max_context: int | None,
    needs_text: bool,
) -> Parts:
    """Put a model together; arguments and errors are those of `offload.load`."""
    config = OffloadConfig.of(offload_config)
    folder, described = read_model(path, load_format)
    require_support(architecture(described), config)
    model = build(described, dtype)
    require_context(max_context, model.context)
    weights = weights_of(model, model.layers)
    planned = plan(specs_of(weights), config)
    planned.require_offload()
    backend_name, layers, nbytes = config.resolved_backend, len(planned.offloaded_layers), gib(planned.offloaded_bytes)
    _LOG.info("backend %s (%s): %s of %d layers offloaded", backend_name, config.reason, nbytes, layers)
    source = open_source(folder, load_format)
    source.check(model)
    with ExitStack() as owned:
        device = _opened(device, load_format == "meta", owned)
        require_weights(device, load_format)
        require_own_memory(device, config)
        backend = make_backend(weights, planned, config, device)
        owned.callback(backend.close)
        tokenizer = open_tokenizer(folder)
        if needs_text and tokenizer is None:
            raise ModelLoadError(f"{shortened(str(folder))} has no tokenizer.json: text cannot be read without it")
        ends = end_tokens(folder, described)
        for text in (*config.warnings, *planned.warnings):
            warnings.warn(text, OffloadConfigWarning, stacklevel=3)
        load_weights(source, model, backend.destination, device)
        backend.attach(model, model.layers)
        with device.active(), torch.inference_mode():
            model.prepare(device.torch_device)
        return Parts(
            folder=folder,
            config=config,
            plan=planned,
            model=model,
            backend=backend,
            device=device,
            dtype=weights[0].dtype,
            tokenizer=tokenizer,
            end_tokens=ends,
            vocabulary=described["vocab_size"],
            owned=owned.pop_all(),
        )


def read_model(path: str | Path, load_format: LoadFormat) -> tuple[Path, dict[str, Any]]:
    """Return a model's folder and its `config.json`; where no weights are read, the file alone will do.

    Raises:
        ModelLoadError: there is no such folder or file, or it is no `config.json` of a model that can be read.
    """
    file = expanded(path)
    if load_format != "safetensors" and file.is_file():
        return file.parent, read_json_object(file, "give a config.json")
    folder = model_folder(path)
    return folder, read_config(folder)


def require_support(cls: type[Architecture], config: OffloadConfig) -> None:
    """Refuse an architecture that does not claim to work with offloaded weights, if any are to be.

    Raises:
        ModelLoadError: it does not.
    """
    if config.is_offloading_enabled() and not cls.supports_weight_offload:
        raise ModelLoadError(
            f"{cls.__name__} does not support weight offloading: remove the offload config, or set "
            "supports_weight_offload on the class once every weight is read through its parameter"
        )


def require_context(max_context: int | None, context: int) -> None:
    """Refuse a context that the model was not made for.

    Raises:
        ValueError: it is not a number of tokens between 1 and the model's context.
    """
    if max_context is None:
        return
    if isinstance(max_context, bool) or not isinstance(max_context, int) or not 1 <= max_context <= context:
        raise ValueError(f"max_context is {shortened(max_context)}: give a number of tokens from 1 to {context}")


def require_weights(device: Device, load_format: LoadFormat) -> None:
    """Refuse to compute with weights that were never read.

    Raises:
        ModelLoadError: there are none to read and the device has memory.
    """
    if load_format == "meta" and device.torch_device.type != "meta":
        raise ModelLoadError(f'load_format "meta" reads no weights, and {device.name} would compute: use "dummy"')


def require_own_memory(device: Device, config: OffloadConfig) -> None:
    """Refuse to offload on a GPU that has no memory of its own.

    Raises:
        ModelLoadError: host and device are one memory.
    """
    if config.is_offloading_enabled() and device.unified:
        raise ModelLoadError(
            f"{device.name} is an integrated GPU: host and device are one memory, so offloading frees nothing; "
            "remove the offload config"
        )


def end_tokens(folder: Path, described: Mapping[str, Any]) -> frozenset[int]:
    """Return the tokens that end an answer: those of `generation_config.json`, else of `config.json`; maybe none.

    Raises:
        ModelLoadError: what stands there are no tokens.
    """
    path = folder / "generation_config.json"
    generation = read_json_object(path, "download it again") if path.is_file() else {}
    for source, name in ((generation, path.name), (described, "config.json")):
        found = source.get("eos_token_id")
        if found is not None:
            tokens = found if isinstance(found, list) else [found]
            if not all(isinstance(token, int) for token in tokens):
                raise ModelLoadError(
                    f"{name}: eos_token_id is {shortened(found)}: it must be a token or a list of them"
                )
            return frozenset(tokens)
    return frozenset()


def _opened(device: Device | torch.device | str | None, meta: bool, owned: ExitStack) -> Device:
    if isinstance(device, Device):
        return device
    opened = open_device(device, meta)
    owned.callback(opened.close)
    return opened
