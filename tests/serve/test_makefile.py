"""`make demo` and `make test` say what is missing in one sentence, before they do anything."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from plait.runtime.spark import java
from tests.serve.test_cli import ROOT, fake_java

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the Makefile from a folder that has nothing else, so that nothing can be installed by accident."""
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, folder)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments], cwd=folder, capture_output=True, text=True, env=clean | environment, check=False
    )


@pytest.mark.parametrize("target", ["demo", "test"])
@pytest.mark.parametrize("version", ["11.0.2", "1.8.0_402"])
def test_an_old_java_stops_make_at_once(tmp_path: Path, target: str, version: str) -> None:
    done = make(tmp_path, target, JAVA_HOME=str(fake_java(tmp_path / "jdk", version)))
    assert done.returncode != 0
    assert f"{java.CAUSE}: {java.REMEDY}" in done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("target", ["demo", "test"])
def test_no_java_stops_make_at_once(tmp_path: Path, target: str) -> None:
    done = make(tmp_path, target, JAVA_HOME=str(tmp_path))
    assert done.returncode != 0
    assert f"{java.CAUSE}: {java.REMEDY}" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_java_is_looked_for_on_the_path_when_java_home_is_not_set(tmp_path: Path) -> None:
    old = fake_java(tmp_path / "jdk", "11.0.2") / "bin"
    done = make(tmp_path, "machine", JAVA_HOME="", PATH=f"{old}{os.pathsep}{os.environ['PATH']}")
    assert java.CAUSE in done.stderr


def test_no_python_stops_make_with_a_sentence(tmp_path: Path) -> None:
    new = str(fake_java(tmp_path / "jdk", "21.0.1"))
    done = make(tmp_path, "demo", f"PYTHON={tmp_path}/python3", JAVA_HOME=new)
    assert done.returncode != 0
    assert "Plait needs Python 3.11 or newer" in done.stderr


@pytest.mark.parametrize("version", ["17.0.15", "21", "25-ea"])
def test_a_new_enough_java_passes(tmp_path: Path, version: str) -> None:
    done = make(tmp_path, "machine", JAVA_HOME=str(fake_java(tmp_path / "jdk", version)))
    assert (done.returncode, done.stderr) == (0, "")
