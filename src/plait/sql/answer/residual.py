"""What stands above and between the multi-way joins of a query, and what Spark still does to joined rows.

A query's *sources* are what the engine maintains: multi-way joins, and streams that something else than a join reads.
Their rows are committed epoch by epoch.  A *recipe* says how the answer comes from them:

    Rows       the rows of a source; those of a maintained aggregate are put together from its partial rows
    Operator   any other operator of Spark's, over recipes
    Split      a multi-way join of which Spark does a part: inputs that are not streams, semi and anti joins

A recipe becomes a Catalyst plan over DataFrames of committed rows, so every function means what it means in Spark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from plait.query.expr import Call, ColumnRef
from plait.query.graph import JoinGraph
from plait.query.group_filter import EVERY, Narrowing
from plait.query.plan import QueryPlan
from plait.query.semi_join import OTHER, OWN, Partners, key_of
from plait.sql.answer.final_groups import Closing
from plait.sql.catalyst.frames import frame_of, renamed_rows
from plait.sql.catalyst.handles import attribute_of, is_same_plan, kind_of, output_of, place_of, type_of
from plait.sql.catalyst.logical import Logical
from plait.sql.catalyst.maintain import Maintained
from plait.sql.join.multiway import MultiwayJoin

_FEWER = 4
"""A right side is cut down if the left has so many times fewer rows."""


def finish(df: DataFrame, plan: QueryPlan) -> DataFrame:
    """Apply the query's remaining conditions and select its outputs; columns of `df` are called `alias.column`."""
    for condition in plan.where:
        df = df.where(F.expr(condition))
    if not plan.select:
        return df
    return df.select(*(F.expr(sql).alias(name) for sql, name in plan.select))


@dataclass(eq=False)
class Source:
    """One thing the engine maintains for a query."""

    name: str
    join: MultiwayJoin
    maintained: Maintained | None
    """None keeps the rows themselves."""
    graph: JoinGraph | None = None
    closing: Closing | None = None
    """Of a maintained aggregate: what tells when groups are final, if anything does."""

    @property
    def output_names(self) -> tuple[str, ...]:
        """What the columns of its rows are called."""
        return tuple(f"c{i}" for i in range(len(self.join.outputs)))

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Names and types of what is committed."""
        assert self.graph is not None
        return self.maintained.columns if self.maintained else tuple((o.name, o.type) for o in self.graph.outputs)


class Frames(Protocol):
    """What sources have committed."""

    def __call__(self, source: Source) -> DataFrame:
        """The rows of a source; of a maintained aggregate, partial rows."""
        ...

    def merged(self, source: Source, narrowing: Narrowing) -> DataFrame:
        """Of a maintained aggregate, one row per group; at least of those that a narrowing keeps."""
        ...

    def count(self, source: Source) -> int:
        """How many rows that is, at most."""
        ...

    def passing(self, source: Source, asked: Sequence[Partners]) -> DataFrame | None:
        """The rows of a source that have the partners asked for; None if that is for Spark."""
        ...


class Recipe(Protocol):
    """How a part of the answer is made."""

    def plan(self, logical: Logical, frames: Frames) -> Any:
        """As a Catalyst plan over committed rows."""

    def parts(self) -> Iterator[Recipe]:
        """What it is made of."""


@dataclass(frozen=True, eq=False)
class Asked:
    """A semi or anti join: which rows have a partner on the right."""

    join: Any
    """As Catalyst has it."""
    condition: Any
    right: Recipe
    equal: tuple[tuple[Any, Any], ...]
    """What the condition says must be equal: of the left, of the right."""
    partners: Partners | None = None
    """The same question about the left's rows as they are kept, where it can be answered without Spark."""

    def plan(self, logical: Logical, frames: Frames, left: Any, keys: Any = None, of: Rows | None = None) -> Any:
        """Of `left` the rows that pass.  Its keys are in `keys`, which are among the rows `of` a source, if of one.

        Few rows are compared with few: of a long right side, only those with a key that occurs on the left are.
        """
        return logical.join_like(self.join, left, self._partners(logical, frames, keys, of), self.condition)

    def _partners(self, logical: Logical, frames: Frames, keys: Any, of: Rows | None) -> Any:
        """The right side, or as much of it as can be partners."""
        right = self.right
        if of is None or not self.equal or not isinstance(right, Rows):
            return right.plan(logical, frames)
        if frames.count(right.source) <= _FEWER * frames.count(of.source):
            return right.plan(logical, frames)
        cut = self._cut(right, of, frames)
        if cut is not None:
            return renamed_rows(logical, cut, right.attributes)
        names = [logical.alias(mine, f"k{i}") for i, (mine, _) in enumerate(self.equal)]
        same = [(attribute_of(name), theirs) for name, (_, theirs) in zip(names, self.equal, strict=True)]
        return logical.semi(right.plan(logical, frames), logical.project(names, keys), same)

    def _cut(self, right: Rows, left: Rows, frames: Frames) -> DataFrame | None:
        """The right side's rows with a key of the left, where both sides keep it as a column."""
        if right.maintained is not None or left.maintained is not None:
            return None
        for mine, theirs in self.equal:
            by, column = left.column(mine, OTHER), right.column(theirs, OWN)
            if by is not None and column is not None:
                same = key_of(Call("=", (column, by), "boolean"))
                return None if same is None else frames.passing(right.source, [Partners(left.source.name, same)])
        return None


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a source, as the columns that the plan above knows them by."""

    source: Source
    attributes: tuple[Any, ...]
    maintained: Maintained | None
    questions: tuple[Asked, ...] = ()
    """Asked about groups of a maintained aggregate."""
    narrowing: Narrowing = EVERY
    """Which of its groups matter."""

    def group_column(self, expression: Any) -> ColumnRef | None:
        """Which column of a maintained aggregate's merged rows an expression is; None if it is none."""
        place = None if self.maintained is None else place_of(expression, self.attributes)
        if self.maintained is None or place is None:
            return None
        name = self.maintained.slot_of(place)
        return None if name is None else ColumnRef("", name, type_of(self.attributes[place]))

    def column(self, expression: Any, side: str) -> ColumnRef | None:
        """Which of the columns an expression is; None if it is none."""
        place = place_of(expression, self.attributes)
        if place is None:
            return None
        return ColumnRef(side, self.source.output_names[place], type_of(self.attributes[place]))

    def plan(self, logical: Logical, frames: Frames) -> Any:
        """The aggregate's own columns, or the rows' columns under the ids that are asked for."""
        if self.maintained is None:
            return renamed_rows(logical, frames(self.source), self.attributes)
        made = renamed_rows(logical, frames.merged(self.source, self.narrowing), self.maintained.slots)
        for question in self.questions:
            made = question.plan(logical, frames, made)
        return self.maintained.final(made)

    def parts(self) -> Iterator[Recipe]:
        """The right sides of questions."""
        return iter(question.right for question in self.questions)


