.DEFAULT_GOAL := help
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The first Python of at least 3.11 that really runs: a version manager may have a shim for one that isn't there.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

help:  ## what can be made
	@echo "make TARGET, where TARGET is one of"
	@sed -nE 's/^([a-z]+):[^#]*## *(.*)/  \1\t\2/p' $(MAKEFILE_LIST)

# Installed again only when what is to be installed has changed. As a plain path ("compat"): else a folder named fabricx
# beside a script, such as this clone, would hide the package.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "fabricx needs Python 3.11 or later; give one with make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "installing fabricx and its tools into $(VENV) (once; a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--config-settings editable_mode=compat --editable '.[dev,docs]'
	@touch $@

install: $(INSTALLED)  ## make the virtual environment

demo: $(INSTALLED)  ## train handwritten digits on two processes, and test
	@$(BIN)/fabricx fit experiment=digits strategy=ddp trainer.devices=2

# Three processes for two cores: each has a fork server and ranks of its own, and two work while one waits.
# With bytecode on the disk, since some hundred processes import the same modules.
TEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 3 --dist worksteal

test: $(INSTALLED)  ## run the tests, except those of pages and examples
	$(TEST) --durations=10 --ignore tests/docs

pages: $(INSTALLED)  ## run the programs and commands of the documentation, and the examples
	$(TEST) tests/docs

SOAK ?= 1
SOAK_TESTS ?= tests
soak: $(INSTALLED)  ## try many more combinations and schedules of faults than the tests do; SOAK=0.3 for a part of them
	FABRICX_SOAK=$(SOAK) $(TEST) -m soak --timeout 3600 $(SOAK_TESTS)

gpu: $(INSTALLED)  ## run the tests that need GPUs
	$(BIN)/python -m pytest -q -rs -m gpu

lint: $(INSTALLED)  ## style, formatting, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# Without MkDocs' announcement of another version; the pages need no network, neither now nor in the browser.
docs: $(INSTALLED)  ## build the documentation into site/, with checked links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: $(INSTALLED)  ## measure against plain torch, side by side
	$(BIN)/python tests/bench/imports.py
	$(BIN)/python tests/bench/overhead.py
	$(BIN)/python tests/bench/data.py
	$(BIN)/python tests/bench/telemetry.py
	$(BIN)/python tests/bench/ddp.py
	$(BIN)/python tests/bench/checkpoints.py
	$(BIN)/python tests/bench/copies.py
	$(BIN)/python tests/bench/sharding.py
	$(BIN)/python tests/bench/growth.py
	$(BIN)/python tests/bench/mesh.py
	$(BIN)/python -m tests.bench.predicted
	$(BIN)/python tests/bench/balance.py
	$(BIN)/python tests/bench/servers.py
	$(BIN)/python tests/bench/orderings.py
	$(BIN)/python tests/bench/rounds.py
	$(BIN)/python tests/bench/control_plane.py
	$(BIN)/python -m tests.bench.simulation

# In an environment of its own: the tests do not need the frameworks that fabricx is compared with.
PEERS := .venv-peers
peers:  ## measure against Lightning, Accelerate, Ignite and the Trainer of transformers, side by side
	@test -x $(PEERS)/bin/accelerate || { $(PYTHON) -m venv $(PEERS) && $(PEERS)/bin/python -m pip install --quiet \
		--disable-pip-version-check --constraint constraints.txt --config-settings editable_mode=compat \
		--editable . 'lightning>=2.6.6' 'accelerate>=1.15' 'pytorch-ignite>=0.5.5' 'transformers>=5'; }
	$(PEERS)/bin/python tests/bench/peers/compare.py

chaos: $(INSTALLED)  ## kill workers all the time, and see what is lost
	$(BIN)/python tests/bench/chaos.py

clean:  ## remove the virtual environment and what tools leave behind
	rm -rf $(VENV) $(PEERS) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

.PHONY: help install demo test pages soak gpu lint docs bench peers chaos clean
