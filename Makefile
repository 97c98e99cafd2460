.DEFAULT_GOAL := help
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed

help:  ## what can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/ -/'

# Installed again only when what is to be installed has changed.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

install: $(INSTALLED)  ## make the virtual environment

demo: $(INSTALLED)  ## train handwritten digits on two processes
	@$(BIN)/fabricx fit experiment=digits strategy=ddp trainer.devices=2

test: $(INSTALLED)  ## run the tests
	$(BIN)/python -m pytest -q

lint: $(INSTALLED)  ## formatting, style, types, direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(INSTALLED)  ## measure against plain torch, side by side
	$(BIN)/python tests/bench/overhead.py
	$(BIN)/python tests/bench/ddp.py
	$(BIN)/python tests/bench/imports.py

clean:  ## remove the virtual environment and what tools leave behind
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

.PHONY: help install demo test lint bench clean
