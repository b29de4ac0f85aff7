# make demo      set up .venv once, then run the closed loop and leave a report in runs/
# make check     lint, types, import contracts, tests: what a change must pass
# Variables:     FAULTS=config/faults/wifi.yaml EPISODES=20 ARGS="--set ..." (demo); PYTHON=python3.12 (set-up)

PYTHON   ?= python3
VENV     := .venv
BIN      := $(VENV)/bin
PIP      := $(BIN)/python -m pip --disable-pip-version-check
# The one torch the demo and the tests are run with; pyproject.toml allows a range.
TORCH    := torch==2.13.0
FAULTS   ?=
EPISODES ?=
ARGS     ?=
TESTS    ?= test

.PHONY: demo test check bench faults slow coverage mutation lint setup setup-dev clean help
.DEFAULT_GOAL := help

help:
	@sed -n '1,3p' Makefile

demo: $(VENV)/.ready
	$(BIN)/vla demo $(if $(FAULTS),--faults $(FAULTS)) $(if $(EPISODES),--episodes $(EPISODES)) $(ARGS)

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest $(TESTS)

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

slow: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m slow --timeout 3600 $(TESTS)

# Line coverage of vla_edge/core; every line of the safety files ([tool.mutmut] in pyproject.toml) must be reached.
coverage: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -q --cov=vla_edge.core --cov-report=term-missing:skip-covered test/safety \
	  test/unit/test_edge_*.py test/property/test_edge_*.py test/conformance/test_edge_*.py
	$(BIN)/python -m coverage report --show-missing --fail-under=100 --include="$$($(BIN)/python test/mutation/run.py --files)"

# How many small changes of the safety files the tests notice: a table, and an error below 95 % (half an hour).
mutation: $(VENV)/.ready-dev
	$(BIN)/python test/mutation/run.py $(ARGS)

bench: $(VENV)/.ready-dev
	@for bench in benchmarks/*.py; do [ -e "$$bench" ] || continue; echo "== $$bench"; $(BIN)/python "$$bench" || exit 1; done

# Every kind of fault at every part around the motor process, on real processes: some minutes, a table at the end.
faults: $(VENV)/.ready-dev
	$(BIN)/python benchmarks/fault_matrix.py $(ARGS)

setup: $(VENV)/.ready
setup-dev: $(VENV)/.ready-dev

$(BIN)/python:
	@echo "[1/4] Python environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed, $(PYTHON) is older: make demo PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "The venv module is missing: apt-get install python3-venv"; exit 1; }

$(VENV)/.ready: $(BIN)/python pyproject.toml setup.py
	@echo "[2/4] packages for cloud, edge and simulator (minutes the first time)"
	$(PIP) install "$(TORCH)" -e ".[cloud,edge,sim]"
	@echo "[3/4] off-screen rendering"
	@$(BIN)/python -m vla_cli.graphics --install
	@echo "[4/4] ready"
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@echo "packages for development"
	$(PIP) install "$(TORCH)" -e ".[cloud,edge,sim,train,dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist install log *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
