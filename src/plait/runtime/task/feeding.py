"""Rows of a MIR, made of the tuples that complete them.

A row carries the columns of all its members, a bit per use that it belongs to, the members that are new in this epoch
(NEW), and when it ends: with the first of its members, by event time (UNTIL) and by TTL (ARRIVED).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from plait.kernels import I64, U64, Flags
from plait.query.plan import Feed, SlotColumn
from plait.query.store import ARRIVED, BORN, FOREVER, HASH, NEW, SET_BITS, UNTIL, Key, Store, mask_columns
from plait.runtime.task.partial import Partial
from plait.state.segments.filter_sets import Sets, packed
from plait.state.segments.keys import hash_key, null_rows
from plait.state.segments.segment import microseconds
from plait.state.segments.sieve import as_words

NEVER = -(1 << 62)
"""The end of a row without event time: it is in no window."""


def sets_of(store: Store) -> Sets:
    """What is known of the uses of a MIR's rows that are complete in this epoch."""
    ids = tuple(_filters(store))
    return Sets(bits=ids) if store.masked else Sets(passed=ids)


def fed(feed: Feed, store: Store, partial: Partial, epoch: int) -> pa.Table:
    """Complete tuples as rows of a MIR, sorted by the hash of its key; those that belong to no use are left out."""
    if partial.sets is not None:
        everyone = sum(1 << member for member, _ in feed.members)
        partial = partial.of_members(as_words(everyone, partial.sets.shape[1]))
    hashes: U64 = partial.hashes
    if feed.key:
        table, key = _key(feed, store, partial)
        nulls = null_rows(table, key)
        if nulls is not None:
            partial = partial.picked(np.flatnonzero(~nulls))
            table, key = _key(feed, store, partial)
        hashes = hash_key(table, key)
    order = np.argsort(hashes, kind="stable")
    sets = None if partial.sets is None else partial.sets[order]
    partial = Partial(hashes[order], tuple(slot.picked(order) for slot in partial.slots), sets)
    names = [column.name for column in store.columns if column.name != UNTIL]
    found = dict(zip(names, partial.columns(feed.columns), strict=True))
    if store.time_column == UNTIL:
        found[UNTIL] = pa.array(_until(feed, partial))
    if store.masked:
        words = packed(_uses(feed, store, partial), len(order))
        found |= {name: pa.array(w) for name, w in zip(mask_columns(len(_filters(store))), words, strict=True)}
    if store.ttl_us is not None:
        found[ARRIVED] = pa.array(_arrived(feed, store.ttl_us, partial))
    found[NEW] = pa.array(_new(feed, partial, epoch))
    return pa.table([pa.array(partial.hashes), *found.values()], names=[HASH, *found])


def _key(feed: Feed, store: Store, partial: Partial) -> tuple[pa.Table, Key]:
    names = tuple(f"k{i}" for i in range(len(feed.key)))
    columns = [partial.column(ref) for ref in feed.key]
    return pa.table(columns, names=list(names)), Key(names, store.key.types, store.key.exact)


def _filters(store: Store) -> list[int]:
    assert store.mir is not None
    return [use.filter for use in store.mir.feeding]


def _uses(feed: Feed, store: Store, partial: Partial) -> list[Flags]:
    """By use of the MIR, which tuples belong to it."""
    by_filter = {filter: member for member, filter in feed.members}
    found = []
    for filter in _filters(store):
        member = by_filter.get(filter)
        if member is None or partial.sets is None:
            found.append(np.full(len(partial.hashes), member is not None))
        else:
            word, bit = divmod(member, SET_BITS)
            found.append((partial.sets[:, word] >> np.uint64(bit) & np.uint64(1)).astype(np.bool_))
    return found


def _new(feed: Feed, partial: Partial, epoch: int) -> I64:
    """By tuple, the members that arrived in this epoch."""
    found = np.full(len(partial.hashes), feed.new, np.int64)
    for slot, member in feed.births:
        born = partial.column(SlotColumn(slot, BORN)).to_numpy(zero_copy_only=False)
        found |= (born == epoch).astype(np.int64) << member
    return found


def _arrived(feed: Feed, ttl_us: int, partial: Partial) -> I64:
    """The clock at which the first member's TTL is over, less the store's own TTL."""
    found = np.full(len(partial.hashes), FOREVER, np.int64)
    for column, ttl in feed.arrivals:
        ends = partial.column(column).to_numpy(zero_copy_only=False) + (ttl - ttl_us)
        found = np.minimum(found, ends)
    return found


def _until(feed: Feed, partial: Partial) -> I64:
    """The event time of the watermark at which the first member cannot be reached any more."""
    found = np.full(len(partial.hashes), FOREVER, np.int64)
    for column, kept in feed.until:
        times = microseconds(partial.column(column)).fill_null(NEVER).to_numpy(zero_copy_only=False)
        found = np.minimum(found, times + kept)
    return found
