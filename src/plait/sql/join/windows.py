"""Bounds on event time: comparisons of two streams' timestamps become windows.

In go expressions such as `a.ts >= shift(b.ts, -10 s)`; out comes one `Window` per pair of aliases with all its bounds
merged, in microseconds and inclusive.  Only event-time columns of streams with a watermark make a window: the
watermark is what lets state be dropped.  A time *range* over other timestamps would silently keep state for ever, so
it is refused with the remedy; a one-sided comparison stays an ordinary condition.  Pure Python; linear in the number
of conditions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from plait.errors import QueryError
from plait.query.expr import Call, ColumnRef, Expr, Literal
from plait.query.graph import Window
from plait.query.relation import Relation
from plait.query.types import TIMES

_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "="}
LOOSE_US = 86_400_000_000
"""A time zone's offset never jumps by more than a day: by so much are bounds in calendar days widened."""


@dataclass(frozen=True, slots=True)
class Bound:
    """`lower ≤ left − right ≤ upper`; `shifted` if an interval was added to either side."""

    left: ColumnRef
    right: ColumnRef
    lower_us: int | None
    upper_us: int | None
    shifted: bool

    def widened(self, micros: int) -> Bound:
        """The same bound, less strict."""
        lower = None if self.lower_us is None else self.lower_us - micros
        upper = None if self.upper_us is None else self.upper_us + micros
        return Bound(self.left, self.right, lower, upper, self.shifted)


def read_bound(expr: Expr, order: Sequence[str]) -> Bound | None:
    """The bound that a comparison states, its sides in alias order; None if it compares anything but two timestamps.

    >>> a, b = ColumnRef("a", "ts", "timestamp"), ColumnRef("b", "ts", "timestamp")
    >>> bound = read_bound(Call("<", (a, Call("shift", (b, Literal(5, "bigint")), "timestamp")), "boolean"), "ab")
    >>> bound.lower_us, bound.upper_us
    (None, 4)
    """
    if not isinstance(expr, Call) or expr.op not in _FLIPPED:
        return None
    one, other = (_time_and_shift(arg) for arg in expr.args)
    if one is None or other is None or one[0].alias == other[0].alias:
        return None
    op = expr.op
    if order.index(one[0].alias) > order.index(other[0].alias):
        one, other, op = other, one, _FLIPPED[op]
    # left + i op right + j  ⟺  left − right op j − i
    limit = (other[1] or 0) - (one[1] or 0)
    lower = {">": limit + 1, ">=": limit, "=": limit}.get(op)
    upper = {"<": limit - 1, "<=": limit, "=": limit}.get(op)
    return Bound(one[0], other[0], lower, upper, one[1] is not None or other[1] is not None)


def _time_and_shift(expr: Expr) -> tuple[ColumnRef, int | None] | None:
    if isinstance(expr, ColumnRef):
        return (expr, None) if expr.type in TIMES else None
    if isinstance(expr, Call) and expr.op == "shift":
        inner, by = _time_and_shift(expr.args[0]), expr.args[1]
        if inner is not None and isinstance(by, Literal) and isinstance(by.value, int):
            return inner[0], (inner[1] or 0) + by.value
    return None


def is_window(bound: Bound, streams: Mapping[str, Relation]) -> bool:
    """Whether both sides are event times of streams with a watermark; `streams` are the relations by alias."""
    return all(_is_event_time(ref, streams[ref.alias]) for ref in (bound.left, bound.right))


def _is_event_time(ref: ColumnRef, relation: Relation) -> bool:
    return relation.delay_ms is not None and relation.time_column == ref.column


def merge(bounds: Iterable[Bound]) -> tuple[Window, ...]:
    """One window per pair of columns, the tightest of all its bounds."""
    found: dict[tuple[ColumnRef, ColumnRef], tuple[int | None, int | None]] = {}
    for bound in bounds:
        lower, upper = found.get((bound.left, bound.right), (None, None))
        lower = max((b for b in (lower, bound.lower_us) if b is not None), default=None)
        upper = min((b for b in (upper, bound.upper_us) if b is not None), default=None)
        found[bound.left, bound.right] = lower, upper
    for (left, right), (lower, upper) in found.items():
        if lower is not None and upper is not None and lower > upper:
            raise QueryError(
                "EMPTY",
                f"{left} − {right} would have to be at least {lower / 1e6:g} s and at most {upper / 1e6:g} s",
                "correct the time bounds; as they are no row can match",
            )
    return tuple(Window(left, right, lower, upper) for (left, right), (lower, upper) in found.items())


def refuse_missing_watermarks(bounds: Iterable[Bound], streams: Mapping[str, Relation]) -> None:
    """Refuse a time range between two timestamps that lets no state be dropped because a watermark is missing.

    A stream with a TTL is let through: its state is bounded by other means.
    """
    ranges: dict[tuple[ColumnRef, ColumnRef], list[Bound]] = {}
    for bound in bounds:
        ranges.setdefault((bound.left, bound.right), []).append(bound)
    for (left, right), group in ranges.items():
        both = any(b.lower_us is not None for b in group) and any(b.upper_us is not None for b in group)
        if not both or not any(b.shifted for b in group) or "=" in (left.column[0], right.column[0]):
            continue
        bare = [r for r in (left, right) if streams[r.alias].time_column is None and streams[r.alias].ttl_us is None]
        if not bare and not any(_is_event_time(r, streams[r.alias]) for r in (left, right)):
            bare = [r for r in (left, right) if streams[r.alias].ttl_us is None]
        if bare:
            _refuse(left, right, bare, streams)


def _refuse(left: ColumnRef, right: ColumnRef, bare: list[ColumnRef], streams: Mapping[str, Relation]) -> None:
    names = dict.fromkeys(f"stream {streams[r.alias].name} has no watermark on {r.column}" for r in bare)
    raise QueryError(
        "WATERMARK_MISSING",
        f"the time range between {left} and {right} needs watermarks, but {' and '.join(names)}",
        f'register it with a watermark, for example df.withWatermark("{bare[0].column}", "10 minutes")',
    )
