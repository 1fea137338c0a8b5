"""Show what a configuration means, and with a model what it would do: nothing is loaded, only headers are read.

Without --model only the configuration is checked. With it: what is offloaded layer by layer, the device memory that
this frees, the layers that wait for their copy, the selectors that missed, the bytes over the bus per decode token,
and a better selector or step where there is one.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from offload.commands._options import add_dtype, add_model, add_offload_config
from offload.config import OffloadConfig
from offload.plan import ParameterSpec, Plan, plan
from offload.selectors import layer_path
from offload.suggest import Suggestion, bus_bytes_per_token, routed_experts, suggestions
from offload.text import gib, ranges

PLAN_FIELDS = (
    "offloaded",
    "offloaded_bytes",
    "offloaded_layers",
    "slots",
    "slot_bytes",
    "freed_bytes",
    "refill_order",
    "copies_per_pass",
    "stalling_layers",
    "unmatched_selectors",
    "warnings",
)


@dataclass(frozen=True)
class PlannedModel:
    """A model that was not loaded, and what the configuration would do to it."""

    architecture: str
    parameters: Sequence[ParameterSpec]
    plan: Plan
    bus_bytes_per_token: int
    suggestions: Sequence[Suggestion]
    default_order_bus_bytes_per_token: int | None = None
    """The same budget spent in the order of declaration; None where that is what the configuration asks for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `inspect`."""
    add_offload_config(parser, required=True)
    add_model(parser)
    add_dtype(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Print the configuration and, with a model, its plan.

    Raises:
        OffloadConfigError: the configuration is wrong, or offloads nothing on this model (after the plan was printed).
        ModelLoadError: the model's files do not fit together.
    """
    config = OffloadConfig.from_argument(arguments.offload_config)
    named = arguments.model is not None
    model = planned_model(arguments.model, config, arguments.dtype) if named else None
    for text in config.warnings + (model.plan.warnings if model else ()):
        print(f"[offload] offload_config: {text}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(_as_json(config, model), indent=2))
    else:
        print("\n".join(_as_text(config, model)))
    if model:
        model.plan.require_offload()
    return 0


def planned_model(path: str, config: OffloadConfig, dtype: str | None = None) -> PlannedModel:
    """Plan for a model from its `config.json`, and compare that with its safetensors headers.

    Args:
        path: the model's folder.
        config: what is asked for.
        dtype: dtype of the weights; None for the model's own.

    Returns:
        The model and its plan. Headers are not looked at if the plan is refused: the configuration is to blame first.

    Raises:
        ModelLoadError: no such folder, an architecture that is unknown or does not support what is
            asked, or files that do not fit the `config.json`.
    """
    # These import torch, which a configuration alone does not need.
    from offload.assemble import require_support
    from offload.backend import specs_of, weights_of
    from offload.folder import model_folder, read_config
    from offload.models import architecture, build

    folder = model_folder(path)
    model_config = read_config(folder)
    require_support(architecture(model_config), config)
    model = build(model_config, dtype)
    parameters = specs_of(weights_of(model, model.layers))
    made = plan(parameters, config)
    if not made.refusal:
        _check_headers(folder, model)
    experts = routed_experts(model_config)
    return PlannedModel(
        architecture=type(model).__name__,
        parameters=parameters,
        plan=made,
        bus_bytes_per_token=bus_bytes_per_token(made, parameters, experts),
        suggestions=suggestions(made, parameters, config, experts),
        default_order_bus_bytes_per_token=_default_order(parameters, config, experts) if made.offloaded else None,
    )


def _default_order(
    parameters: Sequence[ParameterSpec], config: OffloadConfig, experts: tuple[int, int] | None
) -> int | None:
    if config.resolved_backend != "uva" or not config.uva.cpu_offload_params:
        return None
    unselected = replace(config, uva=replace(config.uva, cpu_offload_params=set()))
    return bus_bytes_per_token(plan(parameters, unselected), parameters, experts)


def _check_headers(folder: Path, model: Any) -> None:
    from offload.checkpoint import PICKLES, open_checkpoint

    if any(any(folder.glob(pattern)) for pattern in ("*.safetensors*", *PICKLES)):
        open_checkpoint(folder).check(model)
    else:
        print("[offload] no weight files in the folder: sizes are those of config.json", file=sys.stderr)


def _as_json(config: OffloadConfig, model: PlannedModel | None) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "resolved_backend": config.resolved_backend,
        "enabled": config.is_offloading_enabled(),
        "config": config.to_dict(),
        "warnings": config.warnings,
    }
    if model:
        shown["plan"] = {name: getattr(model.plan, name) for name in PLAN_FIELDS}
        shown["plan"]["bus_bytes_per_token"] = model.bus_bytes_per_token
        shown["plan"]["default_order_bus_bytes_per_token"] = model.default_order_bus_bytes_per_token
        shown["plan"]["suggestions"] = [
            {
                "text": better.text,
                "config": better.config.to_dict(),
                "freed_bytes": better.freed_bytes,
                "bus_bytes_per_token": better.bus_bytes_per_token,
            }
            for better in model.suggestions
        ]
    return shown


