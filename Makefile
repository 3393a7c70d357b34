# `make demo` and `make test` are all a newcomer needs; each does the set-up itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
OLDEST := torch==2.11.0
export OMP_WAIT_POLICY ?= passive

.PHONY: install demo test test-all test-oldest lint types contract docs hooks check wheel wheel-check gpu-check gpu-queue gpu-next performance clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml $(wildcard src/ebbtide/kernels/*.cpp)
	@echo "setting up $(VENV): PyTorch first, then the rest, then the kernels; a few minutes the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@echo "compiling the kernels: half a minute"
	-$(BIN)/python -m ebbtide.kernels.compiler
	touch $@

demo: install
	$(BIN)/ebbtide demo

# The same examples each time; `make test-all` draws new ones.
test: install
	$(BIN)/python -m pytest -n 2 --dist loadgroup --hypothesis-profile ci -m "not heavy"

test-all: install test-oldest
	$(BIN)/python -m pytest

# With the oldest torch that is supported: its own environment, of several gigabytes where torch brings CUDA. Its Triton
# has an interpreter that current NumPy does not suit; those kernels are checked on a GPU.
test-oldest: build/oldest/.installed
	PYTHONPATH=src build/oldest/bin/python -m pytest -n 2 --dist loadgroup --hypothesis-profile ci -m "not heavy" \
		--ignore tests/kernels/test_kernels_gpu.py

build/oldest/.installed: pyproject.toml $(wildcard src/ebbtide/kernels/*.cpp)
	test -x build/oldest/bin/python || $(PYTHON) -m venv build/oldest
	build/oldest/bin/python -m pip install -q --disable-pip-version-check $(OLDEST)
	build/oldest/bin/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

contract: install
	$(BIN)/lint-imports

# The documents as a site, in build/site; a link that leads nowhere fails.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

# Before each commit: format, types, the import contract.
hooks: install
	$(BIN)/pre-commit install

check: lint types contract docs test

# For this kind of machine, with compiled kernels.
wheel: install
	rm -rf build dist
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps -w dist .

# The wheel in an environment of its own, without a compiler and without NumPy.
wheel-check: wheel
	rm -rf build/wheel-check
	$(PYTHON) -m venv build/wheel-check
	build/wheel-check/bin/python -m pip install -q --disable-pip-version-check $(TORCH) dist/*.whl
	cd build && PATH=$(CURDIR)/build/wheel-check/bin CXX= wheel-check/bin/python ../tests/helpers/try_wheel.py

# For a machine with a GPU: no installation, no network, the Python that is there.
gpu-check:
	PYTHONPATH=src $(PYTHON) -m ebbtide.bench.gpu_check

# docs/performance.md, from benchmarks/results.
performance: install
	$(BIN)/python benchmarks/performance.py

# What is to be measured on a card, in order, and when it was.
gpu-queue: install
	$(BIN)/python benchmarks/gpu/run_queue.py list

# The next of it, on a machine with a card: no installation, no network, the Python that is there.
gpu-next:
	$(PYTHON) benchmarks/gpu/run_queue.py next

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
