"""A checkpoint is made for one meaning of SQL, and another one is refused.

State was computed with the meaning of the first start: a key cast to a date in one time zone never meets the same
instant cast in another.  `sql/catalyst/sql_settings.py` reads the settings that say what a text means.
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.errors import CheckpointError
from plait.sql.catalyst.sql_settings import LEGACY


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
