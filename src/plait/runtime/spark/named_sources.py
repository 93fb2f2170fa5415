"""Names for the sources of streaming DataFrames that are finished already.

Spark (from 4.2 on) can know the sources of a streaming query by name instead of by position: then sources may be added
and removed on an old checkpoint.  It takes the name on the reader, `spark.readStream.name(…)`, while the setting
`EVOLUTION` is on; with the setting on, a reader without a name is refused.  Users hand over DataFrames whose readers
have no name, so the name is put into the analysed plan: every streaming leaf of it is replaced by its copy with a name.
The copies have the columns, ids and options of the originals, so whatever stands above them stays valid.

Costs 5 to 10 ms per DataFrame when a streaming query starts, in calls into the JVM; nothing per epoch.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from py4j.java_gateway import JavaClass, is_instance_of  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession

from plait.errors import StreamError

EVOLUTION = "spark.sql.streaming.queryEvolution.enableSourceEvolution"
"""With it on, a new streaming query knows its sources by name.  On a restart Spark goes by its checkpoint."""
_OFFSET_FORMAT = "spark.sql.streaming.offsetLog.formatVersion"
_NAMEABLE = "org.apache.spark.sql.catalyst.streaming.HasStreamingSourceIdentifyingName"
_NAME = re.compile(r"[A-Za-z0-9_]+")
LONGEST = 128
"""Characters of a stream's name that the name of its source has."""
_starting = threading.Lock()
"""Held while settings of a session are other than its user's."""


def supports_names(spark: SparkSession) -> bool:
    """Whether this Spark knows sources by name."""
    jvm: Any = spark._jvm
    # What is not there is a package to py4j.
    return isinstance(jvm.org.apache.spark.sql.catalyst.streaming.HasStreamingSourceIdentifyingName, JavaClass)


def source_names(df: DataFrame) -> tuple[str | None, ...]:
    """What its user calls the sources of a streaming DataFrame, in the order of the plan; None for one without a name.

    Raises a StreamError if one of them cannot have a name.
    """
    return tuple(_name(_nameable(leaf, df)) for leaf in _leaves(df))


def source_count(df: DataFrame) -> int:
    """Places in Spark's checkpoint that a DataFrame's sources take where they are known by position."""
    return len(_leaves(df))


def named(df: DataFrame, name: str) -> DataFrame:
    """The same DataFrame, with its sources named: `name`, `name_2`, …  Names that its user gave are kept."""
    return renamed(df, fill_names(source_names(df), name, set()))


def fill_names(given: Sequence[str | None], name: str, taken: set[str]) -> tuple[str, ...]:
    """A name for each source: the given one, or the first of `name`, `name_2`, … that nothing else has.

    >>> fill_names([None, "mine", None], "orders", {"orders"})
    ('orders_2', 'mine', 'orders_3')
    """
    # Spark makes folders of them, whose names are not any length, and file systems may not tell A from a.
    name = name if len(name) <= LONGEST else f"{name[:LONGEST]}_{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    used = {n.lower() for n in (*taken, *given) if n is not None}
    numbered = (name if i == 1 else f"{name}_{i}" for i in count(1))
    free = (n for n in numbered if n.lower() not in used)
    return tuple(next(free) if found is None else found for found in given)


def renamed(df: DataFrame, names: Sequence[str]) -> DataFrame:
    """The same DataFrame, with its sources called so, in the order of the plan."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise StreamError("NAME", f"{name!r} cannot name a source", "use letters, digits and underscores")
    if len({name.lower() for name in names}) < len(names):
        raise StreamError(
            "DUPLICATE_SOURCE",
            f"two sources of one stream have the same name: {', '.join(names)}",
            "give each reader a name of its own by .name(…); a DataFrame that is united with itself is read twice",
        )
    user_provided = _streaming(df).UserProvided
    left = iter(names)
    return _with_leaves(df, lambda leaf: _nameable(leaf, df).withSourceIdentifyingName(user_provided(next(left))))


def unnamed(df: DataFrame) -> DataFrame:
    """The same DataFrame without names: where Spark knows sources by position, a name would move a source's log."""
    if not any(_has_name(leaf, df) for leaf in _leaves(df)):
        return df
    unassigned = getattr(getattr(_streaming(df), "Unassigned$"), "MODULE$")
    return _with_leaves(df, lambda leaf: leaf.withSourceIdentifyingName(unassigned) if _has_name(leaf, df) else leaf)


