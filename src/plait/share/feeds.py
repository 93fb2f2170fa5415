"""How a MIR is fed: every row is completed by exactly one of its tuples, the newest of the highest rank (paper 001).

A use of a MIR is a join like any other.  New tuples of each member look the others up, under the rank rule and with
all that the query sees and checks among them; what is complete belongs to that use.  Uses that take the same steps
share them, and rows that belong to several of them are kept once.
"""

from __future__ import annotations

from collections.abc import Iterator

from plait.query.plan import Feed, SlotColumn
from plait.query.store import ARRIVED, UNTIL, Store, Use
from plait.share.mirs import carriers, feed_order
from plait.share.steps import FirstLook, Place, Walk, mir_key


def feeding(at: Place, store: Store, use: Use, fills: bool) -> Iterator[tuple[str, FirstLook | None, Walk]]:
    """The drivers that complete rows for a use, each with its steps.

    Where the MIR is to be filled, rows at rest of one member drive as well, through those that rest of the others.
    """
    assert store.mir is not None
    for driver, wanted in zip(use.aliases, store.mir.feeds, strict=True):
        order = feed_order(at.graph, use.aliases, driver, [use.aliases[i] for i in wanted])
        yield driver, None, at.walk(driver, order)
        if fills and driver == use.aliases[0]:
            look = FirstLook(driver, {})
            yield driver, look, at.walk(driver, order, look)


def feed_of(at: Place, store: Store, use: Use, walk: Walk, new: bool) -> Feed:
    """What becomes of tuples that have gone a feeding way; of rows at rest nothing is new."""
    assert store.mir is not None
    joined, driver = walk.joined, walk.joined.slots[0][0]
    sees = {slot + 1: step.sees_current for slot, (step, _) in enumerate(walk.steps)}
    slots = [joined.slot(alias) for alias in use.aliases]
    own = {slot + 1: at.base.layout.store_by_id[step.store] for slot, (step, _) in enumerate(walk.steps)}
    own[0] = at.store(driver, walk.start)
    ttls = [(slot, own[slot].ttl_us) for slot in slots]
    return Feed(
        id=-1,
        store=store.id,
        key=_key(at, store, use, walk),
        columns=tuple(_column(column.name, slots) for column in store.columns if column.name != UNTIL),
        new=1 << use.aliases.index(driver) if new else 0,
        births=tuple((slot, i) for i, slot in enumerate(slots) if new and sees.get(slot, False)),
        arrivals=tuple((SlotColumn(slot, ARRIVED), ttl) for slot, ttl in ttls if ttl is not None),
        until=tuple((SlotColumn(slots[i], column), kept) for i, column, kept in store.mir.until),
    )


def _column(name: str, slots: list[int]) -> SlotColumn:
    member, _, column = name.partition(".")
    return SlotColumn(slots[int(member)], column)


def _key(at: Place, store: Store, use: Use, walk: Walk) -> tuple[SlotColumn, ...]:
    attributes = mir_key(at.graph, store, use)
    if attributes == walk.end and store.key.exact:
        return ()
    # Others are refused (`mirs.py`).
    found = [carriers(at.graph, use.aliases, attribute)[0] for attribute in attributes]
    return tuple(walk.joined.column(ref) for ref in found)
