"""Plait: adaptive, shared, multi-way stream joins on Apache Spark.

A query's way (planning; plain Python, frozen data):

    SQL text → sql/ (Catalyst plan → JoinGraph) → catalog/ (which queries live: Catalog)
             → stats/ (what was observed, what is forecast) → order/ (one query)
             → share/ (many queries: what is stored: Layout; who probes what: Plan)

A row's way (`runtime/driver/epoch.py` holds it as one visible tuple of steps; an epoch is one micro-batch):

    source → bucketise → exchange → append to its store → probe by the plan, hop by hop
           → materialise → commit (manifest) → sinks → replan → observe → next epoch's catalog, layout, plan

Planning and execution never import each other: they meet in `query/`; `engine.py` and `admission.py` hold both.
"""

from plait.config import Config
from plait.engine import Engine
from plait.errors import (
    CheckpointError,
    ConfigError,
    CorruptionError,
    PipelineError,
    PlaitError,
    QueryError,
    RecomputationWarning,
    SourceError,
    StorageError,
    StreamError,
)
from plait.queries import QueryHandle
from plait.run import Run
from plait.runtime.answers.state_frame import read_state
from plait.runtime.spark.session import session

__version__ = "0.1.0"

__all__ = [
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