@dataclass(frozen=True, eq=False)
class Operator:
    """An operator as Catalyst has it, over other inputs."""

    jvm: Any
    inputs: tuple[Recipe, ...]
    subqueries: tuple[Recipe, ...] = ()

    def plan(self, logical: Logical, frames: Frames) -> Any:
        """The same operator."""
        made = self.jvm
        if self.subqueries:
            made = logical.with_subqueries(made, [s.plan(logical, frames) for s in self.subqueries])
        return logical.with_children(made, [i.plan(logical, frames) for i in self.inputs]) if self.inputs else made

    def parts(self) -> Iterator[Recipe]:
        """Its inputs and sub-queries."""
        return iter((*self.inputs, *self.subqueries))


@dataclass(frozen=True, eq=False)
class Split:
    """Inputs joined by Spark: all with all, then the conditions, then the questions, then the outputs."""

    inputs: tuple[Recipe, ...]
    conditions: tuple[Any, ...]
    questions: tuple[Asked, ...]
    outputs: tuple[tuple[Any, Any], ...]
    """(expression, the column that it becomes)"""

    def plan(self, logical: Logical, frames: Frames) -> Any:
        """Spark's optimiser chooses how to join; rows that can be told to pass without it are."""
        told = self._told(frames)
        outputs = [logical.named(e, attribute) for e, attribute in self.outputs]
        if told is not None:
            assert isinstance(self.inputs[0], Rows)
            return logical.project(outputs, renamed_rows(logical, told, self.inputs[0].attributes))
        made, *others = [i.plan(logical, frames) for i in self.inputs]
        for other in others:
            made = logical.cross(made, other)
        joined = made = logical.filter(list(self.conditions), made)
        only = self.inputs[0]
        of = only if len(self.inputs) == 1 and isinstance(only, Rows) else None
        for question in self.questions:
            made = question.plan(logical, frames, made, joined, of)
        return logical.project(outputs, made)

    def _told(self, frames: Frames) -> DataFrame | None:
        """The rows that pass, told without Spark."""
        asked = [question.partners for question in self.questions if question.partners is not None]
        if self.conditions or not asked or len(asked) < len(self.questions) or len(self.inputs) > 1:
            return None
        (only,) = self.inputs
        return frames.passing(only.source, asked) if isinstance(only, Rows) else None

    def parts(self) -> Iterator[Recipe]:
        """Inputs, and the right sides of questions."""
        return iter((*self.inputs, *(question.right for question in self.questions)))


