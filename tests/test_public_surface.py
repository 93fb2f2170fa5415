"""The public names are a tested list, and the error tree is what its docstring draws."""

from __future__ import annotations

import re

import plait
import plait.errors

SURFACE = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "CorruptionError",
    "Engine",
    "PipelineError",
    "PlaitError",
    "QueryError",
    "QueryHandle",
    "RecomputationWarning",
    "Run",
    "SourceError",
    "StorageError",
    "StreamError",
    "read_state",
    "session",
]


def test_the_public_surface_is_this_list() -> None:
    assert plait.__all__ == SURFACE == sorted(SURFACE)
    assert all(hasattr(plait, name) for name in SURFACE)


def test_every_error_is_drawn_in_the_tree() -> None:
    drawn = set(re.findall(r"^\W*(\w+Error)\b", plait.errors.__doc__ or "", re.MULTILINE))
    defined = {n for n, v in vars(plait.errors).items() if isinstance(v, type) and issubclass(v, plait.PlaitError)}
    assert drawn == defined


def test_an_error_survives_the_way_from_a_worker() -> None:
    import pickle

    error = plait.QueryError("CODE", "cause", "remedy")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.code, copy.cause, copy.remedy) == ("CODE", "cause", "remedy")
    assert type(copy) is plait.QueryError


def test_everything_public_says_what_it_is() -> None:
    for name in SURFACE:
        thing = getattr(plait, name)
        assert thing.__doc__, name
        if isinstance(thing, type):
            for method, value in vars(thing).items():
                if callable(value) and not method.startswith("_"):
                    assert value.__doc__, f"{name}.{method}"
