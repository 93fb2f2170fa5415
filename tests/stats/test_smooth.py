"""Holt's linear trend and its damped variant, against the figures of a reference implementation.

The figures are those of statsmodels 0.15.0, which is no dependency of ours.  With `l` and `b` from `smooth.initial`:

    Holt(y[1:], damped_trend=φ < 1, initialization_method="known", initial_level=l, initial_trend=b)
        .fit(smoothing_level=α, smoothing_trend=β, damping_trend=φ, optimized=False)    → sse, forecast(1)
        .fit(optimized=True)                                                             → sse
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.stats.smooth import FEWEST, _best, fits, forecasts, initial

QUICK = settings(deadline=None, derandomize=True, database=None, max_examples=60)

# fmt: off
SERIES: dict[str, list[float]] = {
    "growing": [112.0, 118, 132, 129, 121, 135, 148, 148, 136, 119, 104, 118, 115, 126, 141],
    "falling": [0.91, 0.88, 0.9, 0.84, 0.8, 0.81, 0.75, 0.7, 0.71, 0.64, 0.6, 0.61],
    "short": [3.0, 5, 4, 8],
    "step": [10.0] * 6 + [40.0] * 6,
    "walk": [
        19.4981, 18.4737, 18.5253, 19.2458, 20.6818, 21.0915, 20.8389, 20.3541, 21.4029, 23.3376, 23.9104, 22.9771,
        22.3188, 24.2188, 24.7217, 23.2896, 23.5059, 22.6427, 22.3134, 22.1254, 21.7121, 22.5654, 22.8024, 22.5129,
        23.2226, 24.3524, 23.0094, 23.0527, 22.3719, 22.4988, 21.5093, 21.83, 22.0921, 22.0878, 21.3399, 21.2437,
        20.4524, 19.3972, 19.9219, 19.1126,
    ],
    "saturating": [
        0.0234, 0.1679, 0.2435, 0.3989, 0.4645, 0.5661, 0.633, 0.6488, 0.7317, 0.7718, 0.8304, 0.8165, 0.8794, 0.8635,
        0.8964, 0.9011, 0.9595, 0.9525, 0.9988, 0.9707, 0.9812, 0.9866, 0.9623, 0.977,
    ],
    "flat noise": [
        5.6752, 4.8017, 5.0944, 4.9894, 5.3046, 4.8175, 4.9238, 5.1212, 5.0515, 4.5675, 5.4479, 4.3508, 4.3994, 4.3588,
        5.4835, 4.8197, 4.5145, 4.432, 5.2106, 4.4726, 4.364, 5.307, 4.4016, 4.8388, 4.9966, 4.7773, 4.973, 5.6694,
        4.7416, 4.3703,
    ],
}
REFERENCE = [
    # series, (α, β, φ), sum of squared one-step errors, forecast of the next value
    ("growing", (0.3, 0.2, 1.0), 4245.97261710771, 126.74948581099224),
    ("growing", (0.8, 0.1, 1.0), 2349.1543379387017, 140.78839054470416),
    ("growing", (0.5, 0.5, 0.9), 3131.2265810862245, 135.76200302954936),
    ("growing", (0.2, 0.9, 0.8), 3570.490425963536, 120.26311395862182),
    ("falling", (0.3, 0.2, 1.0), 0.008529192865129948, 0.5696513327545556),
    ("falling", (0.8, 0.1, 1.0), 0.01038939506574203, 0.5760945822301687),
    ("falling", (0.5, 0.5, 0.9), 0.010527937788656426, 0.5723150631355296),
    ("falling", (0.2, 0.9, 0.8), 0.02159691755385651, 0.589031777346083),
    ("short", (0.3, 0.2, 1.0), 6.682301795555554, 9.063818666666666),
    ("short", (0.5, 0.5, 0.9), 9.452078222656251, 8.165882812500001),
    ("step", (0.8, 0.1, 1.0), 940.6688327630491, 42.38319874048),
    ("step", (0.2, 0.9, 0.8), 1447.0504084633562, 47.523742351957715),
    ("walk", (0.3, 0.2, 1.0), 47.60525727336729, 19.192787276978276),
    ("walk", (0.5, 0.5, 0.9), 33.18686307062019, 18.834357742098543),
    ("saturating", (0.8, 0.1, 1.0), 0.08931715666220309, 1.0122412383596051),
    ("saturating", (0.5, 0.5, 0.9), 0.017009261247858457, 0.9721575323827439),
    ("flat noise", (0.3, 0.2, 1.0), 7.294497373912496, 4.8912484102312375),
    ("flat noise", (0.2, 0.9, 0.8), 6.136788655571291, 4.923291406002555),
]
OPTIMISED = [
    # series, damped, least sum of squared errors that the reference's optimiser finds
    ("growing", False, 1994.2051465528307), ("growing", True, 1785.266672706929),
    ("falling", False, 0.008146709848464212), ("falling", True, 0.008319081190531714),
    ("short", False, 5.555555578735142), ("step", False, 900.0), ("step", True, 900.0),
    ("walk", False, 27.12933609778453), ("walk", True, 27.1629018034781),
    ("saturating", False, 0.025794634311973128), ("saturating", True, 0.016715926088261394),
    ("flat noise", False, 7.123924995091338), ("flat noise", True, 4.417080103741234),
]
# fmt: on


@pytest.mark.parametrize(("name", "parameters", "error", "following"), REFERENCE)
def test_with_given_parameters_the_figures_are_the_references(
    name: str, parameters: tuple[float, float, float], error: float, following: float
) -> None:
    row = _best(np.array([SERIES[name]]), np.array([[parameters]]))[0]
    assert row[:3].tolist() == list(parameters)
    assert row[3] == pytest.approx(error, rel=1e-9)
    assert row[4] == pytest.approx(following, rel=1e-9)


@pytest.mark.parametrize(("name", "damped", "error"), OPTIMISED)
def test_the_grid_fits_as_well_as_the_references_optimiser(name: str, damped: bool, error: float) -> None:
    fit = fits(np.array([SERIES[name]]), damped=damped)[0]
    assert fit.squared_error <= 1.03 * error
    assert 0 <= fit.alpha <= 1
    assert 0 <= fit.beta <= 1
    assert (fit.phi < 1) == damped


def test_the_second_search_looks_between_the_points_of_the_first() -> None:
    parameters = [p for s in SERIES.values() for f in fits(np.array([s]), damped=False) for p in (f.alpha, f.beta)]
    assert any(p * 8 != round(p * 8) for p in parameters)


def test_what_a_fit_says_of_itself_is_true() -> None:
    for name, series in SERIES.items():
        fit = fits(np.array([series]), damped=True)[0]
        row = _best(np.array([series]), np.array([[[fit.alpha, fit.beta, fit.phi]]]))[0]
        assert (row[3], row[4]) == pytest.approx((fit.squared_error, fit.forecast), rel=1e-9), name


def test_level_and_trend_start_at_the_first_value_and_the_mean_of_the_first_three_steps() -> None:
    level, trend = initial(np.array([[2.0, 3.0, 9.0, 11.0, 99.0]]))
    assert (level[0], trend[0]) == (2.0, 3.0)
    level, trend = initial(np.array([[2.0, 6.0]]))
    assert (level[0], trend[0]) == (2.0, 4.0)


def test_a_line_is_continued() -> None:
    assert forecasts([[5.0 + 3 * i for i in range(10)]], damped=False) == pytest.approx([35.0])


def test_a_damped_line_falls_behind_the_line() -> None:
    line = [0.1 * i for i in range(8)]
    assert line[-1] < forecasts([line], damped=True)[0] < 0.8


@pytest.mark.parametrize("damped", [False, True])
@pytest.mark.parametrize("value", [0.0, 7.25, -3.0, 1e-300, 1e300])
@pytest.mark.parametrize("length", [1, 2, FEWEST, 60])
def test_a_constant_series_stays_constant(value: float, length: int, damped: bool) -> None:
    assert forecasts([[value] * length], damped=damped) == pytest.approx([value])


@pytest.mark.parametrize("damped", [False, True])
def test_a_series_too_short_for_a_trend_forecasts_its_last_value(damped: bool) -> None:
    for length in range(1, FEWEST):
        assert forecasts([[float(2**i) for i in range(length)]], damped=damped) == [2.0 ** (length - 1)]


def test_values_that_are_not_finite_are_left_out() -> None:
    nan, inf = math.nan, math.inf
    clean = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert forecasts([[nan, 1.0, 2.0, inf, 3.0, 4.0, -inf, 5.0, 6.0, nan]], damped=False) == forecasts(
        [clean], damped=False
    )
    assert forecasts([[1.0, inf]], damped=True) == [1.0]


def test_a_series_without_any_value_forecasts_nothing() -> None:
    found = forecasts([[], [math.nan, math.inf], [4.0]], damped=False)
    assert math.isnan(found[0])
    assert math.isnan(found[1])
    assert found[2] == 4.0
    assert forecasts([], damped=True) == []


NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)


@QUICK
@given(st.lists(st.lists(NUMBERS, max_size=12), max_size=6), st.booleans())
def test_series_fitted_together_are_fitted_as_if_alone(series: list[list[float]], damped: bool) -> None:
    together = forecasts(series, damped=damped)
    alone = [forecasts([s], damped=damped)[0] for s in series]
    assert together == pytest.approx(alone, nan_ok=True)


@QUICK
@given(st.lists(NUMBERS, min_size=4, max_size=12), st.sampled_from([1e-9, 0.5, 8.0, 1e9]))
def test_a_forecast_does_not_depend_on_the_unit_of_measurement(series: list[float], factor: float) -> None:
    here = fits(np.array([series]), damped=False)[0].squared_error
    there = fits(np.array([series]) * factor, damped=False)[0].squared_error
    assert there == pytest.approx(here * factor * factor, rel=1e-6, abs=1e-12 * factor * factor)
