"""What is measured: one model on one device, loaded once for every configuration."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from offload.config import OffloadConfig
from offload.device import Device, open_device
from offload.engine import Engine, load
from offload.errors import OffloadConfigError
from offload.model_configs import find
from offload.plan import ParameterSpec


@dataclass(frozen=True)
class Subject:
    """A model and where it runs.

    Attributes:
        path: folder of the model, or a `config.json` alone.
        name: how rows call it.
        load_format: "safetensors", "dummy" or "meta".
        device: as the user wrote it; None for the default.
        dtype: of the weights; None for the model's own.
        graph: replay captured decode steps.
    """

    path: Path
    name: str
    load_format: str
    device: str | None = None
    dtype: str | None = None
    graph: bool = False

    @cached_property
    def described(self) -> Mapping[str, Any]:
        """The text of `config.json`."""
        from offload.assemble import read_model

        return read_model(self.path, self.load_format)[1]

    @cached_property
    def specs(self) -> Sequence[ParameterSpec]:
        """Every parameter as the planner sees it; reads no weights."""
        from offload.backend import specs_of, weights_of
        from offload.models import build

        model = build(self.described, self.dtype)
        return specs_of(weights_of(model, model.layers))

    def open_device(self) -> Device:
        """Open the device anew, with its memory and its simulated clock at zero."""
        if self.load_format == "meta":
            from offload.virtual import VirtualDevice

            return VirtualDevice((self.device or "").removeprefix("virtual:"), torch_device="meta")
        return open_device(self.device)

    def load(self, config: OffloadConfig, device: Device, max_context: int | None = None) -> Engine:
        """Load the model with one configuration on an open device, which stays the caller's."""
        return load(str(self.path), config, device, self.dtype, self.load_format, max_context, graph=self.graph)


def subject_of(args: argparse.Namespace) -> Subject:
    """The subject that the options of `bench.arguments.add_model` name.

    `--device virtual --profile FILE` is `--device virtual:FILE`; elsewhere a profile gives the bound of a real GPU.

    Raises:
        OffloadConfigError: they contradict each other.
        ModelLoadError: no such model.
    """
    device, profile = args.device, getattr(args, "profile", None)
    if device == "virtual":
        if not profile:
            raise OffloadConfigError("--device virtual names no GPU: use virtual:NAME, or add --profile FILE")
        device, args.profile = f"virtual:{profile}", None
    path, name = find(args.model_config) if args.model_config else (Path(args.model), Path(args.model).name)
    load_format = args.load_format or ("dummy" if args.model_config else "safetensors")
    is_virtual = (device or "").startswith("virtual:")
    if load_format == "meta" and not is_virtual:
        raise OffloadConfigError("--load-format meta has no weights to compute with: add --device virtual:NAME")
    if load_format == "safetensors" and args.model_config:
        raise OffloadConfigError("--model-config names no weights: use --model DIR, or --load-format dummy or meta")
    return Subject(path, name or Path.cwd().name, load_format, device, args.dtype, getattr(args, "graph", False))


def require_real(device: Device, profile: str | None) -> None:
    """Refuse a profile where it would have no effect: a simulated GPU has its own, and a CPU no bound.

    Raises:
        OffloadConfigError: there is a profile, and the device is no real GPU.
    """
    if profile and device.torch_device.type != "cuda":
        remedy = "leave it out, or give --device virtual"
        raise OffloadConfigError(f"--profile gives the bound of a real GPU, and this is {device.name}: {remedy}")
