# Every target does its own set-up: a virtual environment in .venv, from the lock file.

PYTHON ?= python3
SANDBOX ?= bubblewrap
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PACKAGES := backends environments lachesis packages tool_call_parsers
CODE := $(PACKAGES) tests benchmarks scripts
BENCHMARKS := startup trajectories agent_loop imports parsers message_graph token_turns long_rollouts live_compression endpoint token_exactness trainer_gets routing rollout_memory loop_lag process_lag serve_lag rollout_api staleness sandboxes sandbox_cost evaluation_coverage interval_coverage batch view weight

.DEFAULT_GOAL := help
.PHONY: help demo test test-attacks train-venv test-train test-tinker-sdks test-skyrl test-kills train-demo train-demo-trl test-vllm test-atropos test-programs test-templates test-guests test-harbor test-ray test-slurm fuzz-endpoint lint format docs bench bench-train lock release clean

help:
	@echo "make demo    play a few problems with the embedded model, in a sandbox (first run installs everything)"
	@echo "make test    lint, types, import rule, tests"
	@echo "make test-attacks  every attack on every kind of sandbox, heavy ones included"
	@echo "make train-venv  install torch for the CPU beside the project, into .venv-train"
	@echo "make test-train  tests of training: trainer, embedded engine, forward passes (first run installs torch)"
	@echo "make test-tinker-sdks  the embedded engine against an older Tinker SDK too (after make test-train)"
	@echo "make test-skyrl  a training run with SkyRL as the engine (Python 3.12; first run installs 6 GB)"
	@echo "make train-demo-trl  SmolLM2 learns to call tools under TRL (first run installs torch)"
	@echo "make test-kills  kill -9 of each process of a training run, 20 times each, 50 times of an evaluation, 20 times of a batch"
	@echo "make train-demo  a small model learns to call tools on two cores; writes a plot (first run installs torch)"
	@echo "make test-vllm  tests against a real vLLM on the CPU (first run installs 3.5 GB)"
	@echo "make test-atropos  all environments of atroposlib's source distribution that play without the network"
	@echo "make test-programs  agent programs of others in sandboxes (first run installs 1.5 GB from PyPI and npm)"
	@echo "make test-templates  the calls of all chat templates of five packages, read back (first run downloads 160 MB)"
	@echo "make fuzz-endpoint  10,000 behaviours of agent programs against the recording endpoint"
	@echo "make test-guests  tests with verifiers and Inspect (first run installs 350 MB into ~/.cache/lachesis)"
	@echo "make test-harbor  task folders and jobs against Harbor's own models and viewer (first run installs it into ~/.cache/lachesis)"
	@echo "make test-ray  batches on a real Ray of this machine (first run installs 200 MB into ~/.cache/lachesis)"
	@echo "make test-slurm  batches under a Slurm of one node; as root, with Debian's slurm-wlm and munge"
	@echo "make lint    lint, format check, types, import rule, faces and sizes of packages"
	@echo "make format  fix what the linter can fix"
	@echo "make docs    write what docs/parsers.md and the READMEs of packages say of the code, and the sizes of packages"
	@echo "make bench   the figures of docs/benchmarks.md"
	@echo "make bench-train  the figure of a training step (first run installs torch)"
	@echo "make release VERSION=0.2.0  set the version of all packages, build their wheels, install and try them"
	@echo "make lock    pin the dependencies of pyproject.toml again"