@contextmanager
def starting(session: SparkSession, by_name: bool) -> Iterator[None]:
    """Has the settings on under which a streaming query must start; Spark copies them when it does.

    They are the user's again at the end: with `EVOLUTION` on, the next reader without a name would be refused.
    """
    if not supports_names(session):
        yield
        return
    # Spark 4.2 does not choose by itself the format that can hold names.
    wanted = {EVOLUTION: "true", _OFFSET_FORMAT: "2"} if by_name else {EVOLUTION: "false"}
    with _starting:
        before = {key: session.conf.get(key, None) for key in wanted}
        try:
            for key, value in wanted.items():
                session.conf.set(key, value)
            yield
        finally:
            for key, old in before.items():
                if old is None:
                    session.conf.unset(key)
                else:
                    session.conf.set(key, old)


def _with_leaves(df: DataFrame, change: Callable[[Any], Any]) -> DataFrame:
    """The DataFrame over the same plan with each streaming leaf changed."""
    jvm: Any = df.sparkSession._jvm

    def rebuilt(node: Any) -> Any:
        children = list(_items(node.children()))
        if not children:
            return change(node) if _is_source(node) else node
        # Tags and origins of a node go with it.
        return node.withNewChildren(jvm.PythonUtils.toSeq([rebuilt(child) for child in children]))

    plan = rebuilt(_plan(df))
    # Only names differ from the plan that was analysed: analysing again would cost more and could change it.
    plan.setAnalyzed()
    jdf: Any = df._jdf
    return DataFrame(jvm.org.apache.spark.sql.classic.Dataset.ofRows(jdf.sparkSession(), plan), df.sparkSession)


def _nameable(leaf: Any, df: DataFrame) -> Any:
    if not is_instance_of(_gateway(df), leaf, _NAMEABLE):
        raise StreamError(
            "SOURCE_UNNAMED",
            f"a source of kind {leaf.nodeName()} cannot have a name, and Spark's checkpoint needs one",
            "make the DataFrame by spark.readStream, with .name(…) on the reader",
        )
    return leaf


def _leaves(df: DataFrame) -> list[Any]:
    return [leaf for leaf in _items(_plan(df).collectLeaves()) if _is_source(leaf)]


def _is_source(leaf: Any) -> bool:
    # A reference to a WITH clause is a leaf too; the clause itself stands elsewhere in the plan, once.
    return bool(leaf.isStreaming()) and leaf.nodeName() != "CTERelationRef"


def _has_name(leaf: Any, df: DataFrame) -> bool:
    return is_instance_of(_gateway(df), leaf, _NAMEABLE) and _name(leaf) is not None


def _name(leaf: Any) -> str | None:
    found = leaf.sourceIdentifyingName().nameOpt()
    return str(found.get()) if found.isDefined() else None


def _plan(df: DataFrame) -> Any:
    jdf: Any = df._jdf
    return jdf.queryExecution().analyzed()


def _streaming(df: DataFrame) -> Any:
    jvm: Any = df.sparkSession._jvm
    return jvm.org.apache.spark.sql.catalyst.streaming


def _gateway(df: DataFrame) -> Any:
    return df.sparkSession.sparkContext._gateway


def _items(found: Any) -> Iterator[Any]:
    """The elements of a sequence of Scala's."""
    return (found.apply(i) for i in range(found.size()))
