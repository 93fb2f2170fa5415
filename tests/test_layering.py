"""Who may import whom.  The rules of the design, checked on the source text."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import plait

ROOT = Path(plait.__file__).parent
PLANNING = ("sql", "catalog", "stats", "order", "share")
EXECUTION = ("runtime", "state", "kernels")


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_package_knows_nothing_of_its_benchmarks() -> None:
    users = [p for p in modules() if "benchmarks" in {name.split(".")[0] for name in imports(p)}]
    assert users == []


def test_only_the_package_is_in_the_wheel() -> None:
    project = tomllib.loads((ROOT.parent.parent / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/plait"]}


def layer(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else path.stem


def ours(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports(path) if name.startswith("plait.")}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_layers_only_look_where_they_may(path: Path) -> None:
    here, used = layer(path), ours(path)
    if here == "kernels":
        foreign = {n.split(".")[0] for n in imports(path)} & {"pyarrow", "pyspark", "pandas", "xxhash"}
        assert not foreign
        assert used <= {"kernels"}
    if here == "state":
        assert used <= {"state", "kernels", "query", "config", "errors"}
    if here == "query":
        assert used <= {"query", "errors"}
    if here in PLANNING:
        assert not used & set(EXECUTION)
    if here == "runtime":
        # Spark's own part of a query (sql/answer/residual.py) is the one thing execution takes from the SQL side.
        assert used & set(PLANNING) <= {"sql"}
        assert not any(n.startswith("plait.sql") and "residual" not in n for n in imports(path) if n != "plait.sql")


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_spark_appears_only_where_it_must(path: Path) -> None:
    here = str(path.relative_to(ROOT))
    if any(name.split(".")[0] in ("pyspark", "py4j") for name in imports(path)):
        facade = (
            "attached.py",
            "engine.py",
            "launching.py",
            "queries.py",
            "defining.py",
            "registry.py",
            "run.py",
            "starting.py",
            "testing.py",
        )
        allowed = ("sql/catalyst/", "sql/answer/residual.py", "runtime/", "serve/", *facade)
        assert here.startswith(allowed), f"{here} imports pyspark"


LIVE = re.compile(r"\b_j(vm|df|sparkSession|sc|conf|map|reader)\b|\b_gateway\b|\bjvm\.")
"""How Python gets at objects of the JVM."""
CALLED = re.compile(
    r"\.(nodeName|exprId|catalogString|dataType|queryExecution|withNewChildren|children|canonicalized|semanticEquals"
    r"|getClass|joinType|references|deterministic|aggregateFunction|toAttribute|toJSON|sessionState)\(\)"
)
"""Methods of Catalyst's objects."""
HOMES = ("sql/catalyst/", "runtime/spark/")


@pytest.mark.parametrize("pattern", [LIVE, CALLED], ids=["held", "called"])
def test_objects_of_the_jvm_are_touched_in_two_folders_only(pattern: re.Pattern[str]) -> None:
    found = {str(p.relative_to(ROOT)): pattern.search(p.read_text()) for p in modules()}
    assert {name: hit[0] for name, hit in found.items() if hit is not None and not name.startswith(HOMES)} == {}


@pytest.mark.parametrize("line", ["spark._jvm", "df._jdf.schema()", "node.jvm.output()", "a.exprId().id()"])
def test_the_patterns_know_a_live_object(line: str) -> None:
    assert LIVE.search(line) or CALLED.search(line)


def test_no_pickle_rests_on_disk() -> None:
    users = [p for p in modules() if {"pickle", "cloudpickle", "dill", "joblib"} & set(imports(p))]
    assert users == []
