"""Which sources a checkpoint's streaming query has, and whether that may change.

A checkpoint begins with named sources where Spark has them.  Then `spark_names.json` says, for each stream, what its
sources are called in Spark's part of the checkpoint, and which names were in use once.  Two rules keep every row read
exactly once:

- A name is never given again.  Spark keeps no offsets of a source that is not there: after two epochs without it, it
  would be read from its beginning, after one it would go on.  A stream that is dropped and registered again gets
  other names, and is always read from its beginning.
- A source is dropped after a commit only.  Spark would run an epoch that it has begun without the rows of that source,
  and go on after them.

A checkpoint that began without names goes on by position, source i is line i of Spark's offsets: its streams
are fixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from pyspark.sql import DataFrame, SparkSession

from plait.errors import CheckpointError, StreamError
from plait.runtime.driver.offsets import last_batch
from plait.runtime.spark.named_sources import (
    EVOLUTION,
    fill_names,
    renamed,
    source_count,
    source_names,
    starting,
    supports_names,
    unnamed,
)
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.sealed import seal, unseal

FILE = "spark_names.json"
_KIND = "plait-sources"


@dataclass(frozen=True)
class SourceNames:
    """The names of all sources that a checkpoint has, or had."""

    streams: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    retired: frozenset[str] = frozenset()
    """Names that must not be given again."""

    def assign(self, given: Mapping[str, tuple[str | None, ...]]) -> SourceNames:
        """The names for these streams, of which users have named some sources; streams that are gone retire theirs.

        >>> SourceNames({"a": ("a",), "b": ("b",)}).assign({"a": (None,), "b_2": (None,)}).assign(
        ...     {"a": (None,), "b": (None, None)}
        ... ).streams
        {'a': ('a',), 'b': ('b_3', 'b_4')}
        """
        kept = {name: _same(name, self.streams[name], given[name]) for name in given if name in self.streams}
        gone = {source for name, sources in self.streams.items() if name not in given for source in sources}
        retired = self.retired | gone
        taken = {source for sources in kept.values() for source in sources}
        for name in sorted(given.keys() - kept.keys()):
            _refuse_taken(name, given[name], taken, retired)
            taken |= {source for source in given[name] if source is not None}
        for name in sorted(given.keys() - kept.keys()):
            kept[name] = fill_names(given[name], name, taken | retired)
            taken |= set(kept[name])
        return SourceNames({name: kept[name] for name in sorted(kept)}, retired)


@dataclass(frozen=True)
class Sources:
    """How the streaming query of one run reads the streams."""

    frames: Mapping[str, DataFrame]
    """By stream, with the sources' names put in, or taken out."""
    names: SourceNames | None
    """None where Spark knows them by position."""
    changed: bool = False
    """Whether the names are other than those in the checkpoint."""

    def record(self, checkpoint: Checkpoint) -> None:
        """Writes the names down: before Spark uses them, and after all that can still refuse this start."""
        if self.names is None or not self.changed:
            return
        checkpoint.check_fence()
        streams = {name: list(sources) for name, sources in self.names.streams.items()}
        value = {"streams": streams, "retired": sorted(self.names.retired)}
        checkpoint.files.replace(FILE, seal(_KIND, value))

    def starting(self, session: SparkSession) -> AbstractContextManager[None]:
        """What the streaming query must be started in."""
        return starting(session, by_name=self.names is not None)


def can_change_streams(checkpoint: Checkpoint, spark: SparkSession) -> bool:
    """Whether streams may be added and dropped: Spark knows sources by name, and did when the checkpoint began."""
    return supports_names(spark) and _begins_or_has_names(checkpoint)


def refuse_fixed(checkpoint: Checkpoint, spark: SparkSession, before: Iterable[str], now: Iterable[str]) -> None:
    """Raises if the set of streams differs from what it was, and may not."""
    old, new = set(before), set(now)
    if old == new or can_change_streams(checkpoint, spark):
        return
    changes = [f"{what} {', '.join(sorted(s))}" for what, s in (("added:", new - old), ("gone:", old - new)) if s]
    raise _fixed(f"the streams of this checkpoint cannot change ({'; '.join(changes)})", spark)


def choose_sources(checkpoint: Checkpoint, spark: SparkSession, frames: Mapping[str, DataFrame]) -> Sources:
    """How a streaming query on this checkpoint reads these streams; raises where Spark would lose or repeat rows."""
    before = recorded(checkpoint)
    if not supports_names(spark):
        if before is not None or _offsets_have_names(_newest_offsets(checkpoint)):
            raise CheckpointError(
                "SPARK_OLDER",
                f"this checkpoint knows its sources by name, which Spark {spark.version} cannot",
                "run it with Spark 4.2 or newer",
            )
        return Sources(dict(frames), None)
    if not _begins_or_has_names(checkpoint):
        _refuse_other_count(checkpoint, spark, frames)
        return Sources({name: unnamed(df) for name, df in frames.items()}, None)
    given = {name: source_names(df) for name, df in frames.items()}
    if before is None and _newest_offsets(checkpoint) is not None:
        _refuse_unnamed(given)
    names = (before or SourceNames()).assign(given)
    if before is not None and names.retired > before.retired:
        _refuse_unfinished(checkpoint, before.streams.keys() - names.streams.keys())
    return Sources({n: renamed(df, names.streams[n]) for n, df in frames.items()}, names, names != before)


