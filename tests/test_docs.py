"""What the documents say is there: links, files, names, error codes, settings, progress keys, commands."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import plait
from plait.query.progress import Progress
from plait.runtime.driver.sinks import KINDS

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "plait"
DOCS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
CODE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*")

each_document = pytest.mark.parametrize("path", DOCS, ids=lambda p: str(p.relative_to(ROOT)))


def prose(path: Path) -> str:
    """A document without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The fragments that the headings of a Markdown file can be reached by."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, fragment = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), target
        assert ROOT in (file, *file.parents), f"{target} leads out of the repository"
        if fragment:
            assert fragment in anchors(file), target


def mentioned_files(path: Path) -> Iterator[tuple[str, list[Path]]]:
    """Files that a document names in back-quotes, and where they may be."""
    for name in re.findall(r"`(?:python |plait \w+ )?([\w./-]+\.(?:py|toml|md))\b", prose(path)):
        if "/" in name:
            yield name, [p for p in (ROOT / name, SRC / name, path.parent / name) if p.exists()]
        else:
            yield name, [p for top in ("src", "docs", "tests", "examples") for p in (ROOT / top).rglob(name)]


@each_document
def test_every_file_that_is_named_exists(path: Path) -> None:
    missing = [name for name, found in mentioned_files(path) if not found]
    assert not missing


@each_document
def test_every_name_that_is_said_to_be_in_a_file_is_defined_there(path: Path) -> None:
    for name, symbols in re.findall(r"`([\w./]+\.py): ([\w., ]+)`", prose(path)):
        source = next(p for p in (SRC / name, ROOT / name) if p.exists()).read_text()
        for symbol in symbols.split(", "):
            last = symbol.rsplit(".", 1)[-1]
            defined = rf"^\s*(?:(?:def|class) {last}\b|{last}\b.*[:=])"
            assert re.search(defined, source, re.MULTILINE), f"{name}: {symbol}"


@each_document
def test_python_in_documents_is_python(path: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
        compile(block, str(path), "exec")


@each_document
def test_documents_and_examples_know_nothing_of_one_machine(path: Path) -> None:
    for file in (path, *(ROOT / "examples").glob("*.*")):
        found = re.findall(r"(?:/work/|/home/|/root/|/Users/|pypi\.|index-url|localhost)", file.read_text())
        assert not found, file


def raised_codes(top: Path = SRC) -> set[str]:
    """Every error code in a source tree: first arguments of errors, and the tables and helpers that make errors."""
    found: set[str] = set()
    for path in top.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                codes = [text for text in texts if CODE.fullmatch(text)]
                if called == "storage_error":
                    found |= {f"{codes[0]}_FULL", f"{codes[0]}_UNWRITABLE"}
                elif called.endswith("Error") or called in ("_changed", "unseal", "Finding"):
                    found |= set(codes)
            elif isinstance(node, ast.Tuple) and node.elts:
                texts = [e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
                if path.name == "refusals.py" and len(node.elts) == 3 and len(texts) > 1 and CODE.fullmatch(texts[0]):
                    found.add(texts[0])
                found |= {text for text in texts if text.endswith("_CHANGED")}
    return found


def documented_codes(text: str = OPERATIONS, heading: str = "Errors") -> set[str]:
    """Codes in the first column of the tables under a heading."""
    section = text[text.index(f"\n## {heading}\n") :]
    firsts = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
    return {code for first in firsts for code in re.findall(r"`([A-Z0-9_]+)`", first)}


def test_every_error_code_is_documented_and_every_documented_one_exists() -> None:
    raised, documented = raised_codes(), documented_codes()
    assert len(raised) > 60, "the codes are found"
    assert raised - documented == set()
    assert documented - raised == set()


def test_every_error_code_of_the_benchmarks_is_documented_on_their_page() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert raised_codes(ROOT / "benchmarks") == documented_codes(page, "Errors of the benchmarks")


def test_codes_in_the_sql_page_are_real() -> None:
    table = (ROOT / "docs" / "sql.md").read_text().split("## What is refused")[1]
    seconds = re.findall(r"^\| .* \| (`.*?) \| ", table, re.MULTILINE)
    named = {code for second in seconds for code in re.findall(r"`(\w+)`", second)}
    assert named
    assert named <= raised_codes()


def test_every_setting_is_documented_with_its_default() -> None:
    for field in dataclasses.fields(plait.Config):
        default = f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)
        assert f"| `{field.name}` | `{default}` |" in OPERATIONS, field.name


def test_every_key_of_a_progress_report_is_documented() -> None:
    keys = {field.name for field in dataclasses.fields(Progress)} | {"spark_seconds"}
    section = OPERATIONS.split("\n## Progress\n")[1].split("\n## ")[0]
    rows = "".join(re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE))
    assert keys == set(re.findall(r"`(\w+)`", rows))


def test_every_sink_is_documented() -> None:
    section = OPERATIONS.split("\n## Sinks\n")[1].split("\n## ")[0]
    assert set(KINDS) == set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


def test_every_key_of_a_pipeline_file_is_documented() -> None:
    section = OPERATIONS.split("\n## Pipeline files\n")[1].split("\n## ")[0]
    source = ast.parse((SRC / "serve" / "pipeline.py").read_text())
    allowed = [
        a.value
        for n in ast.walk(source)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "allow"
        for a in n.args
        if isinstance(a, ast.Constant)
    ]
    assert allowed
    for key in allowed:
        assert re.search(rf"[`\[.]{key}\b", section), key


def test_every_command_is_documented() -> None:
    from plait.serve.cli import app

    section = OPERATIONS.split("\n## Command line\n")[1].split("\n## ")[0]
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    names |= {group.name for group in app.registered_groups}
    assert names == set(re.findall(r"^\| `plait (\w+)", section, re.MULTILINE))


def test_every_public_name_is_documented() -> None:
    text = "\n".join(path.read_text() for path in DOCS)
    for name in plait.__all__:
        assert re.search(rf"\b{name}\b", text), name
    for kind in (plait.Engine, plait.QueryHandle, plait.Run):
        for member in vars(kind):
            if not member.startswith("_"):
                assert re.search(rf"\b{member}\b", text), f"{kind.__name__}.{member}"
