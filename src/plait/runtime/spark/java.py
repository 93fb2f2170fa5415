"""Spark runs on Java; say so in one sentence before anything starts.  `make` says the same one."""

from __future__ import annotations

import os
import re
import subprocess

from plait.errors import ConfigError

OLDEST = 17
CAUSE = f"Plait needs Java {OLDEST} or newer"
REMEDY = (
    "install it (Debian/Ubuntu: apt-get install openjdk-17-jre-headless; macOS: brew install openjdk@17) "
    "or set JAVA_HOME to it."
)


def require_java() -> None:
    """Raise unless the Java that Spark would start (JAVA_HOME first, then PATH) is new enough."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else "java"
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    except OSError:
        told = ""
    if major_version(told) < OLDEST:
        raise ConfigError("JAVA", CAUSE, REMEDY)


def major_version(told: str) -> int:
    """The major version in what `java -version` prints; 0 if there is none.

    >>> major_version('openjdk version "17.0.15" 2025-04-15')
    17
    >>> major_version('java version "1.8.0_402"')
    1
    >>> major_version('The operation could not be completed.')
    0
    """
    found = re.search(r' version "(\d+)', told)
    return int(found.group(1)) if found else 0
