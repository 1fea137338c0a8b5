"""Are they the same tokens? What a configuration answers is compared with what the model answers without offload.

On a CPU, on a virtual device and under prefetch the answers must be equal, bit for bit. Under uva on CUDA our kernel
replaces cuBLAS, and a sum taken in another order may choose another token where two are equally likely. A differing
token is allowed there only if the two best logits are closer than our kernel's error, which is at most twice torch's.
Torch's own error is measured, not assumed: the run without offload computes the same logits in two ways (one pass over
the whole text, and step by step), and the largest difference between them is what torch's kernels make of rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from offload.engine import Engine
from offload.kv_cache import DecodeTogether, KVCache, Prefill, kv_bytes

Answers = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Yardstick:
    """How close two tokens may be to be mistaken for each other.

    Attributes:
        gaps: per sequence and new token, the best logit minus the second best, without offload.
        torch_error: largest difference between the logits of torch's two ways to compute them.
    """

    gaps: Sequence[Sequence[float]]
    torch_error: float

    def allows(self, sequence: int, position: int) -> bool:
        """True if a differing token at this place is within twice torch's error."""
        return self.gaps[sequence][position] < 2 * self.torch_error


@dataclass
class Agreement:
    """What a comparison found.

    Attributes:
        compared: tokens up to and with the first difference of each sequence; what follows one has another past.
        ties: differences that the yardstick allows.
        wrong: differences that nothing allows, as "sequence 0, token 7: 15 instead of 3".
    """

    compared: int = 0
    ties: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Agreement) -> None:
        """Count another comparison too."""
        self.compared += other.compared
        self.ties += other.ties
        self.wrong += other.wrong

    def __str__(self) -> str:
        if self.wrong:
            return f"WRONG: {self.wrong[0]}"
        return f"{self.compared} equal" if not self.ties else f"{self.compared - self.ties} equal, {self.ties} ties"


def compare(answers: Answers, reference: Answers, yardstick: Yardstick | None = None) -> Agreement:
    """Compare the new tokens of each sequence with the reference's.

    Args:
        answers, reference: per sequence, its new tokens; of equal lengths.
        yardstick: what may differ; None if nothing may.
    """
    found = Agreement()
    for sequence, (mine, theirs) in enumerate(zip(answers, reference, strict=True)):
        for position, (token, expected) in enumerate(zip(mine, theirs, strict=True)):
            found.compared += 1
            if token == expected:
                continue
            if yardstick is not None and yardstick.allows(sequence, position):
                found.ties += 1
            else:
                found.wrong.append(f"sequence {sequence}, token {position}: {token} instead of {expected}")
            break
    return found


def measure_yardstick(engine: Engine, prompts: Answers, answers: Answers) -> Yardstick:
    """Compute the logits of every new token in torch's two ways, along the answers that were given.

    Args:
        engine: without offload, or what stands in for that.
        prompts: of equal lengths.
        answers: what it answered, of equal lengths.
    """
    gaps, errors = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        whole, stepwise = _logits_at_once(engine, prompt, answer), _logits_by_step(engine, prompt, answer)
        best = whole.topk(2, dim=-1).values
        gaps.append((best[:, 0] - best[:, 1]).tolist())
        errors.append((whole - stepwise).abs().max().item())
    return Yardstick(gaps, max(errors))


def _logits_at_once(engine: Engine, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """(len(answer), V) float32 on the CPU, from one pass over the prompt and all of the answer but its last token."""
    text = [*prompt, *answer[:-1]]
    with engine.parts.device.active(), torch.inference_mode():
        hidden = _forward(engine, _cache(engine, len(text)), Prefill(), text, 0)
        return engine.parts.model.logits(hidden[0, len(prompt) - 1 :]).float().cpu()


def _logits_by_step(engine: Engine, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """The same from a pass over the prompt and one step per token of the answer."""
    with engine.parts.device.active(), torch.inference_mode():
        cache = _cache(engine, len(prompt) + len(answer))
        rows = [_forward(engine, cache, Prefill(), prompt, 0)[:, -1]]
        for index, token in enumerate(answer[:-1]):
            place = len(prompt) + index
            rows.append(_forward(engine, cache, DecodeTogether(place), [token], place)[:, -1])
        return torch.cat([engine.parts.model.logits(row) for row in rows]).float().cpu()


def _cache(engine: Engine, context: int) -> KVCache:
    parts = engine.parts
    shape = parts.model.cache_shape
    memory = parts.device.allocate_device(kv_bytes(shape, 1, context, parts.dtype))
    return KVCache(memory, shape, 1, context, parts.dtype)


def _forward(engine: Engine, cache: KVCache, step: object, tokens: Sequence[int], first: int) -> torch.Tensor:
    """tokens of one sequence, the first of them at position `first` -> hidden states (1, T, H)."""
    cache.step = step
    device = engine.parts.device
    positions = device.from_host([list(range(first, first + len(tokens)))])
    return engine.parts.model(device.from_host([list(tokens)]), positions, cache)
