"""Sizes and durations as people write them: one number and one unit, or nothing is taken for anything."""

from __future__ import annotations

import re

import pytest

from pipeplan.errors import UsageError
from pipeplan.units import format_bytes, format_ns, parse_bytes, parse_ns


@pytest.mark.parametrize(
    ("text", "size"),
    [("3GB", 3 * 10**9), (" 1.5 MB ", 1_500_000), ("80GiB", 80 * 2**30), ("80G", 80 * 10**9), ("512B", 512), ("0", 0)],
)
def test_a_size(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "ns"),
    [("3.2ms", 3_200_000), ("10µs", 10_000), ("1e-3s", 10**6), ("1.5h", 5400 * 10**9), (".5 min", 30 * 10**9)],
)
def test_a_duration(text: str, ns: int) -> None:
    assert parse_ns(text) == ns


@pytest.mark.parametrize(
    "number", ["3,5{}", "3.5.2{}", "1/2{}", "3{};", "3{} x", "3{}\n4", "3,4", "3.", "+3", "1_000", "٣{}", "{}", ""]
)
def test_what_is_not_one_number_and_one_unit_is_refused(number: str) -> None:
    """``3,5GB`` was 3 bytes, and ``3,5ms`` 35 ms."""
    with pytest.raises(UsageError, match="is not a size; write a number and a unit"):
        parse_bytes(number.format("GB"))
    with pytest.raises(UsageError, match="is not a duration; write a number and a unit"):
        parse_ns(number.format("ms"))


@pytest.mark.parametrize(
    ("size", "duration"),
    [
        ("3", ("3 of what? 3GB, or 3 bytes as 3B", "3 of what? 3s, or 3 milliseconds as 3ms")),
        (" 2.5 ", ("2.5 of what? 2.5GB, or 2.5 bytes as 2.5B", "2.5 of what? 2.5s, or 2.5 milliseconds as 2.5ms")),
        ("40000", ("40000MB, or 40000 bytes as 40000B", "40000s, or 40000 milliseconds as 40000ms")),
        ("8000000", ("8000000kB, or 8000000 bytes as 8000000B", "8000000s, or")),
    ],
)
def test_a_bare_number_is_asked_for_its_unit_with_two_likely_readings(size: str, duration: tuple[str, str]) -> None:
    for parse, says in zip((parse_bytes, parse_ns), duration, strict=True):
        with pytest.raises(UsageError, match=re.escape(says)):
            parse(size)


@pytest.mark.parametrize("zero", ["0", "0.0", " 0 "])
def test_nothing_needs_no_unit(zero: str) -> None:
    assert parse_bytes(zero) == parse_ns(zero) == 0


def test_what_no_float_has_is_written_too() -> None:
    """Such as the time of a sum on devices of next to no speed, of which an error says that it is too long."""
    for text in (format_ns(10**400), format_bytes(10**400)):
        assert re.fullmatch(r"10{300,}(s|PB)", text)
    assert format_ns(10**304) == f"{10**295}s"
    assert (format_ns(1e12), format_bytes(10**25)) == ("1000s", "10000000000PB")
