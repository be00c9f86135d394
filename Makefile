# make demo   watch a small model find a needle in 4,000 tokens of text
# make test   run the test suite
# Both make a virtual environment in .venv first. Python 3.11 or 3.12; a GPU is used if there is one.

VENV := .venv
BIN := $(VENV)/bin
# The first interpreter that fits; override with make PYTHON=...
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
	&& echo $$p && break; done)
# flash-attn-4 runs on Hopper and Blackwell GPUs (compute capability 9 and 10).
GPU_EXTRA := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null \
	| grep -qE '^(9|10)\.' && echo cuda)
comma := ,
WORKERS ?= auto

.PHONY: demo test lint format docs bench clean

demo: $(VENV)/.installed
	$(BIN)/python example.py

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-dev
	$(BIN)/python -m nanovllm.tools.config_doc

bench: $(VENV)/.installed
	$(BIN)/python bench.py

$(VENV)/bin/pip:
	@test -n "$(PYTHON)" || { echo "nanovllm needs Python 3.11 or 3.12: make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml $(VENV)/bin/pip
	$(BIN)/pip install --quiet --editable '.$(if $(GPU_EXTRA),[$(GPU_EXTRA)])'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/bin/pip
	$(BIN)/pip install --quiet --editable '.[dev$(if $(GPU_EXTRA),$(comma)$(GPU_EXTRA))]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV)
