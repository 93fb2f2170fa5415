"""What Spark's settings make of SQL: a checkpoint is made for one meaning, and another one is refused.

State was computed with the meaning of the first start: a key cast to a date in one time zone never meets the same
instant cast in another.  `meaning` reads the settings that say what a text means; what only says how fast, how large or
how pretty is none of them.  Zones with one fixed offset are the same under all their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import CheckpointError

ZONE = "spark.sql.session.timeZone"
LEGACY = "spark.sql.legacy."

SETTINGS = (
    ZONE,
    "spark.sql.ansi.enabled",
    "spark.sql.ansi.doubleQuotedIdentifiers",
    "spark.sql.ansi.relationPrecedence",
    "spark.sql.caseSensitive",
    "spark.sql.decimalOperations.allowPrecisionLoss",
    "spark.sql.mapKeyDedupPolicy",
    "spark.sql.parser.escapedStringLiterals",
    "spark.sql.timestampType",
)
"""Settings of which every value is recorded; of `spark.sql.legacy.…` those that are not at their defaults."""


def meaning(spark: Any) -> dict[str, str]:
    """The settings of a session that change what SQL means, and their values."""
    java = spark._jsparkSession.conf()
    # Of a setting that is not set, this gives Spark's default; `spark.conf.get` would give the caller's.
    known = {name: java.getOption(name) for name in SETTINGS}
    found = {name: _plain(value.get()) for name, value in known.items() if value.isDefined()}
    if ZONE in found:
        found[ZONE] = _zone(spark, found[ZONE])
    set_here: Mapping[str, str] = spark.conf.getAll
    for name, value in set_here.items():
        if name.startswith(LEGACY) and _plain(value) != _default(spark, name):
            found[name] = _plain(value)
    return dict(sorted(found.items()))


def refuse_changed_meaning(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises, with old and new shown, unless SQL means what it did when the checkpoint was made."""
    changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    # A setting that an older or newer Spark does not know has the meaning that it always had.
    changed = [name for name in changed if name.startswith(LEGACY) or (name in before and name in now)]
    if not changed:
        return
    shown = "; ".join(f"{n} was {before.get(n, 'not set')} and is {now.get(n, 'not set')}" for n in changed)
    remedies = " and ".join(
        f'spark.conf.set("{n}", "{before[n]}")' if n in before else f'spark.conf.unset("{n}")' for n in changed
    )
    raise CheckpointError(
        "SETTINGS_CHANGED",
        f"with these settings SQL means something else than when this checkpoint was made: {shown}",
        f"{remedies} before the queries are registered (or in [spark] of the pipeline file), or start with a new "
        "checkpoint directory",
    )


def _zone(spark: Any, name: str) -> str:
    """A name for a zone that all names of a fixed offset share: UTC, Etc/UTC, GMT and Z are UTC."""
    zone_id = spark._jvm.java.time.ZoneId
    normal = str(zone_id.of(name, zone_id.SHORT_IDS).normalized().toString())
    return "UTC" if normal == "Z" else normal


def _default(spark: Any, name: str) -> str | None:
    """The default of a setting that Spark knows."""
    entries = getattr(getattr(spark._jvm.org.apache.spark.sql.internal, "SQLConf$"), "MODULE$")
    entry = entries.getConfigEntry(name)
    return None if entry is None else _plain(entry.defaultValueString())


def _plain(value: Any) -> str:
    """Spark takes truth values in any case."""
    text = str(value)
    return text.lower() if text.lower() in ("true", "false") else text
