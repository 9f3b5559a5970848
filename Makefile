# make run    the main job: a real model, a trained drafter, every round shown
# make demo   the same in a browser, at an address that it prints
# make test   the whole test suite
# make check  format, lint, types
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One backend is enough for the main job: mlx on Apple silicon, torch elsewhere. The tests bring both.
BACKEND := $(if $(filter Darwin-arm64,$(shell uname -sm | tr ' ' -)),mlx,torch)
PROMPT ?= Tom has 3 boxes with 4 apples in each box. How many apples does he have?

.PHONY: run demo test check format clean

run: $(VENV)/.ready
	$(BIN)/dflash generate "$(PROMPT)" --show rounds --compare

demo: $(VENV)/.ready-demo
	$(BIN)/dflash demo

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest

check: $(VENV)/.ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(BACKEND)]"
	touch $@

$(VENV)/.ready-demo: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(BACKEND),demo]"
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache
