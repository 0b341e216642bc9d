# `make demo` and `make test` are all that a newcomer types: each makes .venv when there is none.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Tests run on all cores, each process with one thread: threads of several processes would wait for one another.
WORKERS ?= auto
PYTEST = OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 \
	$(BIN)/python -m pytest -m "not gpu and not gpu2" -n $(WORKERS) --dist worksteal

# A CPU without bf16 and AVX-512, on any machine. What other processors than x86 do not know they would complain about.
CAPS_x86_64 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell
CAPS := ONEDNN_MAX_CPU_ISA=AVX2 $(CAPS_$(shell uname -m))

.PHONY: demo test test-capped fuzz lint format types check docs docs-serve gpu-test clean

demo: $(VENV)/installed
	$(BIN)/neula demo --out demo-output

test: $(VENV)/installed  ## WORKERS=2 for so many processes instead of one for each core
	$(PYTEST)

# Kernels are left out: their interpreter takes a third of the time, and no format of the CPU.
test-capped: $(VENV)/installed  ## as on a CPU with AVX2 at most
	$(CAPS) $(PYTEST) --ignore=tests/kernels

fuzz: $(VENV)/installed  ## random problems for ten minutes, a new seed every time; MINUTES=1 for less
	$(BIN)/python -m tests.campaign.fuzz --minutes $(or $(MINUTES),10)

gpu-test:  ## on a machine with an NVIDIA GPU, in an environment of your own; with two, what needs two as well
	$(PYTHON) -m pytest -m "gpu or gpu2"

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/installed
	$(BIN)/mypy
	$(BIN)/pyright

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
