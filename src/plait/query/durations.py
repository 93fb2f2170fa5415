"""Lengths of time as people write them: `7 days`, `1 hour 30 minutes`, `10s`; strictly, in microseconds."""

from __future__ import annotations

import re
from decimal import Decimal

_SECOND = 1_000_000
_UNITS = {
    **dict.fromkeys(("us", "microsecond", "microseconds"), 1),
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 1_000),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), _SECOND),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60 * _SECOND),
    **dict.fromkeys(("h", "hour", "hours"), 3_600 * _SECOND),
    **dict.fromkeys(("d", "day", "days"), 86_400 * _SECOND),
    **dict.fromkeys(("w", "week", "weeks"), 7 * 86_400 * _SECOND),
}
LONGEST_US = 1 << 61
"""About 73,000 years: times in microseconds and their sums stay within 64 bits."""
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*,?")


def parse_duration(text: str) -> int:
    """Microseconds; a ValueError says what is wrong with the text.

    >>> parse_duration("1 hour 30 minutes") // 1_000_000
    5400
    """
    rest = text.strip().lower().removeprefix("interval").strip().strip("'")
    total = Decimal(0)
    position = 0
    while match := _PART.match(rest, position):
        if match[2].startswith(("month", "year", "quarter")):
            raise ValueError(f"{text!r} counts in {match[2]}, which have no fixed length")
        if match[2] not in _UNITS:
            raise ValueError(f"{text!r} has the unknown unit {match[2]!r}")
        total += Decimal(match[1]) * _UNITS[match[2]]
        position = match.end()
    if position == 0 or position != len(rest):
        raise ValueError(f"{text!r} is not a length of time")
    if total < 1:
        raise ValueError(f"{text!r} is not longer than zero")
    if total > LONGEST_US:
        raise ValueError(f"{text!r} is longer than 73,000 years")
    return int(total)


def duration_text(us: int) -> str:
    """A length of time as people write it; `parse_duration` reads it back if it is longer than zero.

    >>> duration_text(5_400_000_000), duration_text(1_500_000), duration_text(86_400_000_000), duration_text(0)
    ('1 hour 30 minutes', '1.5 seconds', '1 day', '0 seconds')
    """
    parts = []
    rest = abs(us)
    for unit in ("day", "hour", "minute"):
        number, rest = divmod(rest, _UNITS[unit])
        if number:
            parts.append(f"{number} {unit}{'' if number == 1 else 's'}")
    if rest or not parts:
        seconds = f"{Decimal(rest) / _SECOND:f}"
        parts.append(f"{seconds} second{'' if seconds == '1' else 's'}")
    return ("-" if us < 0 else "") + " ".join(parts)
