# Every target works on a fresh machine with Python, make and a compiler: the environment is made on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)

.PHONY: help setup swarm test check bench protos clean
.DEFAULT_GOAL := help

help: ## Show the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(READY) ## Make the environment in .venv

# torch by its exact version first: a range may fetch a CUDA build of several GB where a CPU wheel of that version is near
$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): a few minutes, most of them downloads without a word"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt "$(TORCH)"
	$(PIP) install -c constraints.txt -e '.[dev,report]'
	@touch $@

swarm: $(READY) ## Train with four peers on this machine; the report goes to runs/<time>
	$(BIN)/peer swarm --peers 4 --rounds 8

test: $(READY) ## Run the tests; fails under 85 % line coverage
	$(BIN)/python -m pytest --cov=peer --cov-report=term --cov-fail-under=85

check: $(READY) ## Lint, format, types and freshness of generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict peer
	$(BIN)/python protos/generate.py --check

bench: $(READY) ## Measure what mixing costs a peer: step time and memory (ten minutes)
	$(BIN)/python -m tests.bench.step_time
	$(BIN)/python -m tests.bench.memory

protos: $(READY) ## Generate peer/proto from protos/peer.proto
	$(BIN)/python protos/generate.py

clean: ## Remove the environment, caches and reports
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* runs
