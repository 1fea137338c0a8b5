"""Which configuration is best for a model, a GPU and an amount of device memory: a search, before one owns the GPU.

Every candidate is planned, which is arithmetic: what does not fit is dropped, and what fits is ranked by an estimate
of its decode step. The best by that estimate are then run on the virtual GPU without weights, and ranked by simulated
time. The estimate only decides what is simulated; nothing that it says is printed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offload.backend import specs_of, weights_of
from offload.config import OffloadConfig
from offload.engine import load
from offload.errors import ModelLoadError, NotEnoughMemoryError, OffloadConfigWarning
from offload.models import build
from offload.plan import ParameterSpec, Plan, plan
from offload.suggest import bus_bytes_per_token, routed_experts
from offload.text import GIB, gib
from offload.virtual import Profile, VirtualDevice
from offload.virtual.steps import StepReport

GROUPS = range(1, 11)
STEPS = range(1, 5)
DECODE_STEPS = 3
"""Steps that are simulated; the last is reported. In steady state they differ by the growth of the cache alone."""
PER_BACKEND = 3
"""At least so many candidates of each backend are simulated, so that the estimate does not decide between backends."""


@dataclass(frozen=True)
class Workload:
    """What the model is to run.

    Attributes:
        path: folder of the model, or a `config.json` alone.
        described: the text of its `config.json`.
        batch, context: sequences at a time, and tokens of each when it is timed, prompt included.
        dtype: of the weights; None for the model's own.
    """

    path: Path
    described: dict[str, Any]
    batch: int = 1
    context: int = 4096
    dtype: str | None = None


@dataclass(frozen=True)
class Prediction:
    """One configuration on the virtual GPU; all times are simulated.

    Attributes:
        config: ready to paste; None for no offload.
        backend: "none", "uva" or "prefetch".
        step_s, tokens_per_s: one decode step at the end of the context, and the whole batch's rate.
        bound_s, bound_by: the step's bound and the resource that sets it.
        stall_s: compute waited for copies in the step.
        prompt_s: the prompt's pass.
        device_bytes: weights, slots, staging and cache.
        peak_device_bytes: the same with activations, at the highest.
        offloaded_bytes, slot_bytes: of the plan.
    """

    config: dict[str, Any] | None
    backend: str
    step_s: float
    tokens_per_s: float
    bound_s: float
    bound_by: str
    stall_s: float
    prompt_s: float
    device_bytes: int
    peak_device_bytes: int
    offloaded_bytes: int
    slot_bytes: int


@dataclass(frozen=True)
class _Candidate:
    config: dict[str, Any] | None
    plan: Plan
    estimate_s: float


def search(workload: Workload, profile: Profile, limit: int = 12) -> list[Prediction]:
    """Find the fastest configurations that fit.

    Args:
        workload: the model and what it runs.
        profile: the hardware; its `memory_bytes` are what may be used.
        limit: how many candidates are simulated at most.

    Returns:
        Predictions, the fastest decode step first.

    Raises:
        ModelLoadError: nothing fits; the message says what the least needs.
    """
    plain = predict(workload, replace(profile, memory_bytes=1 << 60), None)
    if plain.peak_device_bytes <= profile.memory_bytes:
        chosen = [_Candidate(None, Plan(), 0.0)]
    else:
        chosen = _best(list(_candidates(workload, profile, plain)), limit)
    predictions = []
    for candidate in chosen:
        try:
            predictions.append(predict(workload, profile, candidate.config))
        except NotEnoughMemoryError:
            continue
    if not predictions:
        raise ModelLoadError(_nothing_fits(workload, profile, plain))
    return sorted(predictions, key=lambda prediction: prediction.step_s)


def predict(workload: Workload, profile: Profile, config: dict[str, Any] | None) -> Prediction:
    """Run a prompt and a few decode steps of one configuration on the virtual GPU, without weights.

    Raises:
        NotEnoughMemoryError: it does not fit.
    """
    device = VirtualDevice(profile, "meta")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadConfigWarning)
        engine = load(str(workload.path), config, device, workload.dtype, "meta")
    with engine:
        device.mark_step("load")
        decoding = engine.start([[0] * (workload.context - DECODE_STEPS)] * workload.batch, workload.context)
        prompt = device.step_report()
        for _ in range(DECODE_STEPS):
            engine.decode_step(decoding)
        memory = engine.report()
        made = engine.parts.plan
    step: StepReport = device.step_report()
    return Prediction(
        config=config,
        backend=made.backend or "none",
        step_s=step.step_s,
        tokens_per_s=workload.batch / step.step_s,
        bound_s=float(step.bound.bound_s),
        bound_by=step.bound.resource,
        stall_s=step.stall_s,
        prompt_s=prompt.step_s,
        device_bytes=memory.device_bytes,
        peak_device_bytes=device.account.peak_device_bytes,
        offloaded_bytes=memory.offloaded_bytes,
        slot_bytes=memory.slot_bytes,
    )


def _candidates(workload: Workload, profile: Profile, plain: Prediction) -> Iterator[_Candidate]:
    """Every configuration that frees enough, each kind of plan once."""
    model = build(workload.described, workload.dtype)
    specs = specs_of(weights_of(model, model.layers))
    needed_bytes = plain.peak_device_bytes - profile.memory_bytes
    experts = _routed(workload)
    seen = set()
    for config in _configurations(needed_bytes, experts is not None):
        made = plan(specs, OffloadConfig.of(config))
        key = (made.backend, made.offloaded, made.slot_sizes_bytes)
        if made.freed_bytes < needed_bytes or made.refusal or made.unmatched_selectors or key in seen:
            continue
        seen.add(key)
        yield _Candidate(config, made, _estimate_s(made, specs, experts, profile, plain.step_s))


def _configurations(needed_bytes: int, has_experts: bool) -> Iterator[dict[str, Any]]:
    selectors = ["experts"] if has_experts else ["mlp"]
    budget = math.ceil(needed_bytes / GIB * 100) / 100
    yield {"uva": {"cpu_offload_gb": budget}}
    yield {"uva": {"cpu_offload_gb": budget, "cpu_offload_params": selectors}}
    for group in GROUPS:
        for count in range(1, group + 1):
            for step in STEPS:
                prefetch = {
                    "offload_group_size": group,
                    "offload_num_in_group": count,
                    "offload_prefetch_step": step,
                }
                yield {"prefetch": prefetch}
                yield {"prefetch": {**prefetch, "offload_params": selectors}}


def _routed(workload: Workload) -> tuple[int, int] | None:
    """(experts that a step reads on average, experts); None for a dense model."""
    experts = routed_experts(workload.described)
    if experts is None:
        return None
    used, count = experts
    return max(1, round(count * (1 - (1 - used / count) ** workload.batch))), count


def _estimate_s(
    made: Plan, specs: Sequence[ParameterSpec], experts: tuple[int, int] | None, profile: Profile, compute_s: float
) -> float:
    """Decode step of a plan, roughly.

    Args:
        compute_s: the step without offload.
    """
    bus_bytes = bus_bytes_per_token(made, specs, experts)
    if made.backend == "uva":
        # One stream: what crosses the bus is not read from device memory, and nothing overlaps.
        return compute_s + bus_bytes / profile.sm_bytes_per_s - bus_bytes / profile.hbm_bytes_per_s
    layers = len({spec.layer for spec in specs if spec.layer is not None})
    exposed_s = compute_s * len(made.stalling_layers) / layers
    return max(compute_s, bus_bytes / profile.ce_bytes_per_s) + exposed_s


def _best(candidates: list[_Candidate], limit: int) -> list[_Candidate]:
    """The best by estimate, but some of each backend."""
    # Among equal estimates, the one that leaves more on the device.
    ordered = sorted(candidates, key=lambda candidate: (candidate.estimate_s, candidate.plan.slot_bytes))
    kept: list[_Candidate] = []
    for backend in ("uva", "prefetch"):
        kept += [candidate for candidate in ordered if candidate.plan.backend == backend][:PER_BACKEND]
    kept += [candidate for candidate in ordered if candidate not in kept][: max(limit - len(kept), 0)]
    return kept


def _nothing_fits(workload: Workload, profile: Profile, plain: Prediction) -> str:
    everything = {"uva": {"cpu_offload_gb": 2**20}}
    try:
        least_bytes = predict(workload, replace(profile, memory_bytes=1 << 60), everything).peak_device_bytes
    except NotEnoughMemoryError as error:
        return f"no configuration fits: {error}"
    return (
        f"no configuration fits in {gib(profile.memory_bytes)}: with every layer offloaded {gib(least_bytes)} are "
        f"needed, without offload {gib(plain.peak_device_bytes)}; use a smaller batch or context"
    )
