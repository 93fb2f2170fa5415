"""A small integer linear program as data, and HiGHS to solve it.

The solver is a plain function, so that tests can put one in its place that is late, fails, or answers nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np


@dataclass
class Program:
    """min Σ cost·x, every x between 0 and 1, every row between its bounds.  Built column by column, row by row."""

    cost: list[float] = field(default_factory=list)
    integral: list[bool] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def variable(self, cost: float = 0.0, *, integral: bool = True) -> int:
        """A new variable; its number."""
        self.cost.append(cost)
        self.integral.append(integral)
        return len(self.cost) - 1

    def row(self, terms: Iterable[tuple[int, float]], lower: float, upper: float) -> None:
        """lower ≤ Σ value·x ≤ upper; no variable may occur twice."""
        self.starts.append(len(self.columns))
        self.lower.append(lower)
        self.upper.append(upper)
        for column, value in terms:
            self.columns.append(column)
            self.values.append(value)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a solver found."""

    values: Sequence[float] | None
    """The best solution so far; None if there is none."""
    bound: float
    """No solution can cost less."""
    proven: bool
    """Whether the solution is the best one, within the gap that was allowed."""


Solver = Callable[[Program, Sequence[float] | None, float, float], Answer]
"""(program, a first solution, seconds, relative gap) → answer."""


def highs(program: Program, first: Sequence[float] | None, seconds: float, gap: float) -> Answer:
    """Solves a program with HiGHS, in this thread."""
    if not all(map(math.isfinite, program.cost)):
        # HiGHS would not stop, not even when its time is over.
        raise ValueError("a cost is not finite")
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.silent()
    for option, value in (("threads", 1), ("time_limit", max(seconds, 0.0)), ("mip_rel_gap", gap)):
        solver.setOptionValue(option, value)
    size = len(program.cost)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = size, len(program.lower)
    lp.col_cost_ = np.array(program.cost)
    lp.col_lower_, lp.col_upper_ = np.zeros(size), np.ones(size)
    lp.row_lower_, lp.row_upper_ = np.array(program.lower), np.array(program.upper)
    lp.integrality_ = [
        highspy.HighsVarType.kInteger if i else highspy.HighsVarType.kContinuous for i in program.integral
    ]
    matrix = lp.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.array([*program.starts, len(program.columns)], dtype=np.int32)
    matrix.index_ = np.array(program.columns, dtype=np.int32)
    matrix.value_ = np.array(program.values)
    solver.passModel(lp)
    if first is not None:
        solution = highspy.HighsSolution()
        solution.col_value = list(first)
        solver.setSolution(solution)
    solver.run()
    info = solver.getInfo()
    found = info.primal_solution_status == int(highspy.SolutionStatus.kSolutionStatusFeasible)
    return Answer(
        values=list(solver.getSolution().col_value) if found else None,
        bound=float(info.mip_dual_bound),
        proven=solver.getModelStatus() == highspy.HighsModelStatus.kOptimal,
    )
