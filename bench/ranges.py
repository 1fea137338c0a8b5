"""Lists and ranges on a command line, in llama-bench's form: `1,4`, `0-8+2` (first-last+step), `1,8-32+8`.

A range contains its last value when a whole number of steps reaches it. Fractions are exact: `0-1+0.1` has eleven
values and the last is 1.0.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from decimal import Decimal

MAX_VALUES = 10_000

_NUMBER = r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+"
_ITEM = re.compile(rf"(?P<first>-?(?:{_NUMBER}))(?:-(?P<last>{_NUMBER})(?:\+(?P<step>{_NUMBER}))?)?")


def parse_ints(text: str) -> list[int]:
    """`"1,4-8+2"` -> [1, 4, 6, 8]; a range without a step counts by one.

    Raises:
        ArgumentTypeError: not such a list; the text says which item and what the form is.
    """
    return [int(value) for value in _expanded(text, whole=True)]


def parse_floats(text: str) -> list[float]:
    """`"0-1+0.25,4"` -> [0.0, 0.25, 0.5, 0.75, 1.0, 4.0]; a range needs its step.

    Raises:
        ArgumentTypeError: not such a list; the text says which item and what the form is.
    """
    return [float(value) for value in _expanded(text, whole=False)]


def _expanded(text: str, whole: bool) -> list[Decimal]:
    values: list[Decimal] = []
    for item in text.split(","):
        found = _ITEM.fullmatch(item.strip())
        if found is None:
            raise ArgumentTypeError(f"{item.strip()[:80]!r} is not a number or a range first-last+step")
        if found["last"] is not None and found["step"] is None and not whole:
            raise ArgumentTypeError(f"{item.strip()[:80]!r} needs a step: first-last+step")
        values += _range(item.strip(), Decimal(found["first"]), found["last"], found["step"])
        if len(values) > MAX_VALUES:
            raise ArgumentTypeError(f"{item.strip()[:80]!r} has more than {MAX_VALUES} values: use a larger step")
    if whole and any(value != int(value) for value in values):
        raise ArgumentTypeError(f"{text[:80]!r} must be whole numbers")
    return values


def _range(item: str, first: Decimal, last_text: str | None, step_text: str | None) -> list[Decimal]:
    if last_text is None:
        return [first]
    last, step = Decimal(last_text), Decimal(step_text or 1)
    if step <= 0 or last < first:
        raise ArgumentTypeError(f"{item[:80]!r} must count up: first <= last and step > 0")
    count = int((last - first) / step) + 1
    return [first + step * index for index in range(min(count, MAX_VALUES + 1))]
