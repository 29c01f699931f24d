"""Sizes, read and printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlint.units import SizeError, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        ("0", 0),
        ("1.5 GiB", 1_610_612_736),
        ("512MB", 512_000_000),
        ("64k", 64_000),
        ("64KiB", 65_536),
        (" 20 gib ", 21_474_836_480),
        ("1_000", 1000),
        ("3 bytes", 3),
        (".5KiB", 512),
    ],
)
def test_a_size_is_read(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "twelve", "1.5", "-1", "1 parsec", "GiB", -3, True, None, 2.5, "1,5 GiB"])
def test_what_is_no_size_says_so(text: object) -> None:
    with pytest.raises(SizeError, match="no size"):
        parse_bytes(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1_610_612_736, "1.50 GiB"), (12_345_678, "11.8 MiB")],
)
def test_a_size_is_printed(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(0, 2**50))
def test_what_is_printed_reads_as_nearly_the_same(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.006)


def test_a_sign_is_shown_where_asked_for() -> None:
    assert format_bytes(4096, signed=True) == "+4.00 KiB"
