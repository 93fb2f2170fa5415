"""What a query may cost.  Over it the query is parked, and the others go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.errors import QueryError


@dataclass(frozen=True)
class Budget:
    """None is without limit."""

    rows: int | None = None
    """Joined rows of an epoch, of all its joins together."""
    state_bytes: int | None = None
    """Its share of the stores that its joins use: a store that n queries use counts one n-th for each of them."""

    def __post_init__(self) -> None:
        for name, value in (("max_rows_per_epoch", self.rows), ("max_state", self.state_bytes)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise QueryError("BUDGET", f"{name}={value!r} is no limit", "give a number above zero, or none")

    @staticmethod
    def from_json(value: Mapping[str, Any] | None) -> Budget:
        """The inverse of `dataclasses.asdict`; catalogs of earlier releases had none."""
        return Budget() if value is None else Budget(**value)

    def exceeded(self, rows: int, state_bytes: float) -> QueryError | None:
        """Why a query with this many rows in an epoch, and this share of the state, is over it; None if it is not."""
        if self.rows is not None and rows > self.rows:
            return QueryError(
                "TOO_MANY_ROWS",
                f"it gave {rows:,} rows in one epoch, more than max_rows_per_epoch={self.rows:,}",
                "raise the limit and resume it",
            )
        if self.state_bytes is not None and state_bytes > self.state_bytes:
            return QueryError(
                "TOO_MUCH_STATE",
                f"its share of the state is {state_bytes:,.0f} bytes, more than max_state={self.state_bytes:,}",
                "raise the limit and resume it; or drop it, which frees what it alone needs",
            )
        return None
