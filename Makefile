# forespeak: `make demo` shows it, `make test` proves it. Both share one virtual environment.
#
#   PYTHON=python3.12          another interpreter (3.11 or later)
#   VENV=/some/folder          another place for the virtual environment
#   PIP_FLAGS="..."            more options for pip, as an index with a CPU build of PyTorch:
#                              PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
#   FORESPEAK_HOME=/some/where where fetched models live

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
PYTEST_FLAGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.forespeak-installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast check format docs install model clean

help: ## what there is to make
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' \
	    | while IFS="$$(printf '\t')" read -r name what; do printf '  make %-10s %s\n' "$$name" "$$what"; done

demo: install model ## install, get the model, race plain decoding against every method
	@$(BIN)/forespeak demo

test: install model check ## install, check, run every test
	@$(BIN)/python -m pytest $(PYTEST_FLAGS)

test-fast: install ## the tests that take under 90 seconds together
	@$(BIN)/python -m pytest -m "not slow" $(PYTEST_FLAGS)

check: install ## ruff and mypy
	@$(BIN)/ruff check --no-cache .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: install ## let ruff lay out the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: install ## write the tables that come from code into README.md and docs
	@$(BIN)/python scripts/write_tables.py

install: $(STAMP) ## make the virtual environment

model: install ## get the embedded target model (once)
	@$(BIN)/forespeak models fetch smollm2-135m

# The stamp lets a second run skip pip; a change of the two files makes it run again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "forespeak needs Python 3.11 or later and \`$(PYTHON)\` is not; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "\`$(PYTHON)\` cannot make virtual environments; install its venv module (Debian, Ubuntu: apt install python3-venv) and run make again" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing forespeak into $(VENV) (the first time takes a minute or two)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[test]'
	@touch $(STAMP)

clean: ## remove the virtual environment and what tools left behind (fetched models stay)
	rm -rf $(VENV) build dist src/forespeak.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +
