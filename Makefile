# Everything a developer runs. `make help` lists it; each target installs what it lacks.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
UV     := uv==0.13.9
EXTRAS := --extra controller --extra llama --extra dev
export UV_LINK_MODE := copy
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help
help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("pomona needs Python 3.11 or later; %s is %s: run make PYTHON=python3.11" % (sys.executable, sys.version.split()[0]))'
	@echo "installing Python packages into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(UV)'
	@$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes requirements.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable . '$(UV)'
	@touch $@

.PHONY: setup
setup: $(VENV)/.installed ## Install the virtual environment

.PHONY: lock
lock: ## Refresh requirements.lock from pyproject.toml
	@test -x $(BIN)/uv || { $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet '$(UV)'; }
	@$(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --no-header $(EXTRAS) pyproject.toml --output-file requirements.lock
