"""How values are written in messages."""

import pytest

from offload.text import gib, quoted, ranges, shortened


@pytest.mark.parametrize(
    ("indices", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([0, 2, 3], "0, 2-3"), ((7, 15), "7, 15")]
)
def test_ranges(indices, text):
    assert ranges(indices) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0.000 GiB"), (2**30, "1.000 GiB"), (3 * 2**29, "1.500 GiB"), (16384, "1.53e-05 GiB"), (2**23, "0.00781 GiB")],
)
def test_gib(nbytes, text):
    assert gib(nbytes) == text


def test_values_are_cut_at_80_characters_on_one_line():
    assert shortened("a\nb") == '"a\\nb"'
    assert shortened(object()).startswith('"<object')
    assert len(shortened("x" * 78)) == 80 and len(shortened("x" * 79)) == 80


def test_many_names_are_counted():
    assert quoted("abc", 2) == '"a", "b" and 1 more' and quoted(iter("ab"), 2) == '"a", "b"'
