"""Fill the tables of README.md from bench/results: a number there is never typed.

A block `<!-- KIND FILE... -->` to `<!-- end -->` is written anew from the result documents it names: `throughput` is
the table of a sweep, `figures` what was measured against what was to be reached. `--check` only says whether README.md
is up to date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import arguments
from bench.machine import GIB, REPOSITORY, describe
from bench.rows import NOT_LOADED, digits, short_config, tokens_per_row
from offload.virtual.profiles import load_profile

README = REPOSITORY / "README.md"
RESULTS = REPOSITORY / "bench" / "results"
_BLOCK = re.compile(r"(<!-- (?P<kind>\w+) (?P<files>[\w./ -]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
_WHERE_TO = re.compile(r" --(save|plot) \S+")

Document = Mapping[str, Any]


def filled(text: str, folder: Path = RESULTS) -> str:
    """The text of README.md with every block written from the documents in `folder`.

    Raises:
        ValueError: a block of an unknown kind, or a file that is not there.
    """

    def block(found: re.Match[str]) -> str:
        if found["kind"] not in KINDS:
            raise ValueError(f"README block {found['kind']!r} is unknown: known are {', '.join(KINDS)}")
        documents = {name: read(folder / name) for name in found["files"].split()}
        return f"{found[1]}{KINDS[found['kind']](documents)}\n{found[4]}"

    return _BLOCK.sub(block, text)


def read(path: Path) -> Document:
    """A result document.

    Raises:
        ValueError: there is none.
    """
    if not path.is_file():
        raise ValueError(f"README.md names bench/results/{path.name}, which is not there: run its command with --save")
    return json.loads(path.read_text(encoding="utf-8"))


def throughput(documents: Mapping[str, Document]) -> str:
    """One row per configuration of a sweep, its tests side by side; below it where the numbers come from."""
    ((name, document),) = documents.items()
    rows = document["rows"]
    tests = list(dict.fromkeys(row["test"] for row in rows if row["test"] != NOT_LOADED))
    has_bound = any(row["bound_s"] for row in rows)
    heads = ["configuration", "offloaded GiB", "device GiB", *(f"{test} tok/s" for test in tests)]
    lines = [_line([*heads, *(f"{test} of bound" for test in tests if has_bound)])]
    lines.append("|---|" + "--:|" * (len(heads) - 1 + len(tests) * has_bound))
    for (config, note), alike in _by_configuration(rows).items():
        by_test = {row["test"]: row for row in alike}
        on_device = [row["device_bytes"] for row in alike if row["device_bytes"] is not None]
        cells = [config, _gib(alike[0]["offloaded_bytes"]), _gib(max(on_device, default=None))]
        cells += [note if note and test == tests[0] else _speed(by_test.get(test)) for test in tests]
        cells += [_share(by_test.get(test)) for test in tests if has_bound]
        lines.append(_line(cells))
    return "\n".join([*lines, "", _origin(name, document)])


def _by_configuration(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        note = row["note"] if row["test"] == NOT_LOADED else ""
        found.setdefault((short_config(row["config"]), note), []).append(row)
    return found


def _speed(row: Mapping[str, Any] | None) -> str:
    if row is None or row["step_s"] is None:
        return "-"
    return digits(tokens_per_row(row["test"], row["batch"]) / row["step_s"])


def _share(row: Mapping[str, Any] | None) -> str:
    return f"{row['share_of_bound']:.0%}" if row and row["share_of_bound"] else "-"


def _gib(nbytes: int | None) -> str:
    return "-" if nbytes is None else digits(nbytes / GIB)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _origin(name: str, document: Document) -> str:
    kind = document.get("title", "").partition(", ")[2] or "measured"
    versions = ", ".join(f"{package} {document['versions'][package]}" for package in ("torch", "python"))
    where = f"{describe(document['machine'])}; {versions}; commit {document['commit']}"
    command = _WHERE_TO.sub("", document["command"])
    if "simulated" in kind:
        return f"*{kind.capitalize()}*, not measured: `{command}` ([result](bench/results/{name}))."
    return f"{kind[0].upper()}{kind[1:]}: `{command}` on {where} ([result](bench/results/{name}))."


def figures(documents: Mapping[str, Document]) -> str:
    """What was measured, what was to be reached, and whether it was."""
    lines = ["| figure | measured | target | |", "|---|--:|--:|---|"]
    for name, document in documents.items():
        for what, value, limit, unit, is_ceiling in FIGURES[document["command"].split()[3]](document):
            is_reached = value <= limit if is_ceiling else value >= limit
            words = f"{'at most' if is_ceiling else 'at least'} {limit:.3g}{unit}"
            verdict = "reached" if is_reached else "**missed**"
            lines.append(_line([what, f"{value:.3g}{unit}", words, f"{verdict}, [{name}](bench/results/{name})"]))
    return "\n".join(lines)


Figure = tuple[str, float, float, str, bool]


def _of_generate(document: Document) -> Sequence[Figure]:
    return [
        (target["name"], target["value"], target["limit"], target["unit"], target["is_ceiling"])
        for target in document["targets"]
    ]


def _of_load(document: Document) -> Sequence[Figure]:
    return [("load time over a plain clone of every tensor", document["ratio"], document["target_ratio"], "", True)]


def _of_hooks(document: Document) -> Sequence[Figure]:
    worst_s = max(row["hooks_s"] for row in document["rows"])
    return [("hooks, per offloaded layer and pass, dearest backend", worst_s * 1e6, 15.0, " us", True)]


def _of_step(document: Document) -> Sequence[Figure]:
    """Shares of the bound in decode, each backend's best."""
    decode = [row for row in document["rows"] if row["test"].startswith("tg") and row["share_of_bound"]]
    best = {
        backend: max(row["share_of_bound"] for row in decode if row["backend"] == backend)
        for backend in ("prefetch", "uva")
    }
    what = f"{decode[0]['model']} half offloaded, decode by {{}}, share of its bound, *simulated*"
    return [
        (what.format("prefetch"), best["prefetch"], 0.99, "", False),
        (what.format("uva"), best["uva"], 0.97, "", False),
    ]


