"""What a plan says for itself: what had no effect, what stalls, why nothing is offloaded, and the remedy."""

from collections.abc import Iterator
from dataclasses import dataclass

from offload.config import OffloadConfig
from offload.ring import least_step_without_stalls
from offload.selectors import nearest
from offload.text import quoted, ranges, shortened


@dataclass(frozen=True)
class Facts:
    """What the notes are made from.

    Attributes:
        config: an enabled configuration.
        all_layers, offloaded_layers, stalling_layers: indices of layers, ascending.
        names_below_layers: every parameter's name below its layer.
        matched: selectors that match at least one parameter of a decoder layer.
        effective: selectors that match at least one offloaded parameter.
        kept_names: selected parameters that stay on the device because their storage is needed there.
    """

    config: OffloadConfig
    all_layers: list[int]
    offloaded_layers: tuple[int, ...]
    stalling_layers: tuple[int, ...]
    names_below_layers: frozenset[str]
    matched: frozenset[str]
    effective: frozenset[str]
    kept_names: tuple[str, ...]

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Selectors that match nothing, sorted."""
        return tuple(text for text in self.config.selectors if text not in self.matched)


def warnings(facts: Facts) -> tuple[str, ...]:
    """Everything about a plan that its user should know; empty where all is well."""
    return (*_about_selectors(facts), *_about_kept(facts), *_about_the_ring(facts))


def refusal(facts: Facts) -> str:
    """Why nothing is offloaded although offload is enabled, and the remedy."""
    if not facts.all_layers:
        return "the model has no decoder layers with parameters, so nothing can be offloaded: remove the offload config"
    if facts.config.selectors and not facts.matched:
        return f"nothing would be offloaded: {'; '.join(_unmatched(text, facts) for text in facts.unmatched)}"
    if facts.config.resolved_backend == "prefetch":
        group = _group_refusal(facts)
        if group:
            return group
    elif facts.config.budget_bytes == 0:
        gb = facts.config.uva.cpu_offload_gb
        return f"nothing would be offloaded: cpu_offload_gb ({gb:g}) is less than one byte, use a larger one"
    if facts.kept_names:
        return f"nothing would be offloaded: {_kept(facts)}; select other parameters"
    return "nothing would be offloaded: every selected parameter has zero elements, select other parameters"


def _unmatched(text: str, facts: Facts) -> str:
    near = nearest(text, facts.names_below_layers)
    remedy = f"nearest: {quoted(near)}" if near else f"names are such as {quoted(sorted(facts.names_below_layers), 3)}"
    return f"selector {shortened(text)} matches no parameter of a decoder layer ({remedy})"


def _about_selectors(facts: Facts) -> Iterator[str]:
    for text in facts.unmatched:
        yield _unmatched(text, facts)
    for text in facts.config.selectors:
        if facts.offloaded_layers and text in facts.matched and text not in facts.effective:
            yield f"selector {shortened(text)} takes nothing: {_why_idle(facts)}"


def _why_idle(facts: Facts) -> str:
    if facts.config.resolved_backend == "prefetch":
        layers = ranges(facts.offloaded_layers)
        return f"what it matches is not in the offloaded layers ({layers}), change the group or the selector"
    return "the budget is spent before its first match, raise cpu_offload_gb or drop the other selectors"


def _kept(facts: Facts) -> str:
    return f"{quoted(facts.kept_names, 3)} stay on the device, since their storage is shared with what needs it there"


def _about_kept(facts: Facts) -> Iterator[str]:
    if facts.kept_names:
        yield _kept(facts)


def _about_the_ring(facts: Facts) -> Iterator[str]:
    count, step = len(facts.offloaded_layers), facts.config.prefetch.offload_prefetch_step
    if facts.config.resolved_backend != "prefetch" or not count:
        return
    if step >= count:
        remedy = f"use a step below {count}" if count > 1 else "offload more layers (a smaller group), or none"
        yield (
            f"offload_prefetch_step ({step}) is not below the number of offloaded layers ({count}), so that the slots "
            f"hold them all and no device memory is freed: {remedy}"
        )
    if facts.stalling_layers:
        better = least_step_without_stalls(facts.offloaded_layers, facts.all_layers, step)
        remedy = f"use offload_prefetch_step {better}" if better else "offload fewer layers of each group"
        yield (
            f"layers {ranges(facts.stalling_layers)} always wait for their copy, since no other layer runs between "
            f"them and their slot's previous owner: {remedy}"
        )


def _group_refusal(facts: Facts) -> str | None:
    prefetch = facts.config.prefetch
    group, first = prefetch.offload_group_size, prefetch.offload_group_size - prefetch.offload_num_in_group
    if any(layer % group >= first for layer in facts.all_layers):
        if facts.config.selectors and not facts.kept_names:
            return (
                f"nothing would be offloaded: selectors {quoted(sorted(facts.matched))} match only outside the layers "
                "that offload_group_size and offload_num_in_group choose, change the group or the selectors"
            )
        return None
    return (
        f"nothing would be offloaded: with offload_group_size ({group}) and offload_num_in_group "
        f"({prefetch.offload_num_in_group}) the first offloaded layer is {first}, and the model has "
        f"{len(facts.all_layers)} layers, use an offload_group_size of at most {len(facts.all_layers)}"
    )
