# `make demo` and `make test` each do their own set-up: a venv at .venv, torch by constraints.txt, the build.
# PYTHON chooses the interpreter (3.11 or newer); EXPORTKIT_CUDA=0|1|auto whether CUDA kernels are built (see setup.py).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SOURCES := $(wildcard csrc/common/* csrc/ops/*/*) setup.py
CXX_FILES := $(wildcard csrc/common/* csrc/ops/*/* csrc/runtime/*/*.h csrc/runtime/*/*.cpp)

.PHONY: help setup build demo test lint format docs bench clean

help:
	@echo "make demo    export, package, verify and run ARR-COC on a photograph; writes artifacts/demo.png"
	@echo "make test    linters and tests"
	@echo "make lint    ruff, mypy, import-linter, clang-format (make format mends what can be mended)"
	@echo "make docs    docs/cli.md and the README's tables, from the code"
	@echo "make bench   operators beside the alternatives; load time, start-up time"
	@echo "make clean   removes the venv, the build and the caches"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "exportkit needs Python 3.11 or newer here, this is " + sys.version.split()[0] + ": set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch numpy "setuptools>=77" wheel ninja
	$(BIN)/python setup.py -q build_ext --inplace
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e ".[dev]"
	@touch $@

setup: $(READY)

# An editable install builds once; this follows the sources from then on.
exportkit/lib/libarr_coc_cpu.so: $(READY) $(SOURCES)
	$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

build: exportkit/lib/libarr_coc_cpu.so

demo: build
	$(BIN)/exportkit demo

test: build lint
	$(BIN)/python -m pytest -q

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

docs: build
	$(BIN)/python -m exportkit.cli.reference
	$(BIN)/python -m exportkit.ops._table
	$(BIN)/python -m exportkit.bench.document

bench: build
	$(BIN)/exportkit bench ops -o artifacts/bench.json
	@test -f artifacts/arr_coc.pt2 || { $(BIN)/exportkit export arr-coc -o artifacts/arr_coc_aoti.pt2 && $(BIN)/exportkit package artifacts/arr_coc_aoti.pt2 -o artifacts/arr_coc.pt2; }
	$(BIN)/python benchmarks/load_time.py artifacts/arr_coc.pt2

clean:
	rm -rf $(VENV) build dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis exportkit/lib/*.so *.egg-info