def recorded(checkpoint: Checkpoint) -> SourceNames | None:
    """The names that a checkpoint has; None if it has none."""
    data = checkpoint.files.read(FILE)
    if data is None:
        return None
    value = unseal(_KIND, data, checkpoint.files.where(FILE), "CHECKPOINT_CORRUPT")
    return SourceNames({n: tuple(s) for n, s in value["streams"].items()}, frozenset(value["retired"]))


def _same(stream: str, before: tuple[str, ...], given: tuple[str | None, ...]) -> tuple[str, ...]:
    """The names that a stream's sources have, in the order of its plan now."""
    mine = [name for name in given if name is not None]
    others = iter([name for name in before if name not in mine])
    if len(before) != len(given) or not set(mine) <= set(before):
        now = ", ".join(name or "one without a name" for name in given)
        raise CheckpointError(
            "SOURCES_CHANGED",
            f"stream {stream!r} was read from the sources {', '.join(before)}, and is now from {now}",
            "read it from the same sources under the same names, or register the new ones as another stream",
        )
    return tuple(next(others) if name is None else name for name in given)


def _refuse_taken(stream: str, given: Iterable[str | None], taken: set[str], retired: Iterable[str]) -> None:
    used, gone = {name.lower() for name in taken}, {name.lower() for name in retired}
    for name in given:
        if name is not None and name.lower() in used | gone:
            whose = "another stream" if name.lower() in used else "a stream that was dropped"
            raise StreamError(
                "DUPLICATE_SOURCE",
                f"a source of stream {stream!r} is called {name!r}, and so is one of {whose}",
                "give its reader another name by .name(…), or none",
            )


def _refuse_unnamed(given: Mapping[str, tuple[str | None, ...]]) -> None:
    """A checkpoint that began with names of the users' own, before Plait gave any, needs all of them."""
    for stream, names in given.items():
        if None in names:
            raise StreamError(
                "SOURCE_UNNAMED",
                f"this checkpoint began with names that its readers gave, and stream {stream!r} has a reader without",
                "give the reader the name that it had by .name(…)",
            )


def _refuse_unfinished(checkpoint: Checkpoint, dropped: Iterable[str]) -> None:
    begun = _newest(checkpoint, "spark/offsets")
    if begun > last_batch(checkpoint):
        which = ", ".join(sorted(dropped))
        raise CheckpointError(
            "EPOCH_UNFINISHED",
            f"epoch {begun} has begun, with rows of {which}, and is not committed",
            f"start once more with {which}; drop it after a commit",
        )


def _refuse_other_count(checkpoint: Checkpoint, spark: SparkSession, frames: Mapping[str, DataFrame]) -> None:
    before = len((_newest_offsets(checkpoint) or "").splitlines()) - 2
    now = sum(source_count(df) for df in frames.values())
    # Of a damaged file Spark itself tells.
    if before > 0 and before != now:
        raise _fixed(f"the streaming query of this checkpoint has {before} sources, and now there are {now}", spark)


def _fixed(cause: str, spark: SparkSession) -> CheckpointError:
    if supports_names(spark):
        why = "it began without named sources, so Spark knows them by position"
    else:
        why = f"Spark {spark.version} knows sources by position"
    remedy = "keep the streams as they were, or begin a new checkpoint with Spark 4.2 or newer: there they may change"
    return CheckpointError("STREAMS_FIXED", f"{cause}: {why}", remedy)


def _begins_or_has_names(checkpoint: Checkpoint) -> bool:
    offsets = _newest_offsets(checkpoint)
    return recorded(checkpoint) is not None or offsets is None or _offsets_have_names(offsets)


def _offsets_have_names(offsets: str | None) -> bool:
    """Whether these offsets are by name.  The format does not tell: the second one can have positions as well."""
    return offsets is not None and f'"{EVOLUTION}":"true"' in offsets.partition("\n")[2].partition("\n")[0]


def _newest_offsets(checkpoint: Checkpoint) -> str | None:
    """What Spark has logged for the newest epoch that it has begun: version, settings, one line per source."""
    newest = _newest(checkpoint, "spark/offsets")
    data = None if newest < 0 else checkpoint.files.read(f"spark/offsets/{newest}")
    return None if data is None else data.decode(errors="replace")


def _newest(checkpoint: Checkpoint, folder: str) -> int:
    return max((int(name) for name in checkpoint.files.names(folder) if name.isdigit()), default=-1)
