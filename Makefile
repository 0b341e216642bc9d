# `make demo` and `make test` are all that a newcomer types: each makes .venv when there is none.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt

# Tests run on all cores, each process with one thread: threads of several processes would wait for one another. Whatever
# the environment says, what pytest makes of their asserts is kept: it takes half a minute of each process anew.
WORKERS ?= auto
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 \
	$(BIN)/python -m pytest -m "not gpu and not gpu2" -n $(WORKERS) --dist worksteal $(TESTS)

# A CPU without bf16 and AVX-512, on any machine. What other processors than x86 do not know they would complain about.
CAPS_x86_64 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell
CAPS := ONEDNN_MAX_CPU_ISA=AVX2 $(CAPS_$(shell uname -m))

.PHONY: demo test test-capped test-oldest fuzz lint format types check tables docs docs-serve dist smoke dist-check \
	gpu-test clean

demo: $(VENV)/installed
	$(BIN)/neula demo --out demo-output

test: $(VENV)/installed  ## WORKERS=2 for so many processes instead of one for each core, TESTS=tests/test_qr.py for some
	$(PYTEST)

# Left out is what has nothing to do with instructions of the CPU: interpreted kernels, a third of the time, files, the
# command line's tables, what the compiler of torch sees, the form of the sources.
UNCAPPED := kernels $(foreach name,bench cli_tables compilation expressions files house publishing tables,test_$(name).py)
test-capped: $(VENV)/installed  ## as on a CPU with AVX2 at most
	$(CAPS) $(PYTEST) $(UNCAPPED:%=--ignore=tests/%)

test-oldest:  ## with the oldest versions that pyproject.toml names, and PYTHON=python3.11
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

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

docs: $(VENV)/installed  ## into site/; what is doubtful (a dead link, an unknown name) is an error, and so is an ugly page
	$(BIN)/mkdocs build --strict
	$(BIN)/python docs/check_site.py site

docs-serve: $(VENV)/installed  ## on http://127.0.0.1:8000, built again after every change
	$(BIN)/mkdocs serve

tables: $(VENV)/installed  ## of README.md, and its picture, from benchmarks/data
	$(BIN)/python -m benchmarks tables

dist: $(VENV)/installed  ## the source distribution, and the wheel that is built from it, into dist/
	rm -rf dist
	$(BIN)/python -m build

smoke: dist  ## the wheel, in this environment, without what it does not require
	rm -rf build/wheel
	$(BIN)/python -m pip install --quiet --no-deps --target build/wheel dist/*.whl
	PYTHONPATH=build/wheel $(BIN)/python -m tests.required_only tests/smoke.py

dist-check: dist  ## wheel and source distribution, in an empty environment: torch is downloaded again
	rm -rf build/empty
	$(PYTHON) -m venv build/empty
	for built in dist/*.whl dist/*.tar.gz; do \
		build/empty/bin/python -m pip uninstall --quiet --yes neula && \
		build/empty/bin/python -m pip install --quiet -c constraints.txt $$built && \
		build/empty/bin/python -m pip check && \
		build/empty/bin/python -I tests/smoke.py && \
		build/empty/bin/neula --version || exit 1; \
	done

$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-oldest demo-output site dist build
