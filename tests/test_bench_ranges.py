"""Lists and ranges of the command line."""

from argparse import ArgumentTypeError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.ranges import parse_floats, parse_ints


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("512", [512]),
        ("1,4, 8", [1, 4, 8]),
        ("4-8+2", [4, 6, 8]),
        ("4-9+2", [4, 6, 8]),
        ("1-3", [1, 2, 3]),
        ("3-3", [3]),
    ],
    ids=["one", "list", "range", "last-not-reached", "by-one", "single"],
)
def test_ints(text, values):
    assert parse_ints(text) == values


@pytest.mark.parametrize(
    ("text", "values"),
    [("0", [0.0]), ("0.5,1e-1,.25", [0.5, 0.1, 0.25]), ("0-2+0.5", [0, 0.5, 1, 1.5, 2]), ("-1", [-1.0])],
    ids=["one", "list", "range", "negative-is-for-the-config-to-refuse"],
)
def test_floats(text, values):
    assert parse_floats(text) == values


def test_a_fractional_range_ends_exactly_on_its_last_value():
    assert parse_floats("0-1+0.1") == [round(0.1 * k, 1) for k in range(11)]
    assert parse_floats("0.1-0.5+0.1") == [0.1, 0.2, 0.3, 0.4, 0.5]


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9))
def test_a_range_is_pythons_range_with_its_end(first, length, step):
    assert parse_ints(f"{first}-{first + length}+{step}") == list(range(first, first + length + 1, step))


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (parse_ints, "", "is not a number"),
        (parse_ints, "1,,2", "is not a number"),
        (parse_ints, "a", "'a' is not a number or a range first-last+step"),
        (parse_ints, "8-4", "must count up"),
        (parse_ints, "4-8+0", "must count up"),
        (parse_ints, "1.5", "whole numbers"),
        (parse_ints, "1-1000000000", "more than 10000 values"),
        (parse_floats, "0-1", "needs a step"),
        (parse_floats, "nan", "is not a number"),
    ],
)
def test_what_is_not_a_list_is_refused_with_the_item(parse, text, words):
    with pytest.raises(ArgumentTypeError, match=words.replace("+", r"\+")):
        parse(text)