def _of_moe(document: Document) -> Sequence[Figure]:
    """One sequence: bytes of the routed experts alone, and the speed that they leave of 16 times the other way's."""
    uva, prefetch = (
        next(row for row in document["rows"] if row["backend"] == backend and row["batch"] == 1)
        for backend in ("uva", "prefetch")
    )
    rates = load_profile(uva["device"].removeprefix("virtual:"))
    least = 0.9 * 16 * rates.sm_bytes_per_s / rates.ce_bytes_per_s
    share, ratio = uva["bus_bytes_per_step"] / uva["offloaded_bytes"], prefetch["step_s"] / uva["step_s"]
    return [
        (f"{uva['model']}, experts' bytes over the bus per token, of all, *simulated*", share, 8 / 128, "", True),
        (f"{uva['model']}, decode by uva over prefetch, *simulated*", ratio, least, "", False),
    ]


def _of_simulation(document: Document) -> Sequence[Figure]:
    return [(f"real time of: {row['name']}", row["median_s"], row["limit_s"], " s", True) for row in document["rows"]]


FIGURES: dict[str, Callable[[Document], Sequence[Figure]]] = {
    "generate": _of_generate,
    "load": _of_load,
    "hooks": _of_hooks,
    "step": _of_step,
    "moe": _of_moe,
    "simulation": _of_simulation,
}
KINDS: dict[str, Callable[[Mapping[str, Document]], str]] = {"throughput": throughput, "figures": figures}


def main(argv: Sequence[str]) -> int:
    """Run `python -m bench readme`; returns the exit code."""
    parser = arguments.parser("readme", __doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if README.md is out of date")
    args = parser.parse_args(argv)
    before = README.read_text(encoding="utf-8")
    after = filled(before)
    if args.check:
        if before != after:
            raise ValueError("README.md does not show what bench/results holds: run python -m bench readme")
        return 0
    README.write_text(after, encoding="utf-8")
    return 0
