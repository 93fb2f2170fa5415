"""Which groups of a maintained aggregate an answer can need: told from the groups, before Spark sees any of them.

A narrowing keeps every group that matters, and perhaps some that do not: whoever asked for it still asks itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.query.expr import Expr


@dataclass(frozen=True, slots=True)
class Narrowing:
    """What holds for every group that an answer needs."""

    having: tuple[Expr, ...] = ()
    """Over the columns of merged rows."""
    among: tuple[Among, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.having or self.among)


@dataclass(frozen=True, slots=True)
class Among:
    """A column of the group has a value that a column of another source's groups has."""

    column: str
    other: str
    """The other source's name."""
    others: str
    """Its column, as well of the group."""
    narrowing: Narrowing
    """Of its groups, only these."""


EVERY = Narrowing()
"""All groups may matter."""
