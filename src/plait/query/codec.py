"""Frozen values as JSON values: what the vocabulary's modules say is `known` can be written and read back."""

from __future__ import annotations

import dataclasses
from typing import Any

from plait.query import expr as expressions
from plait.query.expr import Call, ColumnRef, Literal

_CLASSES: dict[str, type] = {}


def known(*kinds: type) -> None:
    """These dataclasses can be decoded, by their names."""
    _CLASSES.update({kind.__name__: kind for kind in kinds})


def encode(value: Any) -> Any:
    """Plan values as JSON values; `decode` gives equal ones back."""
    if isinstance(value, (ColumnRef, Literal, Call)):
        return {"$": "expr", "of": expressions.to_json(value)}
    if dataclasses.is_dataclass(value):
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"$": type(value).__name__, **fields}
    return [encode(v) for v in value] if isinstance(value, tuple) else value


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return tuple(decode(v) for v in value)
    if not isinstance(value, dict):
        return value
    if value["$"] == "expr":
        return expressions.from_json(value["of"])
    return _CLASSES[value["$"]](**{k: decode(v) for k, v in value.items() if k != "$"})
