"""Scala's collections, as Python can walk them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def items(sequence: Any) -> Iterator[Any]:
    """The elements of a Scala sequence."""
    return (sequence.apply(i) for i in range(sequence.size()))
