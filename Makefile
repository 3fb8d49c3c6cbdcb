# One command each; every target does its whole set-up, also in a fresh clone without a virtual environment.

PYTHON ?= python3
TORCH ?= 2.13.0
CUDA_TORCH ?= 2.11.0
NEWEST_TORCH ?= 2.14.1
COMPAT ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
PIP_ARGS ?=
CUDA_PIP_ARGS ?=
NPROC ?= 4
DP ?=
PP ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
TEST_JOBS ?= 2
GPU_NCCL ?=
GPU_MINUTES ?= 8
BENCH_ARGS ?=
OUT ?=
SANITIZE ?= thread

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(PIP_ARGS)
REQUIREMENTS := $(BIN)/python scripts/requirements.py

# What `make` last did, as empty files: in .venv what is installed there, in build/ what is compiled there.
MADE_VENV := $(VENV)/.made-venv
MADE_TOOLS := $(VENV)/.made-build-tools
MADE_TORCH := $(VENV)/.made-torch-$(TORCH)
MADE_DEV := $(VENV)/.made-dev
MADE_DEMO := $(VENV)/.made-demo
MADE_EDITABLE := $(VENV)/.made-editable
BUILD_DIR := build/torch-$(TORCH)
MADE_NATIVE := $(BUILD_DIR)/.made-native
SETTINGS := build/settings

