"""What people see: errors without tracebacks, the version, and the Java sentence before anything starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from plait.errors import PipelineError
from plait.runtime.spark import java

ROOT = Path(__file__).resolve().parents[2]


def plait(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from plait.serve.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)


def fake_java(folder: Path, version: str) -> Path:
    """A JAVA_HOME whose java only knows its version."""
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "java"
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2018-10-16' >&2\n")
    program.chmod(0o755)
    return folder


def test_an_error_is_shown_with_code_cause_and_remedy_and_no_traceback(tmp_path: Path) -> None:
    done = plait("run", str(tmp_path / "nowhere.toml"))
    assert done.returncode == 2
    assert "[PIPELINE_FILE]" in done.stderr
    assert "nowhere.toml cannot be read: No such file or directory" in done.stderr
    assert "→ give an existing file" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_traceback_can_be_asked_for(tmp_path: Path) -> None:
    done = plait("run", str(tmp_path / "nowhere.toml"), PLAIT_TRACEBACK="1")
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert PipelineError.__name__ in done.stderr


def test_brackets_in_an_error_are_text_not_markup(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text('[engine]\nchekpoint = "c"\n')
    done = plait("explain", str(file))
    assert done.returncode == 2
    assert "[engine] 'chekpoint' is not a known key; did you mean 'checkpoint'?" in done.stderr


def test_too_old_a_java_is_refused_before_spark_starts(tmp_path: Path) -> None:
    done = plait("demo", JAVA_HOME=str(fake_java(tmp_path / "jdk", "11.0.2")))
    assert done.returncode == 2
    assert java.CAUSE in done.stderr
    assert java.REMEDY in done.stderr
    assert "Traceback" not in done.stderr


def test_no_java_is_refused_with_the_same_sentence(tmp_path: Path) -> None:
    done = plait("demo", JAVA_HOME=str(tmp_path))
    assert done.returncode == 2
    assert java.CAUSE in done.stderr


def test_the_version_is_that_of_the_project() -> None:
    declared = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    done = plait("--version")
    assert done.stdout.strip() == f"plait {declared.group(1)}"
