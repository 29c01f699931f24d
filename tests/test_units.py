"""Sizes, read and printed."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memlint.errors import MemlintError
from memlint.units import SizeError, format_bytes, parse_bytes

BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
DECIMAL = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
sizes = st.integers(0, 2**50)


# -- read --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (2**60, 2**60),
        ("0", 0),
        ("0 B", 0),
        ("1.5 GiB", 1_610_612_736),
        ("512MB", 512_000_000),
        ("512Mb", 512_000_000),
        ("64k", 64_000),
        ("64Ki", 65_536),
        ("64KiB", 65_536),
        ("64 kib", 65_536),
        (" 20 gib ", 21_474_836_480),
        ("1_000", 1000),
        ("1_000_000 KiB", 1_024_000_000),
        ("1 byte", 1),
        ("3 bytes", 3),
        (".5KiB", 512),
        ("1.0", 1),
        ("2 TiB", 2_199_023_255_552),
        ("80 GB", 80_000_000_000),
    ],
)
def test_a_size_is_read(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "twelve", "1.5", "0.5 B", "-1", "- 1 KiB", "+1", "1 parsec", "1 PiB", "GiB", "B", "iB", "1 i", "1iB",
        "1.", "1..5", "1.5.5 KiB", "1,5 GiB", "1 000", "1__000", "_1", "1_", "0x10", "1e9", "nan", "inf", "1 KiB 2",
        -3, True, False, None, 2.5, b"1 KiB", [1], {},
    ],
)  # fmt: skip
def test_what_is_no_size_says_so(text: object) -> None:
    with pytest.raises(SizeError, match="is no size: ") as caught:
        parse_bytes(text)  # type: ignore[arg-type]
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_error_is_one_that_memlint_prints_as_a_line() -> None:
    assert issubclass(SizeError, MemlintError)


@given(sizes)
def test_a_number_is_itself(size: int) -> None:
    assert parse_bytes(size) == parse_bytes(str(size)) == parse_bytes(f"{size} B") == parse_bytes(f"{size:_}") == size


@given(st.integers(0, 10**6), st.sampled_from(sorted(BINARY)), st.sampled_from(["", " "]), st.booleans())
def test_a_binary_unit_is_exact(number: int, unit: str, space: str, small: bool) -> None:
    text = f"{number}{space}{unit.lower() if small else unit}"
    assert parse_bytes(text) == number * BINARY[unit]


@given(st.integers(0, 10**6), st.sampled_from(sorted(DECIMAL)), st.sampled_from(["", "B", "b", "bytes"]))
def test_a_decimal_unit_is_exact(number: int, prefix: str, unit: str) -> None:
    assert parse_bytes(f"{number} {prefix}{unit}") == number * DECIMAL[prefix]


@given(st.decimals(0, 10**6, places=3, allow_nan=False), st.sampled_from(["KiB", "MiB", "GiB"]))
def test_a_part_of_a_unit_is_rounded_to_a_byte(number: object, unit: str) -> None:
    assert abs(parse_bytes(f"{number} {unit}") - float(str(number)) * BINARY[unit]) <= 0.5 + 2**-10


@given(st.text(alphabet="0123456789._ kKmMgGtTiIbByes-+e", max_size=12))
@example("9" * 400)
def test_any_text_is_a_size_or_an_error_of_memlint(text: str) -> None:
    try:
        size = parse_bytes(text)
    except SizeError:
        return
    assert isinstance(size, int)
    assert size >= 0


@pytest.mark.parametrize("text", ["9" * 400 + ".5 KiB", "9" * 5000])
def test_a_number_out_of_this_world_is_no_size_either(text: str) -> None:
    with pytest.raises(SizeError):
        parse_bytes(text)


# -- printed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (9.5, "9.50 B"),
        (999, "999 B"),
        (1023, "1023 B"),
        (1023.6, "1.00 KiB"),
        (1024, "1.00 KiB"),
        (10_235, "10.0 KiB"),
        (102_350, "100 KiB"),
        (1_048_575, "1.00 MiB"),
        (12_345_678, "11.8 MiB"),
        (1_610_612_736, "1.50 GiB"),
        (2**40, "1.00 TiB"),
        (5 * 2**50, "5120 TiB"),
        (-4096, "-4.00 KiB"),
    ],
)
def test_a_size_is_printed(size: float, text: str) -> None:
    assert format_bytes(size) == text


def test_a_sign_is_shown_where_asked_for() -> None:
    assert format_bytes(4096, signed=True) == "+4.00 KiB"
    assert format_bytes(-4096, signed=True) == "-4.00 KiB"


@given(sizes)
def test_what_is_printed_reads_as_nearly_the_same(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.0051)


@given(sizes)
def test_what_was_printed_once_prints_the_same_again(size: int) -> None:
    assert format_bytes(parse_bytes(format_bytes(size))) == format_bytes(size)


@given(sizes, sizes)
def test_a_larger_size_never_prints_as_a_smaller_one(one: int, other: int) -> None:
    small, large = sorted([one, other])
    assert parse_bytes(format_bytes(small)) <= parse_bytes(format_bytes(large))


@given(st.integers(1, 2**50))
def test_a_negative_size_prints_as_the_positive_one_with_a_sign(size: int) -> None:
    assert format_bytes(-size) == f"-{format_bytes(size)}"


@given(st.floats(0, 2.0**49, allow_nan=False))
def test_at_most_four_digits_are_shown(size: float) -> None:
    number, _, unit = format_bytes(size).partition(" ")
    assert unit in BINARY
    assert len(number.replace(".", "")) in range(1, 5)
