"""Which types can travel."""

from __future__ import annotations

import pytest

from plait.errors import QueryError
from plait.sql.join.column_types import refuse_type


@pytest.mark.parametrize("kind", ["int", "decimal(10,2)", "map<string,array<date>>", "struct<time:int,void:bigint>"])
def test_types_that_arrow_holds_pass(kind: str) -> None:
    refuse_type(kind, "c")


@pytest.mark.parametrize(
    "kind", ["void", "variant", "interval", "interval day to second", "array<variant>", "struct<a:void>"]
)
def test_types_that_arrow_cannot_hold_are_refused(kind: str) -> None:
    with pytest.raises(QueryError, match="TYPE"):
        refuse_type(kind, "c")
