# Everything a developer runs. `make help` lists it; each target installs by itself what it lacks.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
RUN     := .venv-run
UV      := uv==0.13.9
SANDBOX := $(BIN)/python -m tests.controlplane.sandbox --
PYTEST  := $(BIN)/python -m pytest
# Tests in parallel, each worker in a sandbox of its own. They wait more than they work: more workers than cores.
WORKERS := 7
WORKED  := $(PYTEST) -p tests.controlplane.workers --sandboxes $(WORKERS) --durations 10 --durations-min 1
ALONE   := $(findstring .py,$(TESTS))
GOLDEN  := tests/unit/controller/services/test_golden.py tests/unit/docs/test_pages.py
SLOW    := tests/hosts tests/cluster tests/chaos
ON_MACS := artifacts cli crds devices fitness gateway kube launchd metal_agent runtimes standalone
IMAGE_LOCKS := deploy/image
# Hard links from uv's cache would tie the checkout to another user's file system.
export UV_LINK_MODE := copy
# A machine behind a proxy has that certificate in its own store.
export UV_SYSTEM_CERTS := 1

# Tests and demo start many processes, which must not compile everything anew each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: run
run: $(RUN)/.installed ## Serve a tiny model on this machine alone; MODEL=hf://... for a real one, ONCE=1 for one question, PORT=...
	@$(if $(MODEL),,$(RUN)/bin/python examples/tiny.py build/run/tiny.gguf)
	@$(RUN)/bin/pomona up --model '$(or $(MODEL),build/run/tiny.gguf)' $(if $(ONCE),--ask 'Who are you?') \
	  --port $(or $(PORT),$(if $(ONCE),0,8080))

.PHONY: demo
demo: setup binaries ## Serve one model from a pod and from a host process; MODEL=hf://... for a real one, KEEP=1 to stay
	@$(BIN)/python -m tests.demo $(if $(MODEL),--model '$(MODEL)') $(if $(KEEP),--keep)

.PHONY: demo-shell
# Make would expand $TOKEN in the command of a user, which is meant for the shell in the demo.
demo-shell: export override COMMAND := $(value COMMAND)
demo-shell: setup ## Open a shell in the cluster of a running `make demo KEEP=1`; COMMAND='...' for one command
	@$(BIN)/python -m tests.demo.shell $(if $(COMMAND),"$$COMMAND")

.PHONY: test
test: test-fast binaries servers image-root ## Run all tests but the long ones; the slow ones in parallel, each worker with a control plane
	@$(WORKED) -m 'not long' $(SLOW)

# They are a third of the slow work: faults at random, whole upgrades, outages of minutes, benchmarks. CI runs them beside `make test`.
# The properties that `make test-fast` checks with 25 random examples are checked with 200.
.PHONY: test-long
test-long: setup binaries servers prometheus image-root ## Run the long tests: chaos, crashes, disturbances, upgrades, Prometheus, the image; properties
	@$(PYTEST) --numprocesses $$(nproc) --hypothesis-profile thorough -m hypothesis tests/unit
	@$(BIN)/python -m tests.compiled
	@$(WORKED) -m long $(SLOW)

.PHONY: test-fast
test-fast: setup ## Run the tests that need no control plane; TESTS=path and ARGS=... for some of them
	@$(if $(TESTS)$(ARGS),$(PYTEST) $(or $(TESTS),tests/unit) $(ARGS),$(BIN)/python -m tests.parts)

.PHONY: test-hosts
test-hosts: setup servers ## Run the tests of the agent that start real engines, without a control plane
	@$(if $(ALONE),$(PYTEST),$(WORKED)) $(or $(TESTS),tests/hosts) $(ARGS)

.PHONY: test-cluster
test-cluster: setup binaries servers prometheus image-root ## Run the tests on a real control plane, in namespaces of their own; KUBERNETES=1.34.4 for another version
	@$(if $(ALONE),$(SANDBOX) $(PYTEST),$(WORKED)) $(or $(TESTS),tests/cluster) $(ARGS)