def only_aggregate(recipe: Recipe) -> tuple[Rows, list[Any]] | None:
    """The maintained aggregate that is the answer, filtered and projected at most: its groups can be told apart.

    With it, the filters and projections, the lowest first.
    """
    above: list[Any] = []
    while isinstance(recipe, Operator) and not recipe.subqueries:
        if kind_of(recipe.jvm) not in ("Project", "Filter"):
            return None
        above.insert(0, recipe.jvm)
        (recipe,) = recipe.inputs
    if not isinstance(recipe, Rows) or recipe.maintained is None or recipe.questions:
        return None
    return recipe, above


@dataclass(eq=False)
class Residual:
    """The recipe of a whole query."""

    spark: SparkSession
    logical: Logical
    root: Recipe
    output: tuple[tuple[str, str], ...]
    """Names and types of the answer's columns."""
    notes: tuple[str, ...] = ()
    """What is recomputed, and why: for explain, and for the warning."""
    sources: tuple[Source, ...] = ()
    _made: tuple[DataFrame, Any] | None = None

    @property
    def modes(self) -> tuple[str, ...]:
        """The output modes that have a meaning, the default last."""
        if self.only_source is None:
            return ("complete",)
        closes = self.only_source.closing is not None
        return ("append", "update", "complete") if closes else ("update", "complete")

    @cached_property
    def aggregate(self) -> tuple[Rows, list[Any]] | None:
        """The maintained aggregate that the answer is, with what stands above it; None if it is something else."""
        return only_aggregate(self.root)

    @property
    def only_source(self) -> Source | None:
        """Of such an answer, its source."""
        return None if self.aggregate is None else self.aggregate[0].source

    def answer(self, frames: Frames) -> DataFrame:
        """The answer over these committed rows."""
        return frame_of(self.spark, self.root.plan(self.logical, frames)).toDF(*(name for name, _ in self.output))

    def finished(self, merged: DataFrame) -> DataFrame:
        """The answers of several queries with this recipe at once, from the merged rows of their aggregates.

        The last column says whose a row is; it is the last of the answers, too.
        """
        names = [name for name, _ in self.output]
        return frame_of(self.spark, self._finishing(merged)).toDF(*names, merged.columns[-1])

    def finishes_like(self, other: Residual, merged: DataFrame) -> bool:
        """Whether both make the same answer of the same merged rows, of which this is a frame."""
        return self.output == other.output and is_same_plan(self._compared(merged), other._compared(merged))

    def _compared(self, merged: DataFrame) -> Any:
        """The plan over a frame, made once: queries are compared whenever one comes or goes."""
        if self._made is None or self._made[0] is not merged:
            self._made = merged, self._finishing(merged)
        return self._made[1]

    def _finishing(self, merged: DataFrame) -> Any:
        assert self.aggregate is not None
        rows, above = self.aggregate
        assert rows.maintained is not None
        made = renamed_rows(self.logical, merged, rows.maintained.slots, more=1)
        whose = output_of(made)[-1:]
        made = rows.maintained.final(made, whose)
        for operator in above:
            made = self.logical.widened(operator, made, whose)
        return made

    def partial(self, source: Source, rows: DataFrame) -> DataFrame:
        """Partial rows of a maintained aggregate, from rows that its source has just produced."""
        assert source.maintained is not None
        renamed = renamed_rows(self.logical, rows, source.maintained.input)
        return frame_of(self.spark, source.maintained.partial(renamed))


def merged(frame: DataFrame, maintained: Maintained, whose: str | None = None, flag: str | None = None) -> DataFrame:
    """Partial rows of any epochs as merged rows.

    Of several queries, those that the column `whose` tells apart; it comes last, after the greatest of a `flag`.
    """
    texts = [*maintained.merging(), *([] if flag is None else [f"max(`{flag}`) AS `{flag}`"])]
    keys = [*maintained.keys, *([] if whose is None else [f"`{whose}`"])]
    found = frame.groupBy(*keys).agg(*map(F.expr, texts)) if texts else frame.select(*keys).distinct()
    return found if whose is None else found.select(*(f"`{c}`" for c in found.columns if c != whose), f"`{whose}`")
