"""Lengths of time as people write them."""

from __future__ import annotations

import pytest

from plait.query.durations import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7 days", 604_800),
        ("30 minutes", 1_800),
        ("1 hour 30 minutes", 5_400),
        ("1d", 86_400),
        ("12h", 43_200),
        ("30min", 1_800),
        ("1d12h", 129_600),
        ("3650000 weeks", 2_207_520_000_000),
        ("1.5 h", 5_400),
        ("INTERVAL '2' weeks", None),
        ("INTERVAL 2 weeks", 1_209_600),
        ("250 ms", 0.25),
        (" 1  Day , 2 HOURS ", 93_600),
    ],
)
def test_a_duration_is_read_in_microseconds(text: str, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(ValueError, match="is not a length of time"):
            parse_duration(text)
    else:
        assert parse_duration(text) == seconds * 1_000_000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "days",
        "5",
        "0 seconds",
        "-3 days",
        "1 month",
        "2 years",
        "1 fortnight",
        "1 day!",
        "0d",
        "-1d",
        "0.0000001 s",
    ],
)
def test_what_is_no_fixed_positive_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|no fixed length|unknown unit"):
        parse_duration(text)


def test_a_duration_that_would_leave_64_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than 73,000 years"):
        parse_duration("4000000 weeks")
