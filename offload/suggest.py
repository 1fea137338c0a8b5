"""What a plan costs per decode token, and the selector or step that would cost less.

Declaration order spends a uva budget on attention weights, which every token reads, before experts, of which a token
reads only a few: the same device memory can then cost many times the bus traffic. A prefetch step that is too small
makes layers wait at every pass, one that is too large frees nothing. Both show before anything is loaded, so they are
said before anything is loaded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from offload.config import OffloadConfig
from offload.plan import ParameterSpec, Plan, plan
from offload.ring import least_step_without_stalls
from offload.selectors import layer_path
from offload.text import gib, shortened

WORTH_SAYING = Fraction(9, 10)
"""A selector is suggested if it needs at most this share of the bus traffic, in all and per offloaded byte."""


@dataclass(frozen=True)
class Suggestion:
    """A better configuration.

    Attributes:
        text: what to change and what it gives, in one line.
        config: the whole configuration, changed.
        freed_bytes: device memory that its plan frees.
        bus_bytes_per_token: bytes over the bus per decode step at batch 1.
    """

    text: str
    config: OffloadConfig
    freed_bytes: int
    bus_bytes_per_token: int


def routed_experts(model_config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Read (experts per token, experts) from the text of a `config.json`; None for a dense model."""
    used = model_config.get("num_experts_per_tok")
    count = model_config.get("num_experts") or model_config.get("num_local_experts")
    return (used, count) if isinstance(used, int) and isinstance(count, int) and 0 < used <= count else None


def bus_bytes_per_token(made: Plan, parameters: Sequence[ParameterSpec], experts: tuple[int, int] | None = None) -> int:
    """Bytes that cross the bus in one decode step at batch 1.

    Args:
        made: the plan.
        parameters: what it was made from.
        experts: (experts per token, experts) of a mixture of experts; None for a dense model.

    Returns:
        Under uva the bytes of every use of an offloaded parameter, of stacked experts only those that one token is
        routed to; under prefetch the regions of the layers that are copied in a pass, padding included, since a layer
        is one copy.
    """
    if made.backend == "prefetch":
        copied = {follower for ordinal, follower in enumerate(made.refill_order) if follower != ordinal}
        return sum(made.region_bytes[ordinal] for ordinal in copied)
    offloaded = set(made.offloaded)
    return sum(_read_bytes(spec, experts) for spec in parameters if spec.name in offloaded)


def suggestions(
    made: Plan, parameters: Sequence[ParameterSpec], config: OffloadConfig, experts: tuple[int, int] | None = None
) -> list[Suggestion]:
    """Find configurations that do the same with less waiting or less traffic.

    Args:
        made: the plan of `config`.
        parameters: what it was made from.
        config: an enabled configuration.
        experts: (experts per token, experts) of a mixture of experts; None for a dense model.

    Returns:
        At most one suggestion; empty where nothing better was found.
    """
    if made.backend == "prefetch":
        return list(_better_step(made, parameters, config))
    return list(_better_selector(made, parameters, config, experts))


def _read_bytes(spec: ParameterSpec, experts: tuple[int, int] | None) -> int:
    if experts and "experts" in spec.name.split("."):
        used, count = experts
        return spec.nbytes * used // count
    return spec.nbytes


def _better_step(made: Plan, parameters: Sequence[ParameterSpec], config: OffloadConfig) -> Iterator[Suggestion]:
    layers = made.offloaded_layers
    frees_nothing = made.slots == len(layers)
    if not made.stalling_layers and not (frees_nothing and len(layers) > 1):
        return
    all_layers = sorted({spec.layer for spec in parameters if spec.layer is not None})
    step = least_step_without_stalls(layers, all_layers, 0 if frees_nothing else made.slots)
    if step is None:
        if not frees_nothing:
            return
        step = 1
    better = replace(config, prefetch=replace(config.prefetch, offload_prefetch_step=step))
    remade = plan(parameters, better)
    traffic_bytes = bus_bytes_per_token(remade, parameters)
    stalls = "some layers wait" if remade.stalling_layers else "no layer waits for its copy by plan"
    text = (
        f"offload_prefetch_step {step}: {stalls}, and {gib(remade.freed_bytes)} of device memory are freed "
        f"(now {gib(made.freed_bytes)}), for {gib(traffic_bytes)} over the bus per token"
    )
    yield Suggestion(text, better, remade.freed_bytes, traffic_bytes)


def _better_selector(
    made: Plan, parameters: Sequence[ParameterSpec], config: OffloadConfig, experts: tuple[int, int] | None
) -> Iterator[Suggestion]:
    if not experts or not made.offloaded_bytes:
        return
    needed_bytes = min(config.budget_bytes, made.offloaded_bytes)
    traffic_bytes = bus_bytes_per_token(made, parameters, experts)
    traffic_per_byte = Fraction(traffic_bytes, made.offloaded_bytes)
    best: Suggestion | None = None
    for selector in _module_selectors(parameters):
        other = replace(config, uva=replace(config.uva, cpu_offload_params={selector}))
        remade = plan(parameters, other)
        if remade.offloaded_bytes < needed_bytes:
            continue
        other_bytes = bus_bytes_per_token(remade, parameters, experts)
        other_per_byte = Fraction(other_bytes, remade.offloaded_bytes)
        if other_bytes <= WORTH_SAYING * traffic_bytes and other_per_byte < WORTH_SAYING * traffic_per_byte:
            traffic_per_byte = other_per_byte / WORTH_SAYING
            text = (
                f"cpu_offload_params [{shortened(selector)}]: {gib(other_bytes)} over the bus per token instead of "
                f"{gib(traffic_bytes)}, for {gib(remade.offloaded_bytes)} offloaded (now {gib(made.offloaded_bytes)})"
            )
            best = Suggestion(text, other, remade.freed_bytes, other_bytes)
    if best:
        yield best


def _module_selectors(parameters: Sequence[ParameterSpec]) -> list[str]:
    """Every module below the layers and every parameter in them, modules before what they contain."""
    names_of: dict[int, list[str]] = {}
    for spec in parameters:
        if spec.layer is not None:
            names_of.setdefault(spec.layer, []).append(spec.name)
    found: dict[str, None] = {}
    for layer, names in names_of.items():
        path = layer_path(names, layer)
        for name in names:
            segments = name[len(path) + 1 if path else 0 :].split(".")
            found.update(dict.fromkeys(".".join(segments[:end]) for end in range(1, len(segments) + 1)))
    return list(found)
