"""Passes: where state is compressed, all drivers work through one range of hashes before any goes on to the next.

A block holds the rows of neighbouring hashes, and every driver that looks into its store may need it.  Driver after
driver, an epoch that touches most of a store decompresses each block as often as there are drivers, unless the cache
holds the whole store.  Range after range, a store's rows of one range are put together once, as one run in memory, and
all drivers find their rows there.

Cost.  Per pass and store about as much as decompressing a block, and the rows are moved once; so there are passes only
where that many blocks are saved.  A store of which an epoch needs few blocks is read block by block.  How many it
needs, the filter of one segment per run says of a few of the keys: most keys of a long join are in few runs, often the
newest.  To ask all filters would read all filters, and they are not in memory when state is large.

>>> many = Reads(asked=[4000, 4000], blocks=4000, flat=100)
>>> made = passes_for({"a": many, "b": Reads([1000, 900], 1000), "c": Reads([500, 700], 1000)}, room=32 << 20)
>>> made.count, sorted(made.dense)
(18, ['a', 'b'])
>>> passes_for({"a": Reads([4000], 4000)}, room=32 << 20).count
1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pyarrow as pa

from plait.config import KEY_GROUPS
from plait.kernels import U64
from plait.query.plan import Node, Plan
from plait.query.store import HASH
from plait.runtime.task.exchange import between
from plait.state.segments import block_segment as deep
from plait.state.segments.run import first_from
from plait.state.segments.segment import SegmentInfo

HashRange = tuple[int, int]
"""From a hash to before another."""
_GROUP = 2**64 // KEY_GROUPS
"""Hashes of a key group."""
_DENSE = 1.5
"""What a block that is put together with all others of its range costs more than one that is looked into."""
_SAMPLE = 128
"""Keys whose segments are looked for, at least, where there are so many."""


@dataclass(slots=True)
class Reads:
    """What an epoch reads of a store: how many blocks each driver needs by itself, and what is there to be read."""

    asked: list[int] = field(default_factory=list)
    """By driver."""
    blocks: int = 0
    """Compressed ones."""
    flat: int = 0
    """As many blocks would hold what is not compressed."""


@dataclass(frozen=True, slots=True)
class Passes:
    """How an epoch's tuples go through a task."""

    count: int = 1
    dense: frozenset[str] = frozenset()
    """Stores of which every pass reads its whole range."""

    def cut(self, tables: Mapping[int, pa.Table]) -> Iterator[tuple[HashRange, Mapping[int, pa.Table]]]:
        """The tuples of every edge, sorted by hash, range by range; a key's tuples are in one pass."""
        low, high = _ends(tables)
        bounds = [low + (high - low) * i // self.count for i in range(self.count + 1)]
        for begin, end in pairwise(bounds):
            parts = {edge: between(table, begin, end) for edge, table in tables.items()}
            yield (begin, end), {edge: part for edge, part in parts.items() if part.num_rows}


def reads_at(
    plan: Plan,
    hop: int,
    tables: Mapping[int, pa.Table],
    segments: Callable[[str], Sequence[SegmentInfo]],
    share_within: Callable[[SegmentInfo, U64], float],
    arriving: Mapping[int, float],
) -> dict[str, Reads]:
    """What tuples that arrive at a hop read of each store that more than one driver looks into.

    `share_within` says which share of some keys may be in a compressed segment, `arriving` which share of a driver's
    keys gets as far as a node.  Left out are lookups with a window, for which not all segments of a store are read.
    """
    looking: dict[str, list[tuple[U64, float]]] = {}
    for edge, start in _starts(plan, hop):
        for node in start.walk() if edge in tables else ():
            if node.step.hop == hop and node.step.zone is None and node.step.by is None:
                hashes = tables[edge].column(HASH).to_numpy()
                looking.setdefault(node.step.store, []).append((hashes, arriving.get(node.id, 1.0)))
    low, high = _ends(tables)
    groups = low // _GROUP, (high - 1) // _GROUP + 1
    found = {store: Reads() for store, drivers in looking.items() if len(drivers) > 1}
    for store, reads in found.items():
        runs: dict[str, list[tuple[SegmentInfo, int]]] = {}
        for info in segments(store):
            within = min(info.hi_group, groups[1]) - max(info.lo_group, groups[0])
            size = info.live_bytes * max(0, within) // (info.hi_group - info.lo_group)
            if info.deep:
                runs.setdefault(info.run, []).append((info, deep.blocks_in(size)))
            else:
                reads.flat += size // deep.BLOCK_BYTES
        reads.blocks = sum(blocks for run in runs.values() for _, blocks in run)
        for hashes, share in looking[store]:
            reads.asked.append(int(sum(_needed(hashes, share, run, share_within) for run in runs.values())))
    return found


def arriving(plan: Plan, lookups: Mapping[int, int]) -> dict[int, float]:
    """Which share of the keys that begin at a hop got as far as each node, by the lookups of an epoch."""
    found: dict[int, float] = {}
    for hop in range(1, plan.hops + 1):
        for _, start in _starts(plan, hop):
            begun = lookups.get(start.id, 0)
            for node in start.walk() if begun else ():
                if node.step.hop == hop:
                    found[node.id] = min(1.0, lookups.get(node.id, 0) / begun)
    return found


def _needed(
    hashes: U64,
    share: float,
    run: Sequence[tuple[SegmentInfo, int]],
    share_within: Callable[[SegmentInfo, U64], float],
) -> float:
    """How many of a run's blocks a share of these keys needs, told from the segment with most of them."""
    parts = [_inside(hashes, info) for info, _ in run]
    most = max(range(len(run)), key=lambda i: len(parts[i]))
    if not len(parts[most]):
        return 0.0
    share *= share_within(run[most][0], parts[most][:: max(1, len(parts[most]) // _SAMPLE)].copy())
    return sum(distinct_blocks(len(part) * share, blocks) for part, (_, blocks) in zip(parts, run, strict=True))


def distinct_blocks(keys: float, blocks: int) -> float:
    """How many of so many blocks so many keys are in, if they are anywhere with equal chance.

    >>> [round(distinct_blocks(keys, 100)) for keys in (1, 50, 100, 1000)]
    [1, 39, 63, 100]
    """
    return blocks * -math.expm1(-keys / blocks) if blocks else 0.0


def _inside(hashes: U64, info: SegmentInfo) -> U64:
    """The hashes in the range of a segment."""
    return hashes[first_from(hashes, info.lo_group * _GROUP) : first_from(hashes, info.hi_group * _GROUP)]


def _starts(plan: Plan, hop: int) -> Iterator[tuple[int, Node]]:
    """Where tuples begin to look rows up at a hop, and the edge that they arrive on."""
    for tree in plan.trees:
        for top in tree.nodes:
            if hop == 1 and tree.replays is None:
                yield tree.edge, top
            elif hop == 1:
                continue
            else:
                yield from ((node.id, node) for node in top.walk() if node.step.hop == hop)


def _ends(tables: Mapping[int, pa.Table]) -> HashRange:
    """The hashes of all tuples."""
    ends = [table.column(HASH)[i].as_py() for table in tables.values() if table.num_rows for i in (0, -1)]
    return min(ends, default=0), max(ends, default=0) + 1


def passes_for(stores: Mapping[str, Reads], room: int) -> Passes:
    """As many passes as make what each puts together fit `room` bytes; one if that does not pay.

    While the largest store's rows are put together, they are there twice.
    """
    dense = {store: reads for store, reads in stores.items() if sum(reads.asked) > _DENSE * reads.blocks > 0}
    sizes = [reads.blocks + reads.flat for reads in dense.values()]
    count = math.ceil((sum(sizes) + max(sizes, default=0)) * deep.BLOCK_BYTES / room)
    saved = sum(min(reads.blocks, n) for reads in dense.values() for n in reads.asked)
    saved -= sum(reads.blocks for reads in dense.values())
    return Passes(count, frozenset(dense)) if saved > count * len(dense) else Passes()