NATIVE_SOURCES := CMakeLists.txt setup.py scripts/cuda_choice.py $(wildcard cmake/*) $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu')
FORMATTED := csrc tests/native

ifneq ($(words $(filter 1 2 3 4 5 6 7 8,$(TEST_JOBS))),1)
$(error TEST_JOBS is how many tests run at a time, 1 to 8; it is '$(TEST_JOBS)')
endif

SHELL := bash
.SHELLFLAGS := -eo pipefail -c
.DELETE_ON_ERROR:
# Two pips in one .venv get in each other's way; what can run side by side does, under ninja.
.NOTPARALLEL:
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help
.PHONY: help build test demo lint format sanitize sanitize-build tsan asan wheel cuda-build cuda-wheel check-headers compat gpu-test gpu-bench figures clean check-machine FORCE

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  Variables: PYTHON=$(PYTHON) TORCH=$(TORCH) PIP_ARGS='$(PIP_ARGS)' (a package index, say) MAX_JOBS CXX"
	@echo "  USE_CUDA=auto|0|1 TORCH_CUDA_ARCH_LIST CUDA_HOME; see docs/how-to/build-from-source.md"

# Of the build in a folder, in TEST_JOBS processes.
NATIVE_TESTS = seq $(TEST_JOBS) | xargs -P $(TEST_JOBS) -I PART $(1)/hpcomm_native_tests --part PART/$(TEST_JOBS)

build: $(MADE_NATIVE) $(MADE_EDITABLE) ## make .venv, install torch into it, compile hpcomm in place
	@echo "hpcomm is built; $(BIN)/python imports it."

# Half of a test's time is waiting, for a process to start or for a time-out: hence two at a time, whatever the cores. One
# at a time runs in pytest itself, which is what its --pdb and -s need.
test: build $(MADE_DEV) ## build, then run the C++ tests and the Python tests (PYTEST_ARGS=... TEST_JOBS=2)
	@echo "== C++ tests"
	$(BIN)/cmake --build $(BUILD_DIR) --target hpcomm_native_tests $(if $(MAX_JOBS),--parallel $(MAX_JOBS))
	$(call NATIVE_TESTS,$(BUILD_DIR))
	@echo "== Python tests"
	$(BIN)/python -m pytest -q $(if $(filter-out 1,$(TEST_JOBS)),-n $(TEST_JOBS) --dist loadfile --max-worker-restart 2) $(PYTEST_ARGS)

# torchrun sets OMP_NUM_THREADS itself when it is unset, with a warning.
demo: build $(MADE_DEMO) ## train a small GPT on NPROC=4 processes (DP= PP= DEMO_ARGS=...)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} \
	$(if $(filter 1,$(NPROC)),$(BIN)/python,$(BIN)/torchrun --standalone --nproc-per-node $(NPROC)) \
	examples/train_gpt.py --timeline build/demo.svg $(if $(DP),--dp $(DP)) $(if $(PP),--pp $(PP)) $(DEMO_ARGS)

lint: $(MADE_TORCH) $(MADE_DEV) ## check style and types: ruff, clang-format, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find $(FORMATTED) -name '*.cpp' -o -name '*.h' -o -name '*.cu' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy --strict hpcomm

format: $(MADE_DEV) ## rewrite the files as lint wants them
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	find $(FORMATTED) -name '*.cpp' -o -name '*.h' -o -name '*.cu' | xargs $(BIN)/clang-format -i

# The linker takes a comma in a folder's name for the end of an option.
COMMA := ,
SANITIZED = build/$(subst $(COMMA),-,$(SANITIZE))

sanitize-build: $(MADE_TOOLS)
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B $(SANITIZED) -G Ninja -DHPCOMM_BUILD_TESTS=ON -DHPCOMM_UNITY=ON -DHPCOMM_SANITIZE=$(SANITIZE)
	$(BIN)/cmake --build $(SANITIZED) --target hpcomm_native_tests $(if $(MAX_JOBS),--parallel $(MAX_JOBS))

sanitize: sanitize-build ## run the C++ tests under SANITIZE=thread|address|undefined, without torch
	$(call NATIVE_TESTS,$(SANITIZED))

tsan: ## the C++ tests under ThreadSanitizer; those of NCCL with communicators of both kinds
	$(MAKE) sanitize SANITIZE=thread
	HPCOMM_NCCL_BLOCKING=0 build/thread/hpcomm_native_tests nccl_

asan: ## the C++ tests under AddressSanitizer, LeakSanitizer and UBSan; ten million damaged headers, or what 90 seconds take
	$(MAKE) sanitize SANITIZE=address,undefined
	printf '%s\n' 1 2 3 4 | HPCOMM_FUZZ_MESSAGES=2500000 HPCOMM_FUZZ_SECONDS=45 xargs -P 2 -I SEED \
		env HPCOMM_FUZZ_SEED=SEED build/address-undefined/hpcomm_native_tests fuzz_message_headers

wheel: $(MADE_TORCH) $(MADE_TOOLS) ## make dist/: a source archive, a wheel for the torch of .venv; check and try it
	$(BIN)/python scripts/make_wheel.py -- $(PIP_ARGS)

# Not in .venv and not in place: the module for CPU, which the tests use, stays as it is. The native tests of the layers
# run in `make test`; of this build the module is compiled, nothing else.
cuda-build: | check-machine ## compile the CUDA half against CUDA_TORCH in .venv-cuda; needs nvcc, but no GPU
	@if [ -z "$$('$(PYTHON)' scripts/cuda_choice.py)" ]; then \
	  echo '*** SKIPPED: there is no nvcc (CUDA_HOME, PATH, /usr/local/cuda). The CUDA half was NOT compiled. ***'; \
	else \
	  $(MAKE) --no-print-directory VENV=.venv-cuda TORCH=$(CUDA_TORCH) PIP_ARGS='$(CUDA_PIP_ARGS)' cuda-wheel; \
	fi

cuda-wheel: $(MADE_TORCH) $(MADE_TOOLS)
	USE_CUDA=1 $(BIN)/python scripts/make_wheel.py --try-here

check-headers: build ## compile what sees c10d with the headers of NEWEST_TORCH, in two minutes
	PIP_ARGS='$(PIP_ARGS)' $(BIN)/python scripts/check_headers.py $(BUILD_DIR) $(NEWEST_TORCH)

compat: | check-machine ## build and try hpcomm under every torch of COMPAT, one after the other (gigabytes each)
	PIP_ARGS='$(PIP_ARGS)' '$(PYTHON)' scripts/compat.py $(COMPAT)

figures: build ## take the CPU figures of README anew: half an hour on a machine that does nothing else
	$(REQUIREMENTS) bench | $(PIP) --quiet -r /dev/stdin
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/cpu_figures.py --run

# With the Python, torch, nvcc, CMake and ninja that are there: no .venv, no network. docs/how-to/check-a-gpu.md
GPU := GPU_NCCL='$(GPU_NCCL)' GPU_MINUTES='$(GPU_MINUTES)' OUT='$(OUT)' '$(PYTHON)' scripts/gpu.py

gpu-test: ## on a machine with a GPU: build for it, run the tests marked cuda (GPU_NCCL= OUT= PYTEST_ARGS=)
	$(GPU) test $(PYTEST_ARGS)

gpu-bench: ## on a machine with a GPU: build for it, run the GPU benchmarks (GPU_NCCL= OUT= BENCH_ARGS=)
	$(GPU) bench $(BENCH_ARGS)

clean: ## remove what was built (not .venv and .venv-cuda: rm -rf .venv* for those)
	rm -rf build dist hpcomm.egg-info hpcomm/_build.py hpcomm/_C.*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f $(MADE_EDITABLE)
	find hpcomm tests examples benchmarks scripts -name __pycache__ -prune -exec rm -rf {} +

# --- Set-up ------------------------------------------------------------------------------------------------------------

# Every time, it takes a tenth of a second: nothing is downloaded or half built on a machine that cannot finish.
check-machine:
	@PYTHON='$(PYTHON)' sh scripts/check_machine.sh

$(MADE_VENV): | check-machine
	'$(PYTHON)' -m venv $(VENV)
	@touch $@

$(MADE_TOOLS): $(MADE_VENV) pyproject.toml
	$(REQUIREMENTS) build | $(PIP) --quiet -r /dev/stdin
	@touch $@

$(MADE_TORCH): $(MADE_VENV)
# An installed hpcomm requires the torch it was built for; it comes back below, built for the new one.
	$(BIN)/python -m pip --disable-pip-version-check uninstall --quiet --yes hpcomm 2> /dev/null
	$(PIP) torch==$(TORCH)
	@rm -f $(VENV)/.made-torch-*
	@touch $@

$(MADE_DEV): $(MADE_VENV) pyproject.toml
	$(REQUIREMENTS) dev | $(PIP) --quiet -r /dev/stdin
	@touch $@

$(MADE_DEMO): $(MADE_VENV) pyproject.toml
	$(REQUIREMENTS) demo | $(PIP) --quiet -r /dev/stdin
	@touch $@

# Other choices than last time are a reason to build again.
$(SETTINGS): FORCE
	@mkdir -p build
	@printf '%s\n' "$$USE_CUDA" "$$TORCH_CUDA_ARCH_LIST" "$$CUDA_HOME" "$$CXX" "$$CXXFLAGS" "$$CMAKE_ARGS" '$(TORCH)' | cmp -s - $@ || \
	printf '%s\n' "$$USE_CUDA" "$$TORCH_CUDA_ARCH_LIST" "$$CUDA_HOME" "$$CXX" "$$CXXFLAGS" "$$CMAKE_ARGS" '$(TORCH)' > $@

$(MADE_NATIVE): $(MADE_TORCH) $(MADE_TOOLS) $(SETTINGS) $(NATIVE_SOURCES) $(if $(wildcard hpcomm/_C.*.so),,FORCE)
	HPCOMM_BUILD_DIR=$(BUILD_DIR) CMAKE_ARGS="-DHPCOMM_BUILD_TESTS=ON $$CMAKE_ARGS" \
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# Puts hpcomm on the path of .venv. Its own build of the module finds nothing left to do.
$(MADE_EDITABLE): pyproject.toml setup.py $(MADE_TORCH) | $(MADE_NATIVE)
	HPCOMM_BUILD_DIR=$(BUILD_DIR) CMAKE_ARGS="-DHPCOMM_BUILD_TESTS=ON $$CMAKE_ARGS" \
	$(PIP) --quiet --no-build-isolation --no-deps --editable .
	@touch $@
