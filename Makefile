# Every target does all its own set-up in a private environment, .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := requirements/constraints.txt
AZURITE := $(VENV)/azurite/node_modules/.bin/azurite-blob
AZURITE_VERSION := 3.37.0

.PHONY: help install demo demo-streaming demo-tune test test-cluster test-slurm test-gpu check bench bench-quick bench-report bench-scaling bench-step kill-test kill-train clean

help:  ## this text
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

install: $(VENV)/.installed  ## make .venv with the package and all it is tested with

$(VENV)/.created: $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	  || { echo "voxlane needs Python 3.11 to 3.13; choose one with: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet -c $(CONSTRAINTS) torch==2.13.0
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	$(PIP) install --quiet -c $(CONSTRAINTS) --editable '.[dev]'
	@if [ -x $(AZURITE) ]; then :; elif command -v npm >/dev/null; then \
	  echo "installing Azurite, the server of the az:// tests"; \
	  npm install --silent --no-audit --no-fund --prefix $(VENV)/azurite azurite@$(AZURITE_VERSION) \
	    || echo "Azurite could not be installed: the az:// tests will be skipped"; \
	else echo "npm is not here: the az:// tests will be skipped"; fi
	@touch $@

demo: install  ## a bucket of scans becomes a model, its scores and pictures, without a cloud account (about 4 minutes)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python demo/demo.py --out demo-out

demo-streaming: install  ## whole objects listed, streamed, resumed and drawn (about a minute)
	$(BIN)/python demo/streaming.py --out demo-out/streaming

demo-tune: install  ## eight trainings side by side, the bad ones stopped early, and a page about them (about 5 minutes)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python demo/tuning.py --out demo-out/search

# Much of a test's time is waiting, for servers to start and processes to end.
TEST_PROCESSES ?= 3

test: install  ## all tests, against real servers that the tests start
	@# Threads of several processes that wait by spinning take the few cores from each other.
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadscope $(PYTEST_ARGS)

test-cluster: install  ## runs and searches on Ray whose nodes and drivers are killed, apps on Kubernetes (about 20 minutes)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m cluster --timeout 400 $(PYTEST_ARGS)

test-slurm: install  ## jobs on a real SLURM of four nodes, started here; needs root, installs Debian's slurm-wlm and munge (about 10 minutes)
	@[ "$$(id -u)" -eq 0 ] || { echo "make test-slurm needs root: its nodes are namespaces of this machine"; exit 1; }
	@command -v slurmctld munged ip >/dev/null || { echo "installing slurm-wlm, munge and iproute2"; \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge iproute2 procps >/dev/null; }
	VOXLANE_SLURM=1 $(BIN)/python -m pytest tests/slurm $(PYTEST_ARGS)

# Without a GPU the same tests run in `make test`, kernels by Triton's interpreter; those that need one are skipped there.
test-gpu: install  ## kernels, recorded steps, windows and augmentation on this machine's GPU
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "make test-gpu needs a GPU that torch can use; see nvidia-smi")'
	$(BIN)/python -m pytest tests/kernels tests/model tests/train/test_step.py tests/train/test_timing.py tests/bench/test_step.py $(PYTEST_ARGS)

check: install  ## ruff, mypy and the import rules
	$(BIN)/ruff check src tests benchmarks demo
	$(BIN)/ruff format --check src tests benchmarks demo
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/.bench: $(VENV)/.installed
	$(PIP) install --quiet -c $(CONSTRAINTS) --editable '.[dev,bench]'
	@# nnU-Net's networks bring torchvision, whose build on PyPI does not fit a CPU torch and then fails whatever looks for
	@# it, Lightning for one. Its loader, which is what is measured, needs neither of the two.
	$(PIP) uninstall --quiet --yes torchvision timm
	@touch $@

bench: $(VENV)/.bench  ## all benchmarks against their peers (more than an hour); results in benchmarks/results
	$(BIN)/python benchmarks/run.py

bench-quick: $(VENV)/.bench  ## the same with small numbers, to see that it runs (about 10 minutes)
	$(BIN)/python benchmarks/run.py --quick

bench-report: install  ## docs/performance.md, benchmarks/results/README.md and the figures, from the result files alone
	$(BIN)/python benchmarks/plot.py
	$(BIN)/python benchmarks/performance.py

bench-scaling: $(VENV)/.bench  ## training on 1 to 8 workers, trials 1 and 2 at once (about 20 minutes on an idle machine)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/voxlane bench scaling --workers 1,2,4,8 --trials 8 --concurrent 1,2 \
	  --out benchmarks/results/scaling.json $(SCALING_ARGS)

bench-step: install  ## a training step by ours, MLPerf's reference, nnU-Net and torch.compile, on this machine's GPU (about 4 minutes)
	$(BIN)/voxlane bench step --out benchmarks/results/step.json $(STEP_ARGS)

kill-test: $(VENV)/.bench  ## kill -9 saving processes 100 times and judge what they leave (about 7 minutes)
	$(BIN)/python benchmarks/kill.py $(KILL_ARGS)

kill-train: $(VENV)/.bench  ## kill workers, nodes and drivers of runs on Ray 20 times and judge the runs (about 10 minutes)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python benchmarks/kill_training.py $(KILL_ARGS)

clean:  ## remove the environment and what the demo wrote
	rm -rf $(VENV) demo-out
