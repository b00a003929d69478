# Every target makes what it needs: a machine with python3.11 and make is enough.
#   make demo       archive, verify and restore a real checkpoint, locally and through Ray and S3
#   make test       what CI runs: ruff, mypy, import contracts, pytest
#   make test-slow  the rest: minutes and gigabytes
#   make bench      sizes and speeds against other compressors; BENCH="names" picks tables:
#                   BENCH=compare sets all recipes beside all peers (half an hour; BENCH="compare --help" for less),
#                   BENCH=targets checks what it wrote
#   make lint       the first three of `make test`

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
BENCH ?=

# Compiled kernels are kept in the checkout; one BLAS thread, since only the kernels compute here.
export NUMBA_CACHE_DIR ?= $(CURDIR)/.cache/numba
export RAY_AUTH_MODE ?= disabled
export RAY_USAGE_STATS_ENABLED := 0
# Modules are compiled once, not by each of the hundreds of processes that tests and benches start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow bench lint clean
.DELETE_ON_ERROR:

# Kernels first: two processes of pytest would each compile them.
test: lint $(VENV)/.torch
	$(BIN)/python -m synth.warm
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow and not serial" -q
	$(BIN)/python -m pytest -m "serial and not slow" -q

test-slow: $(VENV)/.torch
	$(BIN)/python -m pytest -m slow --timeout 3600

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

demo: $(VENV)/.test
	$(BIN)/python -m tests.demo

bench: $(VENV)/.bench
	$(BIN)/python -m tests.bench $(BENCH)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@

# Apart, so that `make demo` does without it. DeepSpeed is to compile nothing.
$(VENV)/.torch: $(VENV)/.test
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,deepspeed]"
	touch $@

# zipnn's build script imports torch and numpy, so both come first and the build sees them.
$(VENV)/.bench: $(VENV)/.torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation zipnn
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,bench]"
	touch $@

clean:
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache results tests/.cache
