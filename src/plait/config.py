"""Every knob, its default and why.  A `Config` is frozen; each field can also be set as `spark.plait.<field>`.

>>> Config(tasks=4).tasks
4
>>> Config(probe="random")
Traceback (most recent call last):
    ...
plait.errors.ConfigError: [CONFIG] probe='random' is not known — use one of: factorised, iterative
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.errors import ConfigError
from plait.query.durations import parse_duration

KEY_GROUPS = 1024
"""Key groups per store: the finest grain in which tasks can own a store.  Part of the checkpoint format."""

LEAST_MEMORY = 64 << 20
"""The smallest memory_limit."""

PROBES = ("factorised", "iterative")
ORDERERS = ("fixed", "selectivity_first", "greedy", "dp_pick")
DRIVER_POLICIES = (
    "registration",
    "timestamp",
    "round_robin",
    "consumption_rate",
    "initial_output_size",
    "output_rate",
)
COST_MODELS = ("engine", "recursive")
COST_VARIANTS = ("full", "query_cost_only", "match_cost_only", "no_smoothing")
SHARING = ("independent", "naive", "ilp", "auto")
GROUPS = ("auto", "one")
STORES = ("auto", "all")


@dataclass(frozen=True, slots=True)
class Config:
    """How an engine runs.  Any field may differ from one run to the next on the same checkpoint."""

    tasks: int | str | None = None
    """Join tasks per epoch; None takes Spark's default parallelism (the cores, on one machine), or a single task where
    little arrives and exchanges between tasks would take longer than more tasks save.  `auto` begins like that, and
    takes more while epochs take longer than `latency_target`."""

    latency_target: str = "5 s"
    """With `tasks="auto"`, what an epoch may take: beyond it there are twice as many tasks, up to as many as run at the
    same time, then as many as Spark's dynamic allocation could run.  Half as many after some epochs of a quarter."""

    probe: str = "factorised"
    """`factorised` looks consecutive probes on one key up together and expands once (paper 004);
    `iterative` expands after every probe, as papers 000 and 002 do."""

    orderer: str = "dp_pick"
    """Who chooses the probe orders: `dp_pick`, `greedy`, `selectivity_first`, or `fixed` for the written order."""

    driver_policy: str = "consumption_rate"
    """Which input drives first inside an epoch: `registration` (as the streams were registered), `timestamp`,
    `round_robin`, `consumption_rate`, `initial_output_size` or `output_rate`.  The default did the least work in
    `python -m benchmarks drivers`."""

    replan_epochs: int = 4
    """T, in epochs: how often orders are re-chosen.  0 keeps them for ever."""

    replan_seconds: float | None = None
    """T in seconds, instead of `replan_epochs`."""

    replan_gain: float = 0.05
    """How much cheaper an order must be expected to be, to replace the one in force: below it orders would flap."""

    sharing: str = "naive"
    """What several queries have in common.  `independent`: nothing; each has stores, trees and result files of its own.
    `naive`: probe orders are chosen for each join structure by itself, and queries share stores and what their
    orders have in common.  `ilp`: orders are chosen together, so that they have more in common (paper 001).  `auto`:
    the same while the integer program answers within `sharing_seconds`, and by iterative dynamic programming (paper
    004) beyond."""

    groups: str = "one"
    """Whether queries of one structure may run apart.  `one`: all of them share everything.  `auto`: in groups, by what
    sampled rows say sharing costs and saves (paper 004)."""

    regroup_share: float = 0.5
    """The share of the queries that may come or go before groups, and the incremental optimiser's orders, are
    computed from scratch instead of being adapted."""

    stores: str = "auto"
    """By which keys streams are stored.  `all`: by every key that any probe order might use.  `auto`: without those for
    which a wider key stands, as far as probe orders can do without; and, from the end of the first period on, without
    those that cost more than searching another store of the stream.  A live query never gets them back."""

    sharing_seconds: float = 0.5
    """What choosing orders together may take each time; the best that is found by then is used."""

    history_periods: int = 60
    """L: periods of statistics that forecasts are made from.  Paper 000 finds no gain beyond 60."""

    cost_model: str = "engine"
    """`engine` prices orders as this engine runs them (by `probe`); `recursive` as paper 000's Eq. 8 does."""

    cost_variant: str = "full"
    """Paper 000's ablations: `query_cost_only`, `match_cost_only`, `no_smoothing`."""

    fan_in: int = 4
    """Runs of one tier that are merged into one of the next: fewer runs to probe against more rewriting."""

    memory_limit: str | None = None
    """What the engine's own caches and buffers hold per executor, at most, as Spark writes sizes (`512m`, `2g`); None
    is a sixteenth of the memory, up to `2g`.  Segments are read through the page cache, which is not counted.  Larger
    epochs are worked through in slices."""

    merge_share: float = 0.25
    """How much of an epoch's time merging may take: what is not merged by then goes on in the next epoch."""

    compress_above: str | None = None
    """State larger than this is written in compressed blocks, with Bloom filters.  None is three quarters of what the
    page cache can have on the driver's machine."""

    chunk_rows: int = 1 << 18
    """Result rows materialised at a time: what a hot key can cost in memory, and what fits the CPU cache."""

    max_future: str | None = "1 day"
    """An event time further ahead of the clock than this moves no watermark: one wrong row would let all state expire.
    Such rows are joined like others, and counted.  A clock that jumps further ahead while the engine runs ends no TTL.
    None lets every row move it, and believes the clock."""

    on_missing_query: str = "refuse"
    """What a start does about a query, stream or table that lives on the checkpoint and that the program neither
    defines nor drops: `refuse`, or `drop` it."""

    on_query_error: str = "auto"
    """What comes of a query whose sink, answer or expression fails.  `park`: its rows are kept until it is resumed, and
    the others go on.  `stop`: the run ends with its error.  `auto` parks it while another query goes on, and stops
    where none would."""

    parked_epochs: int = 1000
    """Epochs that a parked query may miss before their rows are let go and it is `failed`."""

    parked_bytes: str = "1g"
    """Bytes of result files that are kept for a parked query at most."""

    snapshot_every: int = 16
    """Every n-th manifest is a full snapshot, so that a restart reads at most n of them."""

    gc_grace_seconds: float = 600.0
    """Age after which a file that no manifest names is deleted: longer than any task can still be writing."""

    sync: bool = True
    """fsync files before they are named in a manifest.  Off, a power cut (not a crash) can lose a commit."""

    state_dir: str | None = None
    """Where segments live; None is `<checkpoint>/state`.  A tmpfs path gives a store in memory; a URI is read through
    the cache."""

    cache_dir: str | None = None
    """Where every host caches segments that rest behind a URI; None is a directory for temporary files."""

    cache_limit: str | None = None
    """What the files in a host's cache may weigh together, such as `10g`; None is a quarter of the disk's free space,
    up to 64 GB."""

    history: int = 128
    """Progress reports kept for `run.recent_progress`."""

    def __post_init__(self) -> None:
        choices = (
            ("probe", PROBES),
            ("orderer", ORDERERS),
            ("driver_policy", DRIVER_POLICIES),
            ("cost_model", COST_MODELS),
            ("cost_variant", COST_VARIANTS),
            ("sharing", SHARING),
            ("stores", STORES),
            ("groups", GROUPS),
            ("on_missing_query", ("refuse", "drop")),
            ("on_query_error", ("auto", "park", "stop")),
        )
        for name, known in choices:
            if (value := getattr(self, name)) not in known:
                raise ConfigError("CONFIG", f"{name}={value!r} is not known", f"use one of: {', '.join(known)}")
        if isinstance(self.tasks, str) and self.tasks != "auto":
            raise ConfigError("CONFIG", f"tasks={self.tasks!r} is not known", "give a number, None or auto")
        if not isinstance(self.tasks, str):
            _in_range("tasks", self.tasks, 1, KEY_GROUPS, optional=True)
        _in_range("replan_epochs", self.replan_epochs, 0, 1_000_000)
        _in_range("replan_seconds", self.replan_seconds, 0, float("inf"), optional=True)
        _in_range("replan_gain", self.replan_gain, 0, 1)
        _in_range("sharing_seconds", self.sharing_seconds, 0, 3600)
        _in_range("regroup_share", self.regroup_share, 0, 1)
        _in_range("history_periods", self.history_periods, 1, 100_000)
        _in_range("fan_in", self.fan_in, 2, 64)
        _in_range("chunk_rows", self.chunk_rows, 1, 1 << 26)
        _in_range("merge_share", self.merge_share, 0.01, 0.9)
        if self.memory_limit is not None and bytes_of("memory_limit", self.memory_limit) < LEAST_MEMORY:
            raise ConfigError(
                "CONFIG",
                f"memory_limit={self.memory_limit!r} is below the least that works",
                f"give at least {LEAST_MEMORY >> 20}m",
            )
        if self.compress_above is not None:
            bytes_of("compress_above", self.compress_above)
        if self.cache_limit is not None:
            bytes_of("cache_limit", self.cache_limit)
        for name, text in (("max_future", self.max_future), ("latency_target", self.latency_target)):
            try:
                _ = None if name == "max_future" and text is None else parse_duration(str(text))
            except ValueError as error:
                raise ConfigError("CONFIG", f"{name}: {error}", 'write, for example, "1 day" or "5 s"') from None
        _in_range("parked_epochs", self.parked_epochs, 1, 100_000)
        bytes_of("parked_bytes", self.parked_bytes)
        _in_range("snapshot_every", self.snapshot_every, 1, 10_000)
        _in_range("gc_grace_seconds", self.gc_grace_seconds, 0, float("inf"))
        _in_range("history", self.history, 1, 1_000_000)

    @property
    def max_future_us(self) -> int | None:
        """`max_future` in microseconds."""
        return None if self.max_future is None else parse_duration(self.max_future)

    @property
    def latency_seconds(self) -> float:
        """`latency_target` in seconds."""
        return parse_duration(self.latency_target) / 1e6

    def with_spark_settings(self, settings: Mapping[str, str]) -> Config:
        """Fields named `spark.plait.<field>` in `settings` override those of this config.

        >>> Config().with_spark_settings({"spark.plait.tasks": "3"}).tasks
        3
        """
        known = {f.name: f for f in dataclasses.fields(self)}
        changes: dict[str, Any] = {}
        for key, text in settings.items():
            if not key.startswith("spark.plait."):
                continue
            name = key.removeprefix("spark.plait.")
            if name not in known:
                raise ConfigError("CONFIG", f"{key} is not a setting of Plait", f"known: {', '.join(sorted(known))}")
            changes[name] = _parse(key, text, str(known[name].type))
        return dataclasses.replace(self, **changes)


