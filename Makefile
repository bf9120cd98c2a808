# PAT on one machine. `make all` runs the whole pipeline, `make test` every test; both make .venv first if need be.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
CONFIG ?= config/config.yaml
PORT ?= 5000

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
VENV := .venv
READY := $(VENV)/.ready
CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH := $(shell grep '^torch==' envs/cpu.txt)
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help all test test-matrix test-timing test-fast lint ui env clean-results
.DEFAULT_GOAL := help

help:
	@echo "make all            environment, then the whole pipeline (CONFIG=$(CONFIG)); prints where the report is"
	@echo "make test           environment, then every test that needs no GPU"
	@echo "make test-matrix    the whole matrix of engine tests, of which make test runs a sample"
	@echo "make test-timing    the simulator against real generations; needs a machine that does nothing else"
	@echo "make test-fast      the tests that take seconds"
	@echo "make lint           style of the code and of the workflow"
	@echo "make ui             MLflow on what was run (CONFIG=...), http://127.0.0.1:$(PORT) (PORT=...)"
	@echo "make env            only the environment, $(VENV), from envs/cpu.txt"
	@echo "make clean-results  remove all results"

all: env
	pat doctor --config $(CONFIG)
	snakemake --profile local all --configfile $(CONFIG)
	@pat where --config $(CONFIG)

test: env
	pytest -m "not gpu and not matrix and not timing"

test-matrix: env
	pytest -m matrix

test-timing: env
	pytest -m timing

test-fast: env
	pytest -m "not gpu and not matrix and not timing and not slow and not engine and not training and not workflow"

lint: env
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile workflow
	snakemake --lint

ui: env
	@pat ui --config $(CONFIG) --port $(PORT)

env: $(READY)

# Torch by itself and first. Its CPU build comes from PyTorch's own index; where that cannot be reached, pip's own
# configuration decides, and the CUDA build on PyPI comes with libraries that it needs even on a CPU (hence with
# its dependencies). The second `pip install` finds it in place and sets the rest to the pinned versions.
$(READY): envs/cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	    { echo "PAT needs Python 3.11: apt-get install python3.11 python3.11-venv, or make PYTHON=/path/to/it"; exit 1; }
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV) || \
	    { echo "python3.11 has no venv: apt-get install python3.11-venv"; exit 1; }
	@echo "Environment: installing $$(grep -c == envs/cpu.txt) pinned packages into $(VENV) (4 GB, a few minutes)"
	@if python -c 'from urllib.request import urlopen; urlopen("$(CPU_INDEX)/torch/", timeout=5)' 2>/dev/null; \
	    then pip install --quiet --no-deps --extra-index-url $(CPU_INDEX) $(TORCH); \
	    else pip install --quiet $(TORCH); fi
	@pip install --progress-bar off --no-deps -r envs/cpu.txt | awk -v all=$$(grep -c == envs/cpu.txt) \
	    '/^(Collecting|Processing|Requirement already)/ { printf "\r  package %d of %d", ++n, all; fflush() } \
	    /^Installing/ { printf ", unpacking"; fflush() } END { print "" }'
	@pip install --quiet --no-deps --no-build-isolation --editable .
	@python -c 'import torch; torch.version.cuda and print("warning: a CUDA build of torch was installed,", \
	    "since $(CPU_INDEX) could not be reached")'
	@touch $@
	@echo "Environment: ready"

clean-results:
	rm -rf results/* .snakemake
