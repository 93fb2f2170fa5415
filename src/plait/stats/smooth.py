"""Forecasts of the next value of a series: Holt's linear trend and its damped variant (paper 000, section 4.3).

    level  l_t = α·y_t + (1 − α)·(l_{t−1} + φ·b_{t−1})
    trend  b_t = β·(l_t − l_{t−1}) + (1 − β)·φ·b_{t−1}
    next   ŷ_{t+1} = l_t + φ·b_t              φ = 1 is Holt's linear trend

α, β and φ are those of a grid that would have forecast the series itself best (least squares of the one-step errors),
searched twice, coarse and then fine around the best.  All series of one length are fitted together: the cost is that of
walking once along the longest, whatever their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

FEWEST = 4
"""Shorter series have no trend worth following: their last value is their forecast."""

_COARSE = np.linspace(0.0, 1.0, 9)
_FINE = np.linspace(-0.1, 0.1, 5)
_DAMPING = (0.80, 0.88, 0.94, 0.98)


@dataclass(frozen=True, slots=True)
class Fit:
    """What a series was smoothed with, and what it forecasts."""

    alpha: float
    beta: float
    phi: float
    squared_error: float
    forecast: float


def forecasts(series: Sequence[Sequence[float]], *, damped: bool) -> list[float]:
    """The next value of each series.  Values that are not finite are left out; a series without any gives NaN.

    >>> forecasts([[1.0, 2.0, 3.0, 4.0, 5.0], [7.0]], damped=False)
    [6.0, 7.0]
    """
    clean = [np.asarray([v for v in s if np.isfinite(v)], np.float64) for s in series]
    found = [float(s[-1]) if len(s) else float("nan") for s in clean]
    for length in {len(s) for s in clean if len(s) >= FEWEST}:
        members = [i for i, s in enumerate(clean) if len(s) == length]
        for i, one in zip(members, fits(np.stack([clean[i] for i in members]), damped=damped), strict=True):
            found[i] = one.forecast
    return found


def fits(series: F64, *, damped: bool) -> list[Fit]:
    """The best fit of each row of `series`."""
    scale = np.maximum(np.abs(series).max(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    scaled = series / scale
    phis = _DAMPING if damped else (1.0,)
    grid = np.asarray(list(product(_COARSE, _COARSE, phis)))
    # The same grid for all series first, then one of its own around the best of each.
    best = _best(scaled, np.broadcast_to(grid, (len(scaled), *grid.shape)))
    steps = np.asarray(list(product(_FINE, _FINE)))
    around = np.repeat(best[:, None, :3], len(steps), axis=1)
    around[:, :, :2] = np.clip(around[:, :, :2] + steps, 0.0, 1.0)
    best = _best(scaled, around)
    return [
        Fit(a, b, phi, error * size * size, following * size)
        for (a, b, phi, error, following), size in zip(best.tolist(), scale[:, 0].tolist(), strict=True)
    ]


def initial(series: F64) -> tuple[F64, F64]:
    """Level and trend before the first value is smoothed in: the first value, and the mean of its first steps."""
    steps = min(3, series.shape[1] - 1)
    return series[:, 0], (series[:, steps] - series[:, 0]) / steps


def _best(series: F64, grids: F64) -> F64:
    """Per series the parameters with the least error: rows of (α, β, φ, squared error, forecast)."""
    alpha, beta, phi = grids[:, :, 0], grids[:, :, 1], grids[:, :, 2]
    first, slope = initial(series)
    level = np.broadcast_to(first[:, None], alpha.shape)
    trend = np.broadcast_to(slope[:, None], alpha.shape)
    error = np.zeros(alpha.shape)
    for t in range(1, series.shape[1]):
        expected = level + phi * trend
        missed = series[:, t, None] - expected
        error = error + missed * missed
        after = expected + alpha * missed
        trend = phi * trend + beta * (after - level - phi * trend)
        level = after
    where = np.argmin(error, axis=1)
    rows = np.arange(len(series))
    chosen = grids[rows, where]
    following = (level + phi * trend)[rows, where]
    return np.column_stack([chosen, error[rows, where], following])
