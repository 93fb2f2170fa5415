"""The hint `STATE_TTL('o', '1 day', 'l', '12h')`: how long the rows of an alias can be matched.

Catalyst keeps a hint it does not know until analysis, and drops it there with a warning; so it is read from the
*parsed* plan, and taken out of it.  Names are those of the query: its aliases, or the streams' own names.  Flink writes
pairs with `=`, which Spark's grammar does not allow inside a hint: that mistake is answered with the right spelling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from plait.errors import QueryError
from plait.query.durations import parse_duration
from plait.sql.catalyst.scala import items

NAME = "STATE_TTL"
_HINT = "org.apache.spark.sql.catalyst.plans.logical.UnresolvedHint"
_FLINK = re.compile(rf"/\*\+[^*]*\b{NAME}\s*\([^)]*[=:]", re.IGNORECASE)
_SPELLING = f"write /*+ {NAME}('alias', '1 day') */, with more pairs or more hints for more aliases"


def read_ttls(parsed: Any) -> list[tuple[str, str]]:
    """(name, TTL) of all hints in a parsed plan, sub-queries and CTEs included."""
    return [pair for parameters in _hints(json.loads(parsed.toJSON())) for pair in _pairs(parameters)]


def _hints(tree: Any) -> Iterator[list[Any]]:
    """The parameters of every STATE_TTL anywhere in the plan."""
    if isinstance(tree, dict):
        if tree.get("class") == _HINT and tree["name"].upper() == NAME:
            yield tree.get("parameters", [])
        tree = list(tree.values())
    if isinstance(tree, list):
        for part in tree:
            yield from _hints(part)


def _pairs(parameters: list[Any]) -> Iterator[tuple[str, str]]:
    texts = [_text(parameter) for parameter in parameters]
    known = [text for text in texts if text is not None]
    if not texts or len(texts) % 2 or len(known) < len(texts):
        shown = ", ".join("…" if text is None else repr(text) for text in texts)
        raise QueryError("TTL_HINT", f"{NAME}({shown}) does not hold pairs of a name and a TTL in quotes", _SPELLING)
    yield from zip(known[::2], known[1::2], strict=True)


def _text(parameter: Any) -> str | None:
    """A text in quotes, or a bare name as in BROADCAST(o); None for anything else."""
    (root, *below) = parameter if isinstance(parameter, list) else [parameter]
    kind = str(root.get("class", "")).rsplit(".", 1)[-1]
    if below:
        return None
    if kind == "UnresolvedAttribute":
        return str(root["nameParts"]).strip("[]")
    return str(root["value"]) if kind == "Literal" and root.get("dataType") == "string" else None


def without_ttls(parsed: Any, to_seq: Any) -> Any:
    """The plan without these hints, so that Spark does not warn of them; those inside CTEs stay and do no harm."""
    children = [without_ttls(child, to_seq) for child in items(parsed.children())]
    if parsed.getClass().getSimpleName() == "UnresolvedHint" and parsed.name().upper() == NAME:
        return children[0]
    return parsed.withNewChildren(to_seq(children)) if children else parsed


def ttl_by_alias(pairs: Sequence[tuple[str, str]], streams: Mapping[str, str]) -> dict[str, int]:
    """The TTLs in microseconds by alias; `streams` are the query's aliases and what they read.

    >>> ttl_by_alias([("O", "1d"), ("lines", "12h")], {"o": "orders", "l": "lines", "m": "lines"})
    {'o': 86400000000, 'l': 43200000000, 'm': 43200000000}
    """
    found: dict[str, int] = {}
    for name, text in pairs:
        try:
            ttl_us = parse_duration(text)
        except ValueError as error:
            raise QueryError(
                "TTL", f"the TTL of {name} in {NAME}: {error}", "write, for example, '7 days' or '12h'"
            ) from error
        for alias in _named(name, streams):
            if found.setdefault(alias, ttl_us) != ttl_us:
                cause = f"{NAME} gives {alias} two TTLs, {found[alias] / 1e6:g} s and {ttl_us / 1e6:g} s"
                raise QueryError("TTL_CONFLICT", cause, "leave one of them")
    return found


def _named(name: str, streams: Mapping[str, str]) -> list[str]:
    """The alias of that name, or else all aliases of the stream of that name."""
    for of_what in (dict(zip(streams, streams, strict=True)), streams):
        aliases = [alias for alias, called in of_what.items() if called.lower() == name.lower()]
        if aliases:
            return aliases
    known = ", ".join(dict.fromkeys([*streams, *streams.values()]))
    raise QueryError("TTL_HINT", f"{NAME} names {name}, which this query does not read", f"use one of: {known}")


def spelling(sql: str) -> str | None:
    """The remedy for a text that Spark could not parse, if it spells the hint as Flink does."""
    return _SPELLING if _FLINK.search(sql) else None
