# Every target does its own set-up: a virtual environment in .venv, from the lock file.

PYTHON ?= python3
SANDBOX ?= bubblewrap
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.demo-ready
PROJECTS := $(wildcard pyproject.toml */pyproject.toml packages/*/pyproject.toml)
PACKAGES := backends environments lachesis packages tool_call_parsers
CODE := $(PACKAGES) tests benchmarks scripts
BENCHMARKS := startup trajectories agent_loop imports parsers message_graph token_turns long_rollouts live_compression endpoint token_exactness trainer_gets routing rollout_memory loop_lag process_lag serve_lag rollout_api staleness sandboxes sandbox_cost checkpoints pools evaluation_coverage interval_coverage batch view weight

.DEFAULT_GOAL := help
.PHONY: help demo test test-all train-venv test-train train-demo lint format docs site bench bench-train lock release clean atropos-environments force

help:
	@echo "make demo    two small tasks with the embedded model, in a sandbox (first run installs everything)"
	@echo "make test    the tests; P=view runs those of one package only"
	@echo "make test-all  the same with the long tests: many kills, heavy attacks, all examples; training too (installs torch)"
	@echo "make train-venv  install torch for the CPU beside the project, into .venv-train"
	@echo "make test-train  tests of training: trainer, embedded engine, forward passes (first run installs torch)"
	@echo "make test-NAME  tests against programs of others, installed on first use:"
	@sed -n 's/^#   /    /p' scripts/test-with.sh
	@echo "make train-demo  a small model learns to call tools on two cores; writes a plot (first run installs torch)"
	@echo "make train-demo-trl  SmolLM2 learns to call tools under TRL (first run installs torch)"
	@echo "make lint    lint, format check, types, import rule, faces and sizes of packages"
	@echo "make format  fix what the linter can fix"
	@echo "make docs    write docs/settings.md, what docs/parser*.md and the READMEs of packages say of the code, and sizes"
	@echo "make site    the documentation with a search, as site/index.html, to be read without a server or the network"
	@echo "make bench   the figures of docs/benchmarks.md"
	@echo "make bench-train  the figure of a training step (first run installs torch)"
	@echo "make release VERSION=0.3.0  set the version of all packages, build wheels and site, try both; publishes nothing"
	@echo "make lock    pin the dependencies of pyproject.toml again"

$(READY): requirements/lock.txt $(PROJECTS) scripts/venv.sh
	@PYTHON=$(PYTHON) scripts/venv.sh $(VENV)
	@touch $(DEMO_READY) $@

# What a user of the wheels has, a third of what the tests need.
$(DEMO_READY): requirements/demo.txt $(PROJECTS) scripts/venv.sh
	@PYTHON=$(PYTHON) scripts/venv.sh $(VENV) requirements/demo.txt "200 MB"
	@touch $@

demo: $(DEMO_READY)
	@$(BIN)/lachesis demo --sandbox $(SANDBOX)

# Of one package (P=view) nothing but its tests; tests/run.py says which these are.
P :=
test: $(READY)
	$(BIN)/python -m tests.run $(P)

test-all: export LACHESIS_TESTS := all
test-all: atropos-environments lint test test-train

atropos-environments: $(READY)
	@scripts/atropos-environments.sh $(BIN)/python >/dev/null || \
	  echo "the environments of atroposlib cannot be downloaded from PyPI: their tests are skipped"

# torch and what else training needs. It does not go into $(VENV), for its lock file is that of the core.
train-venv: $(READY)
	@scripts/venv_beside.sh $(VENV) $(VENV)-train requirements/train.txt

test-train: train-venv
	LACHESIS_NEED_TORCH=1 PYTHONFAULTHANDLER=1 $(VENV)-train/bin/python -m pytest --durations=10 tests/tokens/inference/test_forward_pass.py tests/train/torch

test-skyrl test-tinker-sdks test-trainers: train-venv
test-%: $(READY) force
	@VENV=$(VENV) PYTHON=$(PYTHON) scripts/test-with.sh $*

train-demo-trl: train-venv force
	$(VENV)-train/bin/python -m benchmarks.train_demo_trl

train-demo: train-venv
	$(VENV)-train/bin/python -m benchmarks.train_demo

VERSION ?=
release: $(READY) site
	@scripts/release.sh $(VENV) $(VERSION)

lint: $(READY)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/borders.py --check
	$(BIN)/python -m benchmarks.weight

format: $(READY)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: $(READY)
	$(BIN)/python scripts/parsers_page.py
	$(BIN)/python scripts/settings_page.py
	$(BIN)/python scripts/borders.py

# mkdocs does not go into $(VENV) either. Its theme prints an advertisement unless told not to.
site: $(READY)
	@scripts/venv_beside.sh $(VENV) $(VENV)-docs requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/python -m mkdocs --quiet build --strict

bench: $(READY)
	@failed=; for name in $(BENCHMARKS); do \
	  echo "== benchmarks/$$name.py"; $(BIN)/python -m benchmarks.$$name || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "over a limit:$$failed"; exit 1; }

bench-train: train-venv
	$(VENV)-train/bin/python -m benchmarks.training_step

COMPILE := $(BIN)/uv pip compile --quiet --python-version 3.11 --no-emit-index-url --no-header --no-annotate pyproject.toml $(foreach of,core parsers sandbox $(patsubst packages/%/,%,$(wildcard packages/*/)),--no-emit-package lachesis-$(of))
lock: $(READY)
	$(COMPILE) --universal $(addprefix --extra ,atropos datasets wandb docker dev gsm-symbolic kubernetes modal prime ssh web) --upgrade \
	  requirements/data.in --output-file requirements/lock.txt
	$(COMPILE) --universal --constraint requirements/lock.txt requirements/demo.in --output-file requirements/demo.txt
	@sed 's/ ;.*//' requirements/lock.txt >$(VENV)/locked.txt
	$(COMPILE) --extra torch --constraint requirements/lock.txt --constraint requirements/train.in | \
	  grep -vxFf $(VENV)/locked.txt | sed 's/^torch==.*/&+cpu/' >requirements/train.txt
	$(COMPILE) --constraint requirements/lock.txt requirements/docs.in | grep -vxFf $(VENV)/locked.txt >requirements/docs.txt

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
