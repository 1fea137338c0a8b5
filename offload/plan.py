"""What is offloaded: parameter names and sizes, and a configuration, to a `Plan`. Pure arithmetic; no torch, no memory.

Only parameters of the decoder layers move, layer by layer in declaration order. Under uva they are taken until the
budget is reached (the test comes before a weight and ignores its size, so the last weight may exceed it); under
prefetch those of the last n layers of every group are taken. Two kinds of parameters stay on the device although they
were selected, and the plan says so: a storage that is also used outside the layers (a tied embedding), which
embeddings and heads need there in any case; and under prefetch a storage that several layers share, which would be
copied for each of them and never be absent. Parameters without elements are skipped.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from offload.config import OffloadConfig
from offload.errors import OffloadConfigError
from offload.plan_notes import Facts, refusal, warnings
from offload.ring import refill_order, stalling_layers
from offload.selectors import Selectors, layer_path

ALIGNMENT_BYTES = 128
"""Every tensor starts on a full line of this many bytes, the size of one request over the bus."""


def aligned(nbytes: int) -> int:
    """Round bytes up to the alignment that every tensor in a slab or slot has."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter, as far as planning needs to know it.

    Attributes:
        name: full name in the model, `model.layers.3.mlp.down_proj.weight`.
        layer: index of its decoder layer within this rank; None outside the decoder layers.
        nbytes: size without padding.
        storage: equal for names that share one tensor; None for a tensor of its own.
    """

    name: str
    layer: int | None
    nbytes: int
    storage: Hashable | None = None

    @property
    def identity(self) -> Hashable:
        """Equal for specs of one tensor."""
        return ("name", self.name) if self.storage is None else self.storage


@dataclass(frozen=True)
class Plan:
    """What is offloaded and in which order it moves. Bytes have no padding unless it is said.

    Attributes:
        backend: the backend that is planned for; None where offload is not enabled.
        offloaded: full names of the parameters on the host, in order, shared ones under each of their names.
        offloaded_bytes: their size; a shared parameter counts once.
        offloaded_layers: indices of the layers with at least one parameter on the host, ascending.
        slots: number of device slots, min(step, offloaded layers); 0 under uva.
        slot_bytes: total size of the slots, padding included.
        freed_bytes: offloaded bytes less slot bytes: what the device gains.
        refill_order: ordinal of the offloaded layer put into slot `k % slots` after ordinal k; empty if nothing is
            ever refilled.
        copies_per_pass: number of layer copies in one forward pass.
        stalling_layers: indices of the layers that always wait for their copy.
        unmatched_selectors: selectors that match no parameter of any decoder layer, sorted.
        warnings: texts about what had no effect, each with its remedy.
        refusal: why this plan must not be used although offload is enabled, with the remedy; None if it may.
        region_bytes: size of each offloaded layer in slab and slot, padding included, in order; a weight that layers
            share counts with the first of them.
    """

    backend: Literal["uva", "prefetch"] | None = None
    offloaded: tuple[str, ...] = ()
    offloaded_bytes: int = 0
    offloaded_layers: tuple[int, ...] = ()
    slots: int = 0
    slot_bytes: int = 0
    freed_bytes: int = 0
    refill_order: tuple[int, ...] = ()
    copies_per_pass: int = 0
    stalling_layers: tuple[int, ...] = ()
    unmatched_selectors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    refusal: str | None = None
    region_bytes: tuple[int, ...] = ()

    @cached_property
    def slot_sizes_bytes(self) -> tuple[int, ...]:
        """Size of each slot: the largest region it will hold."""
        return slot_sizes(self.region_bytes, self.slots)

    def slot_of(self, ordinal: int) -> int:
        """The slot that the offloaded layer with this ordinal owns."""
        return ordinal % self.slots

    def next_owner(self, ordinal: int) -> int:
        """Ordinal of the layer that its slot goes to after this one; the same one where the slot has a single owner."""
        return self.refill_order[ordinal] if self.refill_order else ordinal

    def require_offload(self) -> None:
        """Refuse a plan that offloads nothing although offload is enabled.

        Raises:
            OffloadConfigError: with the reason and the remedy.
        """
        if self.refusal:
            raise OffloadConfigError(self.refusal)


def plan(parameters: Iterable[ParameterSpec], config: OffloadConfig) -> Plan:
    """Decide which parameters live on the host.

    Args:
        parameters: every parameter of the model in declaration order, with its size in bytes.
        config: what the user asked for.

    Returns:
        The plan; an empty one where offload is not enabled. It may be empty although offload is enabled: see
        `Plan.refusal`.
    """
    if not config.is_offloading_enabled():
        return Plan()
    parameters = list(parameters)
    walk = _walk(parameters, config.selectors)
    kept = _kept_on_device(parameters, prefetch=config.resolved_backend == "prefetch")
    choose = _choose_uva if config.resolved_backend == "uva" else _choose_prefetch
    chosen = choose(config, [step for step in walk if step.spec.nbytes and step.identity not in kept])
    return _assembled(config, walk, chosen, kept)


class _Step(NamedTuple):
    """One parameter of the walk over the decoder layers; `rest` is its name below its layer."""

    spec: ParameterSpec
    identity: Hashable
    layer: int
    rest: str
    matching: frozenset[str]
    selected: bool


def _walk(parameters: Sequence[ParameterSpec], texts: Sequence[str]) -> list[_Step]:
    by_layer: dict[int, list[ParameterSpec]] = {}
    for spec in parameters:
        if spec.layer is not None:
            by_layer.setdefault(spec.layer, []).append(spec)
    selectors = Selectors(texts)
    walk = []
    for layer, specs in sorted(by_layer.items()):
        path = layer_path([spec.name for spec in specs], layer)
        rooted = selectors.rooted(path)
        start = len(path) + 1 if path else 0
        for spec in specs:
            rest = spec.name[start:]
            matching = selectors.matching(rest, rooted) if texts else frozenset()
            walk.append(_Step(spec, spec.identity, layer, rest, matching, bool(matching) or not texts))
    return walk


def _kept_on_device(parameters: Sequence[ParameterSpec], prefetch: bool) -> set[Hashable]:
    """Storages that another user needs on the device: outside the layers, or, under prefetch, in a second layer."""
    first_user: dict[Hashable, int | None] = {}
    kept = set()
    for spec in parameters:
        if spec.storage is None:
            continue
        layer = first_user.setdefault(spec.storage, spec.layer)
        if layer is None or spec.layer is None or (prefetch and layer != spec.layer):
            kept.add(spec.storage)
    return kept


def _choose_uva(config: OffloadConfig, walk: Sequence[_Step]) -> set[Hashable]:
    chosen: set[Hashable] = set()
    taken_bytes, budget_bytes = 0, config.budget_bytes
    for step in walk:
        if taken_bytes >= budget_bytes:
            break
        if step.selected and step.identity not in chosen:
            chosen.add(step.identity)
            taken_bytes += step.spec.nbytes
    return chosen


def _choose_prefetch(config: OffloadConfig, walk: Sequence[_Step]) -> set[Hashable]:
    offloads = in_group(config)
    return {step.identity for step in walk if step.selected and offloads(step.layer)}


def in_group(config: OffloadConfig) -> Callable[[int], bool]:
    """The test whether prefetch offloads a layer, by its index."""
    group = config.prefetch.offload_group_size
    first = group - config.prefetch.offload_num_in_group
    return lambda layer: layer % group >= first


def _assembled(config: OffloadConfig, walk: Sequence[_Step], chosen: set[Hashable], kept: set[Hashable]) -> Plan:
    taken = [step for step in walk if step.identity in chosen]
    owned = {step.identity: step for step in reversed(taken)}
    regions = dict.fromkeys(sorted({step.layer for step in taken}), 0)
    for step in owned.values():
        regions[step.layer] += aligned(step.spec.nbytes)
    layers, region_bytes = tuple(regions), tuple(regions.values())
    all_layers = sorted({step.layer for step in walk})
    offloaded_bytes = sum(step.spec.nbytes for step in owned.values())
    count = len(layers) if config.resolved_backend == "prefetch" else 0
    ring_step = config.prefetch.offload_prefetch_step
    order = refill_order(count, ring_step)
    slots = min(count, ring_step)
    slot_bytes = sum(slot_sizes(region_bytes, slots))
    stalls = stalling_layers(layers, all_layers, ring_step) if count else ()
    facts = Facts(
        config=config,
        all_layers=all_layers,
        offloaded_layers=layers,
        stalling_layers=stalls,
        names_below_layers=frozenset(step.rest for step in walk),
        matched=frozenset().union(*{step.matching for step in walk}),
        effective=frozenset().union(*{step.matching for step in taken}),
        kept_names=tuple(step.spec.name for step in walk if step.selected and step.identity in kept),
    )
    return Plan(
        backend=config.resolved_backend,
        offloaded=tuple(step.spec.name for step in taken),
        offloaded_bytes=offloaded_bytes,
        offloaded_layers=layers,
        slots=slots,
        slot_bytes=slot_bytes,
        freed_bytes=offloaded_bytes - slot_bytes,
        refill_order=order,
        copies_per_pass=sum(follower != ordinal for ordinal, follower in enumerate(order)),
        stalling_layers=stalls,
        unmatched_selectors=facts.unmatched,
        warnings=warnings(facts),
        refusal=None if taken else refusal(facts),
        region_bytes=region_bytes,
    )


def slot_sizes(layer_bytes: Sequence[int], slots: int) -> tuple[int, ...]:
    """Size of each of `slots` slots when layer k, of `layer_bytes[k]` with padding, owns slot `k % slots`."""
    return tuple(max(layer_bytes[slot::slots]) for slot in range(slots))
