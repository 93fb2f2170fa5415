"""The settings of a session that say what SQL means; what only says how fast, how large or how pretty is left out.

Zones with one fixed offset are the same under all their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