# The real vLLM takes 6 GB in the user's cache, and minutes to start: it is no part of `make test`.
.PHONY: test-vllm
test-vllm: setup ## Run the tests with the real vLLM on the processor; TESTS=path and ARGS=... for some of them
	@$(BIN)/python -m tests.vllm.environment >/dev/null
	@$(PYTEST) $(or $(TESTS),tests/vllm) --timeout 900 -s $(ARGS)

# They take 830 MB in the user's cache: they are no part of `make test`.
.PHONY: test-agents
test-agents: setup ## Run Claude Code, Codex, npm's `ai` and clients of Ollama against the gateway, without a network; ARGS=... for some of the tests
	@$(BIN)/python -m tests.agents.programs >/dev/null
	@$(BIN)/python -m tests.agents.python_packages >/dev/null
	@$(SANDBOX) $(PYTEST) $(or $(TESTS),tests/agents) $(ARGS)

# It needs root for a control group of its own, and takes minutes: it is no part of `make test`.
.PHONY: test-systemd
test-systemd: setup ## Run the agent as a unit of a real systemd in namespaces of its own, as root; TESTS=path and ARGS=... for some
	@$(PYTEST) $(or $(TESTS),tests/systemd) --timeout 900 $(ARGS)

# A real kubelet takes root, cgroups and minutes: it is no part of `make test`.
.PHONY: test-node
test-node: setup binaries ## Run the tests on nodes with a real kubelet and containerd, as root; ARGS=... for some of them
	@$(BIN)/python -m tests.node.preparation
	@$(BIN)/python -m tests.node $(or $(TESTS),tests/node) --timeout 600 $(ARGS)

# To build Kueue takes minutes: it is no part of `make test`, which has its recorded answers.
.PHONY: test-kueue
test-kueue: setup binaries ## Run the tests with the real Kueue; TESTS=path and ARGS=... for some of them
	@$(BIN)/python -m tests.controlplane.kueue >/dev/null
	@$(SANDBOX) $(PYTEST) $(or $(TESTS),tests/kueue) --timeout 600 $(ARGS)

.PHONY: durations
durations: setup binaries servers prometheus image-root ## Write the table by which `make test` starts long tests first
	@$(WORKED) $(SLOW) --write-durations

