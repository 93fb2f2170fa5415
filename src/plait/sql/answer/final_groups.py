"""Groups that end: an aggregate by windows of event time, or by event time itself.

Once the watermark is far enough past the end of a group's window, no row can come to it any more: the group is closed,
and its values are final.  That is what Spark's output mode `append` hands over.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from plait.query.relation import Relation
from plait.sql.catalyst.expressions import Node
from plait.sql.catalyst.handles import attribute_id
from plait.sql.catalyst.maintain import Maintained
from plait.sql.join.multiway import MultiwayJoin


@dataclass(frozen=True, slots=True)
class Closing:
    """Which key of an aggregate says until when a group has rows."""

    key: int
    field: str | None
    """Of a window, the field with its end; None: the key is the time itself."""
    alias: str
    """Whose event time it is."""


def _is_of_column(window: Node) -> bool:
    """Whether it is a window of the column itself: that of `ts - INTERVAL 1 HOUR` ends before its rows have come."""
    return all(node.args[0].column is not None for node in window.walk() if node.name == "UnixMicros")


def closing_of(
    kept: Maintained,
    join: MultiwayJoin,
    names: tuple[str, ...],
    relations: Mapping[str, Relation],
    windows: Container[int],
) -> Closing | None:
    """The key that closes groups; None if none does."""
    known = dict(zip(kept.input_ids, join.outputs, strict=False))
    for number, grouping in enumerate(kept.groupings):
        id = attribute_id(grouping)
        if id is None:
            continue
        node = known[id]
        if len(node.columns) != 1:
            continue
        (column,) = node.columns
        relation = relations[join.leaves[column.leaf].relation]
        if relation.delay_ms is None or relation.time_column != column.name:
            continue
        if node.column is not None and node.type == "timestamp":
            return Closing(number, None, names[column.leaf])
        if id in windows and _is_of_column(node):
            return Closing(number, "end", names[column.leaf])
    return None
