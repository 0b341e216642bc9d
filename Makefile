# A newcomer needs `make demo` and `make test`; each creates .venv if there is none.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/core
DEV := $(VENV)/developer $(CORE)
CONSTRAINTS := constraints.txt

# Tests run on all cores, each process with one thread: threads of several processes would wait for one another. Bytecode is
# written whatever the environment says: without it each process takes half a minute to rewrite asserts.
WORKERS ?= auto
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 \
	$(BIN)/python -m pytest -m "not gpu and not gpu2" -n $(WORKERS) --dist worksteal $(TESTS)

# Hides bf16 and AVX-512 units of any CPU. Only x86 processors know these instruction sets.
CAPS_x86_64 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell
CAPS := ONEDNN_MAX_CPU_ISA=AVX2 $(CAPS_$(shell uname -m))

# Build the compiled core for an interpreter, into src/neula; compiles only changed sources.
BUILD_CORE = PATH="$(CURDIR)/$(BIN):$$PATH" && build=build/core-$$($(1) -c "import sys; print(sys.implementation.cache_tag)") && \
	cmake -S cpp -B $$build -G Ninja -DPython_EXECUTABLE="$$(command -v $(1))" > /dev/null && cmake --build $$build

# The same where .venv has no CMake: pip builds in an environment that it deletes afterwards, so that a demo does without these 77 MB.
PIP_CORE = rm -rf build/core && $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/core . && \
	cp build/core/neula/_core.*.so src/neula/ 2> /dev/null && rm -r build/core

.PHONY: core demo ahead test test-capped test-coreless test-oldest fuzz lint format types check tables docs docs-serve linkcheck dist smoke dist-check \
	gpu-test clean

demo: $(CORE)
	$(BIN)/neula demo --out demo-output

test: $(DEV)  ## WORKERS=2 for so many processes instead of one for each core, TESTS=tests/test_qr.py for some
	$(PYTEST)

# Tests that depend on the instruction sets of the CPU: engines, chains, the core, random problems.
CAPPED := campaign engines golden kernels/test_core.py */test_by_core.py test_qr_paths.py systems/test_core_systems.py test_chains.py
test-capped: TESTS := $(CAPPED:%=tests/%)
test-capped: $(DEV)  ## as on a CPU with AVX2 at most
	@if [ "$$(uname -sm)" = "Linux x86_64" ] && ! grep -qwE "avx512f|avx_vnni|avx_ne_convert" /proc/cpuinfo; then \
		echo "This CPU has AVX2 at most: the other tests cover it."; \
	else $(CAPS) $(PYTEST); fi

test-oldest:  ## with the oldest supported versions of all packages, and PYTHON=python3.11
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

fuzz: $(DEV)  ## random problems for ten minutes, a new seed every time; MINUTES=1 for less
	$(BIN)/python -m tests.campaign.fuzz --minutes $(or $(MINUTES),10)

core: $(CORE)  ## the compiled core, for .venv

gpu-test:  ## on a machine with an NVIDIA GPU, in your own environment; with two GPUs also the tests of two
	$(call BUILD_CORE,$(PYTHON))
	$(PYTHON) -m pytest -m "gpu or gpu2"

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(DEV)
	$(BIN)/mypy
	$(BIN)/pyright

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint types test

SPHINX = PYTHONPATH=src OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m sphinx --jobs 2
docs: $(DEV)  ## into site/; warnings (dead links, unknown names) and unreadable pages are errors
	rm -rf site docs/examples docs/api/generated
	$(SPHINX) --fail-on-warning --keep-going --quiet docs site
	$(BIN)/python docs/check_site.py site

docs-serve: docs  ## on http://127.0.0.1:8000
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8000

linkcheck: $(DEV)  ## links to other hosts, over the network
	$(SPHINX) --builder linkcheck -D plot_gallery=0 docs build/linkcheck

tables: $(DEV)  ## of README.md, and its picture, from benchmarks/data
	$(BIN)/python -m benchmarks tables

ahead: $(DEV)  ## machine code of the GPU's kernels, for `make dist` to put into the wheel: minutes, no GPU, 60 MB of NVRTC
	$(BIN)/python -m pip install --quiet "nvidia-cuda-nvrtc==13.0.*"
	TRITON_DISABLE_LINE_INFO=1 $(BIN)/python -m neula.kernels.ahead

dist: $(DEV)  ## the source distribution, and the wheel that is built from it, into dist/
	rm -rf dist
	NEULA_CORE=required $(BIN)/python -m build

smoke: dist  ## the wheel with required packages only, with its core and without
	rm -rf build/wheel
	$(BIN)/python -m pip install --quiet --no-deps --target build/wheel dist/*.whl
	PYTHONPATH=build/wheel $(BIN)/python -m tests.required_only tests/smoke.py
	NEULA_CORE=none PYTHONPATH=build/wheel $(BIN)/python -m tests.required_only tests/smoke.py

test-coreless: $(DEV)  ## random problems without the compiled core, compared with recorded answers
	$(BIN)/python -m tests.golden compare --way "tensors, avx2" --recipes 200

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

# `make demo` installs required packages only, 190 MB beyond torch and its own dependencies: no matplotlib (75 MB), and no
# bytecode (200 MB with that of torch) before a module is imported. All other targets install what developers need. The import
# hook of scikit-build-core is removed, and only its path to src kept: the hook would precede PYTHONPATH and hide another
# checkout or a built wheel.
HOOK = $(VENV)/lib/python3*/site-packages/_editable_skbc_neula.pth
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) $(WHAT) && \
	sed "/^import/d" $(HOOK) > $(VENV)/path && cp $(VENV)/path $(HOOK) && touch $@
$(VENV)/installed: WHAT := --no-compile -e .
$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL)
$(VENV)/developer: WHAT := -e ".[dev]"
$(VENV)/developer: $(VENV)/installed
	$(INSTALL)

# Without a compiler small problems take more time; NEULA_CORE=required makes that an error.
$(CORE): $(VENV)/installed $(wildcard cpp/*)
	@{ if test -x $(BIN)/cmake; then $(call BUILD_CORE,$(CURDIR)/$(BIN)/python); else $(PIP_CORE); fi && touch $@; } || { test "$$NEULA_CORE" != required && \
		echo "neula runs without its compiled core, which could not be built: small problems on a CPU take longer."; }

clean:
	rm -rf .venv .venv-oldest demo-output site dist build docs/examples docs/api/generated docs/api/examples src/neula/_core.*.so