$(READY): requirements/lock.txt $(wildcard pyproject.toml */pyproject.toml packages/*/pyproject.toml) scripts/venv.sh
	@PYTHON=$(PYTHON) scripts/venv.sh $(VENV)
	@touch $@

demo: $(READY)
	@$(BIN)/lachesis demo --sandbox $(SANDBOX)

# The first rooms touch nothing that is shared; the others start sandboxes, and look for what these leave. Both of their
# sets take about the same time.
SHARING := tests/tool_call_parsers tests/trajectories tests/inference tests/testing tests/endpoint tests/evaluation
SANDBOXES := tests/backends tests/environments
OTHERS := $(filter-out $(SHARING) $(SANDBOXES) tests/support tests/torch tests/vllm tests/programs tests/__init__.py tests/conftest.py tests/__pycache__, $(wildcard tests/*))
test: lint
	@scripts/atropos-environments.sh $(BIN)/python >/dev/null || \
	  echo "the environments of atroposlib cannot be downloaded from PyPI: their tests are skipped"
	$(BIN)/pytest -n 2 --durations=10 $(SHARING)
	scripts/test-halves.sh $(BIN)/pytest "$(SANDBOXES)" "$(OTHERS)"

test-attacks: $(READY)
	LACHESIS_EVERY_ATTACK=1 $(BIN)/pytest --durations=10 -k test_an_attack_fails tests/backends/test_backend_conformance.py
	LACHESIS_EVERY_ATTACK=1 $(BIN)/pytest -k test_every_wall tests/backends/test_root.py
	$(BIN)/pytest tests/testing/test_attacks.py

# torch and what else training needs. It does not go into $(VENV), for its lock file is that of the core.
train-venv: $(READY)
	@scripts/venv_beside.sh $(VENV) $(VENV)-train requirements/train.txt

test-train: train-venv
	LACHESIS_NEED_TORCH=1 $(VENV)-train/bin/python -m pytest --durations=10 tests/inference/test_forward_pass.py tests/torch

# 0.25 is the version that SkyRL's server takes. It goes into a folder of its own, which hides the environment's.
OLDER_TINKER ?= $(VENV)-tinker-0.25
$(OLDER_TINKER)/tinker: | train-venv
	$(VENV)-train/bin/pip install --quiet --no-deps --target $(OLDER_TINKER) tinker==0.25.0

WITH_OLDER_TINKER := PYTHONPATH=$(abspath $(OLDER_TINKER)) LACHESIS_NEED_TORCH=1 $(VENV)-train/bin/python -P -m pytest
test-tinker-sdks: train-venv $(OLDER_TINKER)/tinker
	$(WITH_OLDER_TINKER) tests/torch/engine/test_wire.py

SKYRL ?= $(HOME)/.cache/lachesis/skyrl
PYTHON312 ?= python3.12
test-skyrl: train-venv $(OLDER_TINKER)/tinker
	@scripts/skyrl_venv.sh $(PYTHON312) $(SKYRL)
	LACHESIS_SKYRL=$(SKYRL)/bin/python $(WITH_OLDER_TINKER) -s tests/torch/test_skyrl.py

train-demo-trl: train-venv
	$(VENV)-train/bin/python -m benchmarks.train_demo_trl

test-kills: train-venv
	LACHESIS_NEED_TORCH=1 LACHESIS_KILLS=20 $(VENV)-train/bin/python -m pytest tests/torch/test_whole_path.py -k killed
	LACHESIS_KILLS=50 $(BIN)/pytest tests/runs/test_evaluate.py -k kill_9
	LACHESIS_KILLS=20 $(BIN)/pytest tests/batch -k kills

train-demo: train-venv
	$(VENV)-train/bin/python -m benchmarks.train_demo

test-vllm: $(READY)
	$(BIN)/pytest -s tests/vllm

PROGRAMS ?= $(HOME)/.cache/lachesis/programs
test-programs: $(READY)
	@PYTHON=$(PYTHON) scripts/programs.sh $(PROGRAMS)
	LACHESIS_PROGRAMS=$(PROGRAMS) $(BIN)/pytest -s tests/programs

# The packages are only downloaded, for the chat templates in them.
TEMPLATES ?= $(HOME)/.cache/lachesis/templates
test-templates: $(READY)
	@mkdir -p $(TEMPLATES)
	@cd $(TEMPLATES) && $(PYTHON) -m pip download --quiet --no-deps --only-binary :all: --exists-action i \
	  trl==1.16.0 axolotl==0.19.0 unsloth==2026.10.9 xinference==4.1.0
	@cd $(TEMPLATES) && $(PYTHON) -m pip download --quiet --no-deps --no-binary :all: --exists-action i llama-cpp-python==0.3.36
	$(BIN)/python -m benchmarks.chat_templates $(TEMPLATES)

fuzz-endpoint: $(READY)
	LACHESIS_CLIENT_BEHAVIOURS=10000 $(BIN)/pytest -q -s -n 2 tests/endpoint/test_client_behaviours.py

test-atropos: $(READY)
	@scripts/atropos-environments.sh $(BIN)/python
	@scripts/atropos_venv.sh $(VENV) $(VENV)-atropos
	$(VENV)-atropos/bin/python -m benchmarks.atropos_environments

GUESTS ?= $(HOME)/.cache/lachesis/guests
test-guests: $(READY)
	@mkdir -p $(GUESTS)
	@for guest in verifiers inspect; do \
	  echo "== $$guest"; scripts/venv_beside.sh $(VENV) $(GUESTS)/$$guest requirements/guests/$$guest.txt && \
	  LACHESIS_NEED_GUEST=$$guest $(GUESTS)/$$guest/bin/python -m pytest tests/guests/test_$$guest.py || exit 1; \
	done

# Harbor needs Python 3.12 (PYTHON312 names one that uv does not find), so it has an environment of its own. It asks for a
# certifi that mirrors of PyPI may not have yet; any version will do.
HARBOR := $(HOME)/.cache/lachesis/harbor/venv
PYTHON312 ?= 3.12
test-harbor: $(READY)
	@$(BIN)/uv pip show --quiet --python $(HARBOR)/bin/python harbor >/dev/null 2>&1 || \
	  { $(BIN)/uv venv --quiet --clear --python $(PYTHON312) $(HARBOR) && echo certifi >$(HARBOR)/overrides.txt && \
	    $(BIN)/uv pip install --quiet --python $(HARBOR)/bin/python --override $(HARBOR)/overrides.txt harbor==0.25.0; }
	LACHESIS_NEED_HARBOR=1 $(BIN)/pytest tests/harbor

RAY ?= $(HOME)/.cache/lachesis/ray
test-ray: $(READY)
	@mkdir -p $(dir $(RAY))
	@scripts/venv_beside.sh $(VENV) $(RAY) requirements/guests/ray.txt
	LACHESIS_NEED_RAY=1 $(RAY)/bin/python -m pytest tests/batch/test_ray.py

test-slurm: $(READY)
	@for program in munged slurmctld slurmd sbatch; do command -v $$program >/dev/null || \
	  { echo "$$program is not installed; as root: apt-get install slurm-wlm munge"; exit 1; }; done
	@test "$$(id -u)" = 0 || { echo "slurmd starts jobs as root only"; exit 1; }
	LACHESIS_NEED_SLURM=1 $(BIN)/pytest tests/batch/test_slurm.py

VERSION ?=
release: $(READY)
	@scripts/release.sh $(VENV) $(VERSION)

lint: $(READY)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/borders.py --check

format: $(READY)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: $(READY)
	$(BIN)/python scripts/parsers_page.py
	$(BIN)/python scripts/borders.py

bench: $(READY)
	@failed=; for name in $(BENCHMARKS); do \
	  echo "== benchmarks/$$name.py"; $(BIN)/python -m benchmarks.$$name || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "over a limit:$$failed"; exit 1; }

bench-train: train-venv
	$(VENV)-train/bin/python -m benchmarks.training_step

COMPILE := $(BIN)/uv pip compile --quiet --python-version 3.11 --no-emit-index-url --no-header --no-annotate pyproject.toml $(foreach of,compat core data envs parsers sandbox testing tokens train view,--no-emit-package lachesis-$(of))
lock: $(READY)
	$(COMPILE) --universal $(addprefix --extra ,atropos wandb docker dev embedded gsm-symbolic modal ssh) --upgrade \
	  requirements/data.in --output-file requirements/lock.txt
	@sed 's/ ;.*//' requirements/lock.txt >$(VENV)/locked.txt
	$(COMPILE) --extra torch --constraint requirements/lock.txt --constraint requirements/train.in | \
	  grep -vxFf $(VENV)/locked.txt | sed 's/^torch==.*/&+cpu/' >requirements/train.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
