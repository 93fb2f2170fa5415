"""The pass over state that an epoch makes for new queries (`since="state"`): how far it is, and how it is given up.

Contract.  Whoever gives a pass up has its Spark job cancelled.  Nothing of its epoch is committed; the epoch is run
again, with whatever has been admitted by then: without the query, if it was dropped.  A pass that ends in time is as if
nobody had asked.

How far it is tasks tell by small files (`state/log/passes.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pyspark.sql import SparkSession

from plait.query.plan import Plan


class GivenUp(Exception):
    """Nobody wants the first pass any more that this epoch was to make."""


@dataclass
class FirstPass:
    """The first pass that is under way, if any."""

    joins: frozenset[str] = frozenset()
    """For which it is made."""
    _given_up: threading.Event = field(default_factory=threading.Event)
    _cancel: Callable[[], None] = lambda: None

    @contextmanager
    def under_way(self, spark: SparkSession, plan: Plan, tag: str) -> Iterator[None]:
        """Around the job of an epoch: it can be given up if it makes a first pass."""
        joins = frozenset(query for tree in plan.trees if tree.replays is not None for query, _ in tree.members)
        if not joins:
            yield
            return
        context = spark.sparkContext
        self._given_up.clear()
        context.addJobTag(tag)
        self._cancel, self.joins = (lambda: context.cancelJobsWithTag(tag)), joins
        try:
            yield
        finally:
            self.joins = frozenset()
            context.removeJobTag(tag)

    def check(self) -> None:
        """Raises if it was given up before its job has begun."""
        if self._given_up.is_set():
            raise GivenUp

    def give_up(self, joins: Collection[str]) -> None:
        """These joins are wanted no more: if the pass under way is for them, its job is cancelled."""
        if not self.joins.isdisjoint(joins):
            self._given_up.set()
            self._cancel()

    def was_given_up(self) -> bool:
        """Whether that is why an epoch has failed; asked once."""
        found = self._given_up.is_set()
        self._given_up.clear()
        return found