.PHONY: benchmarks
benchmarks: setup image-root ## Measure every figure beside its floor; NAME=one for one of them
	@failed=0; for path in $(if $(NAME),benchmarks/$(NAME).py,$$(grep -l __main__ benchmarks/*.py)); do \
	  name=$$(basename $$path .py); \
	  echo "== $$name"; $(BIN)/python -m benchmarks.$$name || failed=1; \
	done; exit $$failed

.PHONY: chaos
chaos: setup binaries ## Break hosts and API server at random while clients ask, for 90 s; SECONDS=... and SEED=... to repeat a run
	@$(SANDBOX) $(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED)) $(if $(SECONDS),--seconds $(SECONDS))

.PHONY: crash
crash: setup binaries ## Crash the controller at every write of each scenario, and disturb it; ARGS='-k hosts' for some
	@CRASH=everything $(SANDBOX) $(PYTEST) tests/cluster/crashes tests/cluster/controller/test_model_crashes.py --timeout 3600 $(ARGS)

.PHONY: fuzz
fuzz: setup ## Plan the queue of simulated clusters, and check all invariants; SECONDS=... for longer, SEED=... to repeat one
	@$(BIN)/python -m tests.support.fuzz_queue $(if $(SEED),--seed $(SEED)) $(if $(SECONDS),--seconds $(SECONDS))

.PHONY: lint
lint: setup ## Check style, types, layers, and that what is generated is fresh
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory --jobs 2 --output-sync types types-on-macs
	@$(BIN)/lint-imports
	@$(BIN)/python -m crds.generate --check

.PHONY: types types-on-macs
types:
	@$(BIN)/mypy
# What runs on a Mac, with the library that a Mac has: not all that Linux has is there.
types-on-macs:
	@$(BIN)/mypy --platform darwin --no-warn-unreachable --cache-dir .mypy_cache/darwin $(addprefix -p ,$(ON_MACS))

.PHONY: format
format: setup ## Format the code and mend what can be mended
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: crds
crds: setup ## Write the CRD YAML and docs/reference.md from the structs in crds/
	@$(BIN)/python -m crds.generate

.PHONY: manifests
manifests: setup binaries ## Write deploy/install from the chart
	@$(BIN)/python -m tests.controlplane.helm --manifests

.PHONY: golden
golden: setup ## Write the Deployments of engines on accelerators, and the tables in docs/concepts.md, docs/engines and docs/vendors
	@WRITE_GOLDEN=1 $(PYTEST) -q $(GOLDEN)

.PHONY: binaries
binaries: setup ## Build the control plane of tests and demo, and Helm, into the user's cache, once
	@$(BIN)/python -m tests.controlplane.binaries >/dev/null
	@$(BIN)/python -m tests.controlplane.helm >/dev/null

.PHONY: servers
servers: setup ## Get the servers that tests fetch weights from, Redis, Valkey and Ollama into the user's cache, once
	@$(BIN)/python -m tests.support.servers.programs >/dev/null
	@$(BIN)/python -m tests.support.servers.limit_stores >/dev/null
	@$(BIN)/python -m tests.support.ollama.program >/dev/null

# It takes minutes to build: only long tests need it.
.PHONY: prometheus
prometheus: setup ## Build Prometheus and promtool for the long tests into the user's cache, once
	@$(BIN)/python -m tests.controlplane.prometheus >/dev/null

.PHONY: image-root
image-root: setup ## Assemble what the image contains, for tests that run it without a registry
	@$(BIN)/python -m tests.controlplane.pomona_image >/dev/null

.PHONY: image
image: ## Build Pomona's image with podman, buildah, docker or nerdctl; IMAGE=name:tag, BASE=image with Python
	@$(PYTHON) deploy/image/build.py $(if $(IMAGE),--image '$(IMAGE)') $(if $(BASE),--base '$(BASE)')

.PHONY: lock
lock: ## Refresh requirements.lock, and the locks of the image, from pyproject.toml
	@test -x $(BIN)/uv || { $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet '$(UV)'; }
	@$(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --no-header \
	  --extra controller --extra gateway --extra llama --extra mlx --extra dev pyproject.toml --output-file requirements.lock
	@$(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --no-header --constraint requirements.lock \
	  --extra controller --extra gateway pyproject.toml --output-file $(IMAGE_LOCKS)/requirements.lock
	@$(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --no-header --constraint requirements.lock \
	  --group image-build --output-file $(IMAGE_LOCKS)/build-requirements.lock

.PHONY: clean
clean: ## Remove the virtual environment and what tools left; the cache of binaries stays
	@rm -rf $(VENV) $(RUN) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: setup
setup: $(VENV)/.installed ## Install the virtual environment

# Makes a virtual environment with uv in it; its first argument is the folder.
define venv
	@command -v $(PYTHON) >/dev/null || { echo "pomona: $(PYTHON) is missing: install Python 3.11 or later, or run make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("pomona: %s is Python %s, 3.11 or later is needed: run make PYTHON=python3.11" % (sys.executable, sys.version.split()[0]))'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "pomona: $(PYTHON) has no ensurepip: install the package python3-venv" >&2; exit 1; }
	@echo "installing Python packages into $(1) (once: half a minute, or minutes if they must be downloaded)" >&2
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@$(1)/bin/python -m pip install --quiet --disable-pip-version-check '$(UV)'
endef

$(VENV)/.installed: requirements.lock pyproject.toml
	$(call venv,$(VENV))
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes --requirement requirements.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

# What a machine that serves needs, in the same versions, and nothing for developers.
$(RUN)/.installed: requirements.lock pyproject.toml
	$(call venv,$(RUN))
	@$(RUN)/bin/uv pip install --quiet --python $(RUN)/bin/python --constraint requirements.lock --editable '.[llama]'
	@touch $@
