# `make demo` and `make test` are all that a newcomer types: each makes .venv when there is none.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test fuzz lint format types check docs docs-serve gpu-test clean

demo: $(VENV)/installed
	$(BIN)/neula demo --out demo-output

test: $(VENV)/installed
	$(BIN)/python -m pytest -m "not gpu"

fuzz: $(VENV)/installed  ## random problems for ten minutes, a new seed every time; MINUTES=1 for less
	$(BIN)/python -m tests.campaign.fuzz --minutes $(or $(MINUTES),10)

gpu-test:  ## on a machine with an NVIDIA GPU, in an environment of your own
	$(PYTHON) -m pytest -m gpu

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint types test

docs: $(VENV)/installed  ## into site/; what is doubtful (a dead link, an unknown name) is an error
	$(BIN)/mkdocs build --strict

docs-serve: $(VENV)/installed  ## on http://127.0.0.1:8000, built again after every change
	$(BIN)/mkdocs serve

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) demo-output site
