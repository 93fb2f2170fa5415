"""Requests of other processes: files in a checkpoint, answered beside them.  No server is needed.

    requests/<id>.json           what is asked for, put if absent: the same request twice is one
    requests/<id>.answer.json    what came of it, put if absent

Whoever can write into a checkpoint can ask; checkpoints are private to their user.  What is asked for is checked like
anything that comes from outside: a request that cannot be read is answered with an error, one that is too large or a
link is not opened.  Answered requests are deleted after a while, both files.
"""

from __future__ import annotations

import json
import os
import re
import stat
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from plait.errors import CheckpointError
from plait.state.files.storage import Files

FOLDER = "requests"
MOST_BYTES = 1 << 20
"""Of a request: SQL texts are much smaller."""
MOST_KEPT_SECONDS = 3600.0
"""How long an answered request stays for its sender to read the answer."""
OPERATIONS = ("add", "drop", "replace", "resume")

_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Request:
    """A change that another process asks for."""

    operation: str
    name: str
    sql: str = ""
    since: str | None = None
    output_mode: str | None = None
    sink: Mapping[str, Any] | None = None
    """Kind and options; None keeps the rows in the checkpoint."""
    skip: bool = False
    """Of `resume`: without what the query missed."""
    max_rows_per_epoch: int | None = None
    max_state: str | None = None
    """Limits as `engine.query` takes them; of `resume`, others than before, if there are any."""
    dry_run: bool = False
    """Of `add` and `replace`: it is only told what the change would do."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def to_json(self) -> bytes:
        """The content of its file."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class Answer:
    """What came of a request."""

    ok: bool
    status: str = ""
    """Of the query afterwards."""
    epoch: int | None = None
    """The first epoch that runs with the change."""
    code: str = ""
    cause: str = ""
    remedy: str = ""
    preview: Mapping[str, Any] | None = None
    """What a change would do that was not to be made."""

    def to_json(self) -> bytes:
        """The content of its file."""
        return json.dumps(asdict(self)).encode()


def ask(files: Files, request: Request) -> None:
    """Leaves a request; nothing happens if it is there already."""
    files.make_directory(FOLDER)
    files.put_if_absent(_name(request.id), request.to_json())


def answer_to(files: Files, id: str) -> Answer | None:
    """The answer to a request; None while there is none."""
    data = files.read(_answer(id))
    if data is None:
        return None
    try:
        return Answer(**json.loads(data))
    except (ValueError, TypeError) as error:
        raise CheckpointError("REQUEST", f"the answer to request {id} cannot be read: {error}", "ask again") from error


def put_answer(files: Files, id: str, answer: Answer) -> None:
    """Answers a request, once."""
    files.put_if_absent(_answer(id), answer.to_json())


def withdraw(files: Files, id: str) -> None:
    """Takes a request back that has no answer."""
    files.delete(_name(id))


def waiting(files: Files) -> Iterator[tuple[str, Request | Answer]]:
    """The requests without an answer, by id; of those that cannot be read, the answer that they get."""
    names = set(files.names(FOLDER))
    for name in sorted(names):
        id, _, rest = name.partition(".")
        if rest == "json" and _ID.fullmatch(id) and f"{id}.answer.json" not in names:
            yield id, _read(files, id)


def tidy(files: Files, older_than: float) -> None:
    """Deletes requests that were answered before this time, with their answers."""
    for name in files.names(FOLDER):
        id, _, rest = name.partition(".")
        if rest == "answer.json" and _ID.fullmatch(id) and files.delete_older(_answer(id), older_than):
            files.delete(_name(id))


def _read(files: Files, id: str) -> Request | Answer:
    def refused(why: str) -> Answer:
        return Answer(False, code="REQUEST", cause=f"request {id} {why}", remedy="use `plait add`, `drop` or `replace`")

    if files.local:
        found = os.lstat(files.where(_name(id)))
        if not stat.S_ISREG(found.st_mode):
            return refused("is not a plain file")
        if found.st_size > MOST_BYTES:
            return refused(f"is larger than {MOST_BYTES} bytes")
    data = files.read(_name(id)) or b""
    if len(data) > MOST_BYTES:
        return refused(f"is larger than {MOST_BYTES} bytes")
    try:
        request = Request(**json.loads(data))
    except (ValueError, TypeError, RecursionError) as error:
        return refused(f"cannot be read: {error}")
    texts = (request.operation, request.name, request.sql, request.since or "", request.output_mode or "")
    limits = isinstance(request.max_rows_per_epoch, int | None) and isinstance(request.max_state, str | None)
    plain = (
        limits
        and all(isinstance(text, str) for text in texts)
        and all(f in (False, True) for f in (request.skip, request.dry_run))
    )
    if request.id != id or not plain:
        return refused("does not say what it asks for")
    if request.operation not in OPERATIONS:
        return refused(f"asks for {request.operation!r}, which is none of {', '.join(OPERATIONS)}")
    sink = request.sink
    if sink is not None and not (isinstance(sink, dict) and isinstance(sink.get("kind"), str)):
        return refused("names no kind of sink")
    return request


def _name(id: str) -> str:
    return f"{FOLDER}/{id}.json"


def _answer(id: str) -> str:
    return f"{FOLDER}/{id}.answer.json"
