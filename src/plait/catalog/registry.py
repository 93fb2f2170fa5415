"""What a checkpoint was made for: streams, queries and stores.  A different past is refused, old and new shown."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from plait.errors import CheckpointError
from plait.query.graph import JoinGraph
from plait.query.plan import Plan, Store
from plait.query.relation import Relation

_REMEDY = "restore the old definition, or start with a new checkpoint directory"


def catalog_of(plan: Plan, graphs: Mapping[str, JoinGraph], relations: Mapping[str, Relation]) -> dict[str, Any]:
    """What must stay the same for the state to keep its meaning."""
    used = {alias.relation for graph in graphs.values() for alias in graph.aliases}
    return {
        "queries": {name: " ".join(graph.sql.split()) for name, graph in sorted(graphs.items())},
        "streams": {
            name: {
                "columns": [list(c) for c in relations[name].columns],
                "event time": relations[name].time_column,
            }
            for name in sorted(used)
        },
        "stores": {
            store.id: {
                "key": [list(pair) for pair in zip(store.key.columns, store.key.types, strict=True)],
                "columns": [[c.name, c.type] for c in store.columns],
                "masked": store.masked,
                "ttl": store.ttl_us is not None,
                **_needed(plan, store),
            }
            for store in plan.stores
        },
        "filters": {i.relation: list(i.filters) for i in plan.inputs},
    }


def _needed(plan: Plan, store: Store) -> dict[str, str]:
    """Which rows outlive the TTL was decided when they arrived; absent where the TTL is all there is."""
    needed = plan.input_by_relation[store.relation].needed
    return {} if needed is None else {"needed": needed}


def refuse_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises, with old and new shown, unless `now` is what the checkpoint was made for."""
    for name, sql in before["queries"].items():
        if now["queries"].get(name, sql) != sql:
            raise _changed("QUERY_CHANGED", f"query {name!r}", sql, now["queries"][name])
    if before["queries"].keys() != now["queries"].keys():
        old, new = (", ".join(sorted(c["queries"])) for c in (before, now))
        raise _changed("QUERIES_CHANGED", "the set of queries", old, new)
    for name, schema in before["streams"].items():
        if now["streams"].get(name) != schema:
            raise _changed("SCHEMA_CHANGED", f"stream {name!r}", *map(_text, (schema, now["streams"].get(name))))
    for part, code in (("stores", "KEY_CHANGED"), ("filters", "FILTER_CHANGED")):
        for name, value in before[part].items():
            if now[part].get(name) != value:
                raise _changed(code, f"{part[:-1]} {name!r}", *map(_text, (value, now[part].get(name))))
        if before[part].keys() != now[part].keys():
            raise _changed(code, f"the set of {part}", *(", ".join(sorted(c[part])) for c in (before, now)))


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _changed(code: str, what: str, old: str, new: str) -> CheckpointError:
    # Only the part that differs, with a little around it, when both are long.
    if len(old) + len(new) > 800:
        match = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        first = next(op for op in match if op[0] != "equal")
        old, new = ("… " + t[max(0, i - 60) : i + 340] + " …" for t, i in ((old, first[1]), (new, first[3])))
    cause = f"{what} differs from what this checkpoint was made for; old: {old}; new: {new}"
    return CheckpointError(code, cause, _REMEDY)
