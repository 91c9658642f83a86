# Every target sets itself up in a private environment, .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := requirements/constraints.txt
AZURITE := $(VENV)/azurite/node_modules/.bin/azurite-blob
AZURITE_VERSION := 3.37.0

.PHONY: help install demo demo-streaming demo-tune test test-cluster test-faults test-slurm test-gpu check bench bench-quick bench-report bench-scaling bench-step kill-test kill-train clean

help:  ## print this text
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

install: $(VENV)/.installed  ## create .venv with the package and everything its tests need

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
	  echo "installing Azurite, the server for the az:// tests"; \
	  npm install --silent --no-audit --no-fund --prefix $(VENV)/azurite azurite@$(AZURITE_VERSION) \
	    || echo "Azurite could not be installed: the az:// tests will be skipped"; \
	else echo "npm is not installed: the az:// tests will be skipped"; fi
	@touch $@

demo: install  ## train on a local bucket of synthetic scans and write scores and pictures; no cloud account needed (about 4 minutes on two idle cores)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python demo/demo.py --out demo-out

demo-streaming: install  ## list, stream, resume and draw whole objects (about a minute)
	$(BIN)/python demo/streaming.py --out demo-out/streaming

demo-tune: install  ## run a search of eight trials, stop the bad ones early, write its page (about 5 minutes)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python demo/tuning.py --out demo-out/search

# Tests spend much of their time waiting for servers to start and processes to end.
TEST_PROCESSES ?= 3

test: install  ## run all tests but the cluster and fault tests, against real servers that the tests start (about 14 minutes)
	@# Threads that spin while they wait would take the few cores from the other processes.
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadscope $(PYTEST_ARGS)

test-cluster: install  ## run the Ray and Kubernetes tests that kill nodes, pods and drivers (about 12 minutes)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m cluster $(PYTEST_ARGS)

test-slurm: install  ## run jobs on a real SLURM cluster of four nodes on this machine; needs root, installs Debian's slurm-wlm and munge (about 10 minutes)
	@[ "$$(id -u)" -eq 0 ] || { echo "make test-slurm needs root, because its nodes are namespaces of this machine"; exit 1; }
	@command -v slurmctld munged ip >/dev/null || { echo "installing slurm-wlm, munge and iproute2"; \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge iproute2 procps >/dev/null; }
	VOXLANE_SLURM=1 $(BIN)/python -m pytest tests/cluster/slurm $(PYTEST_ARGS)

# With VOXLANE_SLURM=1, as root and after `make test-slurm`, this also runs 100 jobs of a real SLURM to their time limit.
test-faults: install  ## run commands under injected faults, kills and bad scans (an hour or more)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m faults $(PYTEST_ARGS)

# Without a GPU, `make test` runs the same kernels in Triton's interpreter and skips tests that need a GPU.
test-gpu: install  ## run kernels, recorded steps, sliding windows, augmentation and background saves on this machine's GPU
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "make test-gpu needs a GPU that torch can use; see nvidia-smi")'
	$(BIN)/python -m pytest tests/model tests/train/test_step.py tests/train/test_timing.py tests/bench/test_step.py tests/checkpoint/test_async.py $(PYTEST_ARGS)

check: install  ## run ruff, mypy, the import rules and the limits on names, complexity and size
	$(BIN)/ruff check src tests benchmarks demo tools
	$(BIN)/ruff format --check src tests benchmarks demo tools
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/code_figures.py --check

$(VENV)/.bench: $(VENV)/.installed
	$(PIP) install --quiet -c $(CONSTRAINTS) --editable '.[dev,bench]'
	@# nnU-Net's networks install torchvision. PyPI's build of it does not match a CPU torch and breaks packages that import
	@# it, such as Lightning. The benchmarks use only nnU-Net's loader, which needs neither of the two.
	$(PIP) uninstall --quiet --yes torchvision timm
	@touch $@

bench: $(VENV)/.bench  ## run all benchmarks against peers (more than an hour); results in benchmarks/results
	$(BIN)/python benchmarks/run.py

bench-quick: $(VENV)/.bench  ## run the benchmarks with small numbers, to check that they work (about 10 minutes)
	$(BIN)/python benchmarks/run.py --quick

bench-report: install  ## write docs/performance.md, benchmarks/results/README.md and the plots from the result files
	$(BIN)/python benchmarks/plot.py
	$(BIN)/python benchmarks/performance.py

bench-scaling: $(VENV)/.bench  ## measure training on 1 to 8 workers and 1 or 2 trials at once (about 20 minutes on an idle machine)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/voxlane bench scaling --workers 1,2,4,8 --trials 8 --concurrent 1,2 \
	  --out benchmarks/results/scaling.json $(SCALING_ARGS)

bench-step: install  ## compare a training step with MLPerf's reference, nnU-Net and torch.compile on this machine's GPU (about 4 minutes)
	$(BIN)/voxlane bench step --out benchmarks/results/step.json $(STEP_ARGS)

kill-test: $(VENV)/.bench  ## kill saving processes 100 times and check what they leave behind (about 7 minutes)
	$(BIN)/python benchmarks/kill_saves.py $(KILL_ARGS)

kill-train: $(VENV)/.bench  ## kill workers, nodes and drivers of Ray runs 20 times and check the runs (about 10 minutes)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python benchmarks/kill_training.py $(KILL_ARGS)

clean:  ## remove the environment and the output of the demo
	rm -rf $(VENV) demo-out
