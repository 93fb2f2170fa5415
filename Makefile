# `make demo` and `make test` do all the set-up there is: Java and Python are checked, .venv is made, locked
# dependencies are installed, then the work runs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.plait-installed
CLASSES := $(VENV)/spark-classes.jsa
JAVA := $(if $(JAVA_HOME),$(JAVA_HOME)/bin/java,java)
export PYSPARK_PYTHON := $(abspath $(BIN))/python

JAVA_SENTENCE := Plait needs Java 17 or newer: install it (Debian/Ubuntu: apt-get install openjdk-17-jre-headless; macOS: brew install openjdk@17) or set JAVA_HOME to it.
PYTHON_SENTENCE := Plait needs Python 3.11 or newer with venv: install it (Debian/Ubuntu: apt-get install python3 python3-venv) or call make PYTHON=/path/to/python3.

.PHONY: help demo test lint format bench soak clean machine

help:
	@echo "make demo    join four generated streams and check the result (about a minute)"
	@echo "make test    lint and all tests but the soak tests"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff rewrite what it can"
	@echo "make bench   the TPC-DS benchmark at scale factor 1, into bench-out/ (python -m benchmarks lists all)"
	@echo "make soak    the long tests"
	@echo "make clean   remove .venv and everything generated"

demo: $(STAMP)
	$(BIN)/plait demo

# Two tests at a time, those of a file one after the other.  Long files come where their names put them, not last.
test: lint $(CLASSES)
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src benchmarks

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m benchmarks tpcds --sf 1 --out bench-out

soak: $(STAMP) $(CLASSES)
	$(BIN)/pytest -q -m soak

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build bench-out spark-warehouse metastore_db derby.log
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What pip cannot install, said in one sentence each, before anything else happens.
machine:
	@v=$$("$(JAVA)" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1); \
	if [ "$${v:-0}" -lt 17 ]; then echo "$(JAVA_SENTENCE)" >&2; exit 1; fi
	@"$(PYTHON)" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	|| { echo "$(PYTHON_SENTENCE)" >&2; exit 1; }

$(STAMP): pyproject.toml requirements.lock | machine
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# Java reads the classes of Spark from here: the tests start many JVMs.  Without it they are only slower.
$(CLASSES): $(STAMP) tests/class_archive.py
	-$(BIN)/python tests/class_archive.py $@
