"""Are they the same tokens? What a configuration answers is compared with what the model answers without offload.

On a CPU, on a virtual device and under prefetch the answers must be equal, bit for bit. Under uva on CUDA our kernel
replaces cuBLAS, and a sum taken in another order may choose another token where two are equally likely. A differing
token is allowed there only if the two best logits are closer than our kernel's error, which is at most twice torch's.
Torch's own error is measured, not assumed: the run without offload computes the same logits in two ways (one pass over
the whole text, or a decode step for its last token), and the largest difference is what rounding does to torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from offload.engine import Engine

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
        engine: without offload, or what stands in for that; its running batch ends.
        prompts: of each sequence.
        answers: what it answered.
    """
    gaps, errors = [], [0.0]
    for prompt, answer in zip(prompts, answers, strict=True):
        at_once = [_logits_at_once(engine, [*prompt, *answer[:place]]) for place in range(len(answer))]
        best = [logits.topk(2).values for logits in at_once]
        gaps.append([(first - second).item() for first, second in best])
        for place, logits in enumerate(at_once[1:]):
            by_step = _logits_by_step(engine, [*prompt, *answer[:place]], answer[place])
            if by_step is not None:
                errors.append((logits - by_step).abs().max().item())
    return Yardstick(gaps, max(errors))


def _logits_at_once(engine: Engine, text: Sequence[int]) -> torch.Tensor:
    """Logits (V,) after a text, float32 on the CPU, from one pass over all of it."""
    with _watched(engine) as seen:
        engine.start([text], len(text))
    return seen[-1]


def _logits_by_step(engine: Engine, text: Sequence[int], token: int) -> torch.Tensor | None:
    """The same after `text` and `token`, from a pass over the text and a decode step for the token.

    Returns:
        None if the pass chooses another token than this one, so that the step would continue another text.
    """
    with _watched(engine) as seen:
        decoding = engine.start([text], len(text) + 1)
        if decoding.last != [token]:
            return None
        # The first step is eager, also where later ones are replayed from a graph, so that it is seen.
        engine.decode_step(decoding)
    return seen[-1]


@contextmanager
def _watched(engine: Engine) -> Iterator[list[torch.Tensor]]:
    """Every logits (V,) of a single sequence that the output head gives meanwhile."""
    seen: list[torch.Tensor] = []
    head = engine.parts.model.lm_head
    handle = head.register_forward_hook(lambda _module, _inputs, logits: seen.append(logits[-1].float().cpu()))
    try:
        yield seen
    finally:
        handle.remove()
