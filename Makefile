# Every target sets up what it needs: a fresh machine with Python (>= 3.10) and pip is enough.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup test quick demo lint schemas clean

help:
	@echo "make demo     watch an agent mend a real training run over MCP (under a minute after set-up)"
	@echo "make test     the whole test suite"
	@echo "make quick    the tests that take no time"
	@echo "make lint     formatting, lint, types, and whether schemas/ is up to date"
	@echo "make schemas  write schemas/ anew from the records"
	@echo "make setup    only make $(VENV);  make clean removes it"
	@echo "PYTHON=python3.12 chooses the interpreter, VENV=DIR where the environment goes"

setup: $(STAMP)

# torch goes in by its pin alone, before anything could ask for another build of it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[torch,demo]' --group dev
	@touch $@

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'slow or not slow'

quick: $(STAMP)
	$(BIN)/python -m pytest

demo: $(STAMP)
	$(BIN)/gradtracer demo

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --warnings --pythonpath $(BIN)/python
	$(BIN)/python -m gradtracer.schemas --check

schemas: $(STAMP)
	$(BIN)/python -m gradtracer.schemas

clean:
	rm -rf $(VENV)