def refuse_unproven(config: Config) -> None:
    """Raises for what has once given wrong rows and has not been shown to be right since."""
    if config.groups != "one":
        raise ConfigError(
            "UNPROVEN",
            f"groups={config.groups!r} is not released: a long random test of it has given wrong rows",
            "leave `groups` at `one`",
        )


def bytes_of(name: str, text: str) -> int:
    """A size as Spark writes it, in bytes.

    >>> bytes_of("memory_limit", "64m")
    67108864
    """
    found = re.fullmatch(r"(\d+)\s*([kmgt]?)i?b?", str(text).strip().lower())
    if found is None:
        raise ConfigError("CONFIG", f"{name}={text!r} is not a size", "write it as 512m or 2g")
    return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}[found[2]]


def _in_range(name: str, value: float | None, low: float, high: float, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError("CONFIG", f"{name}={value!r} is out of range", f"give a number from {low:g} to {high:g}")


def _parse(key: str, text: str, kind: str) -> Any:
    try:
        if "None" in kind and text.lower() in ("", "none"):
            return None
        if kind.startswith("bool"):
            return {"true": True, "false": False}[text.lower()]
        if kind.startswith("int") and not ("str" in kind and text == "auto"):
            return int(text)
        return float(text) if kind.startswith("float") else text
    except (ValueError, KeyError):
        raise ConfigError("CONFIG", f"{key}={text!r} cannot be read as {kind}", "correct the value") from None
