"""Requests of other processes: what is asked for is checked, answered once, and told with an exit code."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from plait.attendant import Attendant
from plait.catalog.catalog import Catalog, QueryEntry
from plait.config import Config
from plait.errors import QueryError
from plait.serve.cli import app
from plait.state.files.storage import LocalFiles
from plait.state.log import requests
from plait.state.log.checkpoint import LOCK, Checkpoint
from plait.state.log.requests import Answer, Request

RUN = CliRunner()


def entry(name: str, sql: str, live_since: int | None = 3) -> QueryEntry:
    return QueryEntry(f"{name}@1", name, sql, "", (name,), "now", "append", {name: {"a": 2}}, 2, live_since)


@dataclass
class Engine:
    """An engine that admits everything but what is called `bad`."""

    catalog_in_force: Catalog = field(default_factory=Catalog)
    carried: list[Request] = field(default_factory=list)

    def carry_out(self, request: Request) -> dict[str, Any] | None:
        if request.name == "bad":
            raise QueryError("SQL", "it is bad", "make it better")
        if request.dry_run:
            return {"name": request.name, "text": "it would be added"}
        self.carried.append(request)
        return None

    def admit(self) -> None:
        for request in self.carried:
            if request.operation == "drop":
                self.catalog_in_force = self.catalog_in_force.without_query(request.name)
            else:
                self.catalog_in_force = self.catalog_in_force.with_query(entry(request.name, request.sql))


@pytest.fixture
def files(tmp_path: Path) -> LocalFiles:
    with Checkpoint(str(tmp_path / "checkpoint"), Config(sync=False)).open() as checkpoint:
        assert isinstance(checkpoint.files, LocalFiles)
    return checkpoint.files


def attending(engine: Engine, files: LocalFiles) -> Attendant:
    return Attendant(engine.carry_out, lambda: engine.catalog_in_force, files, lambda: True)


def answered(files: LocalFiles, id: str) -> Answer:
    found = requests.answer_to(files, id)
    assert found is not None
    return found


def test_a_change_is_answered_once_it_is_part_of_the_catalog(files: LocalFiles) -> None:
    engine = Engine()
    attendant = attending(engine, files)
    request = Request("add", "q", "SELECT 1")
    requests.ask(files, request)
    # The same request once more is no other one.
    requests.ask(files, request)
    attendant.attend()
    attendant.attend()
    assert engine.carried == [request]
    assert requests.answer_to(files, request.id) is None
    engine.admit()
    attendant.attend()
    assert answered(files, request.id) == Answer(True, "live", 3)
    drop = Request("drop", "q")
    requests.ask(files, drop)
    attendant.attend()
    engine.admit()
    attendant.attend()
    assert answered(files, drop.id) == Answer(True, "dropped")


def test_what_is_wrong_is_told_at_once_and_nothing_else_suffers(files: LocalFiles) -> None:
    engine = Engine()
    wrong, right = Request("add", "bad", "x"), Request("add", "good", "y")
    code = Request("add", "code", "z", sink={"kind": "foreach_batch", "options": {"fn": "os.system"}})
    for request in (wrong, right, code):
        requests.ask(files, request)
    attending(engine, files).attend()
    assert answered(files, wrong.id) == Answer(False, code="SQL", cause="it is bad", remedy="make it better")
    assert "foreach_batch" in answered(files, code.id).cause
    assert engine.carried == [right]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00garbage",
        b"[]",
        b'{"operation": "add"}',
        b'{"operation": "shutdown", "name": "q", "id": "ID"}',
        b'{"operation": "add", "name": 7, "id": "ID"}',
        b'{"operation": "add", "name": "q", "id": "another"}',
        b'{"operation": "add", "name": "q", "sink": "parquet", "id": "ID"}',
        b'{"operation": "add", "name": "q", "more": 1, "id": "ID"}',
        b'{"operation": "add", "name": "q", "max_rows_per_epoch": "ten", "id": "ID"}',
        b'{"operation": "add", "name": "q", "max_state": 5, "id": "ID"}',
        b'{"operation": "add", "name": "q", "dry_run": [], "id": "ID"}',
        b"[" * 100_000,
        b" " * (requests.MOST_BYTES + 1),
    ],
    ids=range(14),
)
def test_garbage_is_answered_and_not_carried_out(files: LocalFiles, content: bytes) -> None:
    id = "0" * 32
    files.make_directory(requests.FOLDER)
    files.put_if_absent(f"requests/{id}.json", content.replace(b"ID", id.encode()))
    engine = Engine()
    attending(engine, files).attend()
    assert answered(files, id).code == "REQUEST"
    assert not engine.carried


def test_a_dry_run_is_answered_at_once_and_not_carried_out(files: LocalFiles) -> None:
    engine, request = Engine(), Request("add", "q", "SELECT 1", dry_run=True)
    requests.ask(files, request)
    attending(engine, files).attend()
    assert answered(files, request.id).preview == {"name": "q", "text": "it would be added"}
    assert not engine.carried
    # Nothing is left for the next start, either.
    found = RUN.invoke(app, ["add", files.root, "q", "SELECT 1", "--dry-run", "--queue"])
    assert found.exit_code == 3
    assert len(files.names(requests.FOLDER)) == 2


def test_links_and_other_names_are_left_alone(files: LocalFiles, tmp_path: Path) -> None:
    files.make_directory(requests.FOLDER)
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"operation": "add", "name": "q", "id": "1" * 32}))
    os.symlink(secret, files.where(f"requests/{'1' * 32}.json"))
    for name in ("../x.json", "q.json", f"{'2' * 32}.txt"):
        Path(files.where(requests.FOLDER), Path(name).name).write_text("{}")
    engine = Engine()
    attending(engine, files).attend()
    assert not engine.carried
    assert "plain file" in answered(files, "1" * 32).cause


def test_answered_requests_are_deleted_after_a_while(files: LocalFiles) -> None:
    request = Request("add", "bad", "x")
    requests.ask(files, request)
    attending(Engine(), files).attend()
    requests.tidy(files, time.time() - 3600)
    assert len(files.names(requests.FOLDER)) == 2
    requests.tidy(files, time.time() + 10)
    assert files.names(requests.FOLDER) == []


def test_an_engine_that_does_not_run_is_an_exit_code_of_its_own_and_changes_can_be_left_for_it(
    files: LocalFiles,
) -> None:
    found = RUN.invoke(app, ["add", files.root, "q", "SELECT 1"])
    assert found.exit_code == 3
    assert "--queue" in found.stderr
    assert files.names(requests.FOLDER) == []
    assert RUN.invoke(app, ["add", files.root, "q", "SELECT 1", "--queue", "--sink", "noop"]).exit_code == 0
    ((_, request),) = requests.waiting(files)
    assert isinstance(request, Request)
    assert (request.name, request.sql, request.sink) == ("q", "SELECT 1", {"kind": "noop", "options": {}})


def test_without_an_answer_the_request_is_withdrawn(files: LocalFiles) -> None:
    Path(files.where(LOCK)).write_text(f"pid {os.getpid()} on host {os.uname().nodename}\n")
    found = RUN.invoke(app, ["drop", files.root, "q", "--timeout", "0.2"])
    assert found.exit_code == 4
    assert files.names(requests.FOLDER) == []
    asked = RUN.invoke(app, ["drop", files.root, "q", "--no-wait", "--json"])
    assert asked.exit_code == 0
    assert json.loads(asked.stdout)["asked"] == next(requests.waiting(files))[0]


def test_a_closed_checkpoint_is_held_by_nobody(tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(tmp_path / "c"), Config(sync=False)).open()
    assert json.loads(RUN.invoke(app, ["ls", checkpoint.path, "--json"]).stdout)["running"]
    checkpoint.close()
    assert not json.loads(RUN.invoke(app, ["ls", checkpoint.path, "--json"]).stdout)["running"]


@pytest.mark.parametrize(
    "words",
    [
        ["add", "CHECKPOINT", "q", "@/nowhere/at/all.sql"],
        ["add", "CHECKPOINT", "q", "SELECT 1", "--option", "path=x"],
        ["add", "CHECKPOINT", "q", "SELECT 1", "--sink", "parquet", "--option", "path"],
        ["ls", "/nowhere/at/all"],
        ["show", "CHECKPOINT", "q"],
    ],
)
def test_what_cannot_be_asked_for_is_refused_with_the_reason(files: LocalFiles, words: list[str]) -> None:
    found = RUN.invoke(app, [files.root if word == "CHECKPOINT" else word for word in words])
    assert found.exit_code == 1
    assert found.exception is not None
    assert getattr(found.exception, "remedy", "")
