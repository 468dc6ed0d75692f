# Every target works on a machine that has only make and Python 3.11 or later.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable
INPUTS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check bench docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.dev ## train on digits with and without privacy, in less than two minutes
	$(BIN)/hushgrad demo

# One thread per worker: two workers with two threads each would fight over two cores.
test: $(VENV)/.dev ## run the fast tests and the doctests
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not slow"

test-all: $(VENV)/.dev $(VENV)/.bench ## run every test, also those beside Opacus
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

check: $(VENV)/.dev ## check format, lint and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy --strict src

bench: $(VENV)/.bench ## compare step time and memory with the peers; ARGS="--help" lists options
	$(BIN)/python -m benchmarks.run $(ARGS)

docs: $(VENV)/.docs ## build the reference into site/
	$(BIN)/python docs/build.py site

clean: ## remove everything that make has made
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp per set of extras, so that each is installed once and again when the inputs change.
$(VENV)/.dev: $(INPUTS)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("expected Python 3.11 or later, got %d.%d; run make PYTHON=python3.11" % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[dev]'
	@touch $@

$(VENV)/.bench $(VENV)/.docs: $(VENV)/.%: $(VENV)/.dev
	$(INSTALL) '.[$*]'
	@touch $@
