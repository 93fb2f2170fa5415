"""`plait run --watch`: the queries of a running pipeline follow its file.

Contract.  A file that has changed is read again; what it says of queries is applied at once, all of it or nothing: new
ones are added, those that are gone are dropped, those with another text, sink, mode or limits are replaced.  A file
that is broken, or of which one query is refused, is reported, and the last good one goes on.  What else it says
(streams, tables, settings) takes a restart, and is reported.  A change counts when two looks have found the same.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plait.errors import PlaitError
from plait.serve.pipeline import Pipeline, QuerySpec, define, load

if TYPE_CHECKING:
    from plait.engine import Engine

LOOK_EVERY_SECONDS = 0.5
EVERY = "1 second"
"""The pace of a watched pipeline that gives none: it runs until it is stopped."""


@dataclass(frozen=True)
class Edits:
    """What differs between the queries of two files."""

    added: tuple[QuerySpec, ...]
    replaced: tuple[QuerySpec, ...]
    dropped: tuple[str, ...]

    @property
    def text(self) -> str:
        """For people.

        >>> Edits((QuerySpec("a", "", None), QuerySpec("b", "", None)), (), ("c",)).text
        'added a, b; dropped c'
        """
        names = {
            "added": [query.name for query in self.added],
            "replaced": [query.name for query in self.replaced],
            "dropped": list(self.dropped),
        }
        return "; ".join(f"{what} {', '.join(some)}" for what, some in names.items() if some)


def edits(before: Pipeline, after: Pipeline) -> Edits:
    """Which queries another file adds, replaces and drops."""
    old, new = ({query.name: query for query in pipeline.queries} for pipeline in (before, after))
    return Edits(
        added=tuple(query for name, query in new.items() if name not in old),
        replaced=tuple(query for name, query in new.items() if name in old and _live(query) != _live(old[name])),
        dropped=tuple(name for name in old if name not in new),
    )


def _live(query: QuerySpec) -> QuerySpec:
    """What can change of a query that lives."""
    return dataclasses.replace(query, since=None, replace=False)


def needs_restart(before: Pipeline, after: Pipeline) -> list[str]:
    """The tables of a file that differ and can only be read by a start."""
    parts: dict[str, Callable[[Pipeline], object]] = {
        "[engine]": lambda p: p.checkpoint,
        "[config]": lambda p: p.config,
        "[spark]": lambda p: (p.app, p.master, p.settings),
        "[streams]": lambda p: p.streams,
        "[tables]": lambda p: p.tables,
        "[trigger]": lambda p: p.every,
    }
    return [name for name, part in parts.items() if part(before) != part(after)]


@dataclass
class Watching:
    """A pipeline that runs, and its file."""

    pipeline: Pipeline
    """The last good one."""
    engine: Engine
    say: Callable[[str], None]
    _seen: Pipeline | PlaitError | None = field(default=None, init=False)
    """What the last look has found."""
    _told: str = field(default="", init=False)
    _next: float = field(default=0.0, init=False)

    def look(self) -> None:
        """Reads the file, now and then, and applies what has changed."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_EVERY_SECONDS
        seen = _read(self.pipeline)
        is_settled, self._seen = _same(seen, self._seen), seen
        if not is_settled:
            return
        if isinstance(seen, PlaitError):
            self._tell(f"{seen} (the last good file goes on)")
        elif seen != self.pipeline:
            self._apply(seen)
        else:
            self._told = ""

    def _apply(self, new: Pipeline) -> None:
        found = edits(self.pipeline, new)
        try:
            with self.engine._all_or_nothing():
                for name in found.dropped:
                    self.engine.drop(name)
                for query in found.added:
                    define(self.engine, query)
                for query in found.replaced:
                    define(self.engine, dataclasses.replace(query, replace=True))
        except PlaitError as error:
            self._tell(f"{error} (nothing of the changed file is applied)")
            return
        if found.text:
            self.say(f"{new.file}: {found.text}")
        if parts := needs_restart(self.pipeline, new):
            self.say(f"{new.file}: {', '.join(parts)} changed, which takes a restart")
        self.pipeline, self._told = new, ""

    def _tell(self, what: str) -> None:
        """Says something once."""
        if what != self._told:
            self._told = what
            self.say(what)


def _read(pipeline: Pipeline) -> Pipeline | PlaitError:
    try:
        return load(pipeline.file)
    except PlaitError as error:
        return error


def _same(one: Pipeline | PlaitError, other: Pipeline | PlaitError | None) -> bool:
    return str(one) == str(other) if isinstance(one, PlaitError) else one == other
