# Everything runs from .venv. It needs Python 3.11 to 3.14 and git. Node comes from the path if it
# is new enough, else from a wheel.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
EXTENSION := hatch_build.py $(wildcard labextension/*.* labextension/s*/*.* labextension/src/*/*.*)
LINTED := build/lint/passed
# Store bytecode. Without it, each process of the tests compiles the source of nbdist.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-unit test-full test-versions chaos lab bench bench-smoke coverage mutants check docs clean

$(READY): pyproject.toml constraints.txt $(EXTENSION)
	@$(PYTHON) -c 'import sys; sys.exit(not (3,11) <= sys.version_info < (3,15))' || \
	  { echo "nbdist needs Python 3.11 to 3.14; select one: make PYTHON=python3.11"; exit 1; }
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[dev]'
	@node=$$($(BIN)/python -m hatch_build) && { test -z "$$node" || $(INSTALL) "$$node"; }
	@touch $@

# The tour needs TensorFlow, which has no version for Python 3.14.
demo: $(READY)
	@name=$$($(BIN)/python -c 'import sys; print(("00_tour", "02_pjrt")[sys.version_info >= (3,14)])'); \
	  $(BIN)/python -m notebooks.run notebooks/$$name.ipynb

# Tests that start processes wait a lot. The others fill the time.
test: $(READY) check
	@mkdir -p build
	@nice $(BIN)/python -m pytest --unit -q >build/unit-tests.txt 2>&1 & unit=$$!; \
	  $(BIN)/python -m pytest --processes; status=$$?; \
	  if wait $$unit; then tail -n 1 build/unit-tests.txt; else status=1; cat build/unit-tests.txt; fi; \
	  exit $$status

test-unit: $(READY)
	@$(BIN)/python -m pytest --unit -q -n auto --maxprocesses 8 --dist worksteal

test-full: $(READY) check
	@$(BIN)/python -m pytest --full

test-versions: $(READY)
	@$(BIN)/python -m tools.version_matrix

chaos: $(READY)
	@$(BIN)/python -m tools.fault_matrix

check: $(READY) $(LINTED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m tools.check_language
	@test ! -x $(BIN)/mkdocs || $(MAKE) --no-print-directory docs

docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

$(LINTED): $(READY) $(EXTENSION) $(wildcard labextension/test/* labextension/bench/*)
	@$(BIN)/python -m tools.jlpm lint:check
	@touch $@

lab: $(READY)
	$(BIN)/jupyter lab notebooks/00_tour.ipynb

bench: $(READY)
	@$(BIN)/python -m benchmarks --save all
	@$(BIN)/python -m tools.planner_figures

bench-smoke: $(READY)
	@$(BIN)/python -m benchmarks --smoke all

coverage: $(READY)
	@rm -rf build/coverage && mkdir -p build/coverage
	-@PYTHONPATH=$(CURDIR) $(BIN)/coverage run -m pytest
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

mutants: export PYTHONDONTWRITEBYTECODE := 1
mutants: $(READY)
	@$(INSTALL) -e '.[mutants]'
	@$(BIN)/python -m tools.mutation_check

clean:
	rm -rf $(VENV) build dist nbdist/labextension nbdist/static labextension/lib labextension/node_modules
