"""Which parameters a selector means: whole dotted segments, consecutive, anywhere in the name below the layer.

`experts` and `experts.w2_weight` match `mlp.experts.w2_weight`; `expert` and `mlp.w2_weight` do not. Case-sensitive,
no globs. This is vLLM's rule. One extension: a selector may begin with the layer's path (`model.layers.3.mlp`) or
with a tail of it of at least two segments (`layers.3`), and then goes on right below the layer.
"""

import difflib
import os.path
from collections.abc import Iterable, Sequence


class Selectors:
    """Selectors that are asked about many names; a name that occurs in every layer is looked at once.

    Args:
        texts: the selectors as written.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self._below_any_layer: dict[str, frozenset[str]] = {}

    def matching(self, rest: str, rooted: dict[str, str]) -> frozenset[str]:
        """The selectors that match one parameter.

        Args:
            rest: the parameter's name below its layer, `mlp.down_proj.weight`.
            rooted: what `rooted` returned for the layer's path.
        """
        found = self._below_any_layer.get(rest)
        if found is None:
            found = frozenset(text for text in self.texts if f".{text}." in f".{rest}.")
            self._below_any_layer[rest] = found
        if rooted:
            found |= {text for text, below in rooted.items() if f"{rest}.".startswith(below)}
        return found

    def rooted(self, path: str) -> dict[str, str]:
        """The selectors that begin with this layer's path or a tail of it, each with what follows, ending in a dot."""
        segments = path.split(".")
        tails = [path] + [".".join(segments[start:]) for start in range(1, len(segments) - 1)]
        return {
            text: f"{text}."[len(tail) + 1 :]
            for text in self.texts
            for tail in tails
            if f"{text}.".startswith(f"{tail}.")
        }


def matches(selector: str, path: str, rest: str) -> bool:
    """Whether one selector matches the parameter `path.rest`; see the module's text for the rule."""
    selectors = Selectors([selector])
    return bool(selectors.matching(rest, selectors.rooted(path)))


def layer_path(names: Sequence[str], layer: int) -> str:
    """Find the path of a decoder layer from the full names of its parameters.

    Args:
        names: full names, such as `model.layers.3.mlp.down_proj.weight`.
        layer: the layer's index.

    Returns:
        The names' common leading segments up to the first that is the index; where none is (a rank that holds the
        middle layers of a model numbers them from 0), up to the last number; empty where there is no number at all.
    """
    common = os.path.commonprefix([min(names) + ".", max(names) + "."]).rpartition(".")[0].split(".")
    if str(layer) in common:
        return ".".join(common[: common.index(str(layer)) + 1])
    numbers = [place for place, segment in enumerate(common) if segment.isdecimal()]
    return ".".join(common[: numbers[-1] + 1]) if numbers else ""


def nearest(selector: str, rests: Iterable[str]) -> list[str]:
    """The parts of names that look most like a selector which matched nothing; at most three, best first."""
    parts = set()
    for rest in rests:
        segments = rest.split(".")
        ends = range(1, len(segments) + 1)
        parts.update(".".join(segments[start:end]) for end in ends for start in range(end))
    lowered = {part.lower(): part for part in sorted(parts)}
    return [lowered[part] for part in difflib.get_close_matches(selector.lower(), lowered, n=3, cutoff=0.6)]
