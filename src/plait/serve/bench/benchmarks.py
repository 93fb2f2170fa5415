"""The benchmarks by name: what `plait bench NAME` runs."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

from rich.console import Console

from plait.errors import ConfigError
from plait.serve.bench.wishes import Wishes

BENCHMARKS = ("tpcds", "tpch", "orders", "drivers", "state")
"""Each a module beside this one, with `run(out, wishes, console) -> exit code`."""


def run_benchmark(name: str, out: Path, wishes: Wishes, console: Console) -> int:
    """Run a benchmark, which writes NAME.json, NAME.md and NAME.png into `out`; 0 if all results are equal."""
    if name not in BENCHMARKS:
        raise ConfigError("BENCH_NAME", f"there is no benchmark {name!r}", f"use one of: {', '.join(BENCHMARKS)}")
    for module in ("duckdb", "duckdb_extension_tpcds", "matplotlib", "psutil"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError("BENCH_EXTRA", f"{module} is not installed", "pip install 'plait[bench]'")
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    code: int = importlib.import_module(f"plait.serve.bench.{name}").run(out, wishes, console)
    console.print(f"Written: {out}/{name}.json, {name}.md, {name}.png", highlight=False, soft_wrap=True)
    return code