def _as_text(config: OffloadConfig, model: PlannedModel | None) -> Iterator[str]:
    yield f"config    {config.to_json()}"
    yield f"backend   {config.resolved_backend or 'none'} ({config.reason})"
    yield f"enabled   {'yes' if config.is_offloading_enabled() else 'no'}"
    if model:
        yield from _summary(config, model)
        yield from _table(model)


def _summary(config: OffloadConfig, model: PlannedModel) -> Iterator[str]:
    made = model.plan
    sizes_bytes = {spec.identity: spec.nbytes for spec in model.parameters}
    in_layers_bytes = sum({spec.identity: spec.nbytes for spec in model.parameters if spec.layer is not None}.values())
    total_bytes = sum(sizes_bytes.values())
    layers = {spec.layer for spec in model.parameters} - {None}
    budget = f", budget {gib(config.budget_bytes)}" if made.backend == "uva" else ""
    yield f"model     {model.architecture}, {len(layers)} decoder layers, {gib(total_bytes)} of weights"
    yield f"host      {gib(made.offloaded_bytes)} offloaded of {gib(in_layers_bytes)} in the layers{budget}"
    if made.slots:
        sizes = ", ".join(gib(nbytes) for nbytes in sorted(set(made.slot_sizes_bytes), reverse=True))
        yield f"slots     {made.slots} of {sizes}, {gib(made.slot_bytes)} in all"
        yield f"copies    {made.copies_per_pass} per pass"
        yield f"stalls    {f'layers {ranges(made.stalling_layers)}' if made.stalling_layers else 'none by plan'}"
    stays_bytes = total_bytes - made.offloaded_bytes + made.slot_bytes
    yield f"device    {gib(made.freed_bytes)} freed, {gib(stays_bytes)} stay (weights and slots)"
    unselected_bytes = model.default_order_bus_bytes_per_token
    beside = f" ({gib(unselected_bytes)} without selectors)" if unselected_bytes is not None else ""
    yield f"bus       {gib(model.bus_bytes_per_token)} per decode token{beside}"
    for better in model.suggestions:
        yield f"better    {better.text}"


def _table(model: PlannedModel) -> Iterator[str]:
    rows = list(_layer_rows(model.parameters, model.plan))
    if not rows:
        return
    runs = [
        (ranges([layer for layer, *_ in run]), slot, gib(nbytes), names)
        for (slot, nbytes, names), run in groupby(rows, key=lambda row: row[1:])
    ]
    header = ("layer", "slot", "each", "offloaded, in this order")
    widths = [max(len(row[column]) for row in (header, *runs)) for column in range(3)]
    yield ""
    for layers, slot, size, names in (header, *runs):
        yield f"{layers:<{widths[0]}}  {slot:<{widths[1]}}  {size:>{widths[2]}}  {names}"


def _layer_rows(parameters: Sequence[ParameterSpec], made: Plan) -> Iterator[tuple[int, str, int, str]]:
    """For each offloaded layer: its index, its slot, its offloaded bytes, and which of its parameters they are."""
    offloaded = set(made.offloaded)
    by_layer: dict[int, list[ParameterSpec]] = {layer: [] for layer in made.offloaded_layers}
    for spec in parameters:
        if spec.layer in by_layer:
            by_layer[spec.layer].append(spec)
    for ordinal, (layer, specs) in enumerate(by_layer.items()):
        taken = [spec for spec in specs if spec.name in offloaded]
        slot = str(made.slot_of(ordinal)) if made.slots else "-"
        yield layer, slot, sum(spec.nbytes for spec in taken), _names(layer, specs, taken)


def _names(layer: int, specs: Sequence[ParameterSpec], taken: Sequence[ParameterSpec]) -> str:
    if len(taken) == len(specs):
        return "all"
    path = layer_path([spec.name for spec in specs], layer)
    return ", ".join(spec.name.removeprefix(path + ".") for spec in taken)
