"""Watermarks of queries, and what follows from them: how far back stores must reach."""

from __future__ import annotations

from collections.abc import Mapping

from plait.query.plan import Plan
from plait.query.store import horizon_us, watermark_ms
from plait.state.log.manifest import LiveState


def latest(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """By name the later of two times: times only move forward.

    >>> latest({"a": 3, "b": 1}, {"a": 2})
    {'a': 3, 'b': 1}
    """
    return {name: max(d[name] for d in (before, now) if name in d) for name in {**before, **now}}


def marks_before(live: LiveState) -> dict[str, int]:
    """What watermarks were made of before an epoch; format 3 had one watermark for all."""
    if not live.legacy:
        return live.marks_ms
    return {} if live.watermark_ms is None else dict.fromkeys(live.marks_ms, live.watermark_ms)


def horizons_us(plan: Plan, marks_ms: Mapping[str, int], policy: str) -> dict[str, int]:
    """By store the event time up to which rows cannot be reached; stores of which all rows can are left out."""
    found = {store.id: horizon_us(store.reach, marks_ms, policy) for store in plan.stores}
    return {store: horizon for store, horizon in found.items() if horizon is not None}


def watermarks_ms(plan: Plan, marks_ms: Mapping[str, int], policy: str) -> dict[str, int | None]:
    """By query its watermark."""
    return {q.name: watermark_ms(q.marks, marks_ms, policy) for q in plan.queries}


def least_watermark_ms(plan: Plan, marks_ms: Mapping[str, int], policy: str) -> int | None:
    """The least watermark of all queries that have one."""
    known = [at for at in watermarks_ms(plan, marks_ms, policy).values() if at is not None]
    return min(known, default=None)
