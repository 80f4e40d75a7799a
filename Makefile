# make demo | make test | make test-compatible | make lint | make docs | make models | make clean
# Everything runs in a virtual environment made here from constraints.txt.
#   make test TORCH=2.14.1     the same with another torch, in its own environment
#   make test PYTHON=python3   with another interpreter (3.11 or newer)
#   make test JOBS=4           test processes (3: a third of the suite waits for processes of its own)
#   make kill KILL_POINTS=1 KILL_SEED=7   one kill point again (without: 100, from seed 0)
#   make fuzz N=10000          random command lines, files and shells; FIRST=123 N=1 runs one seed
#   make prove N=2000          the last-round-trip bound against the exact model; FIRST=123 N=1 shows one problem
#                              PROVE="--plans --seconds 10": plans under all send modes, and how many are proved;
#                              PROVE=--everything: problems of every kind, and which claims of a plan do not hold
#   make release-check         builds wheel and sdist, installs and uses them on Python 3.11, 3.12, 3.13 (PYTHONS=...)
#   make gpu-check             what a GPU makes of it, in at most five minutes; report in gpu-check.json. Needs a Python
#                              with torch and nothing else; DEVICE=cpu runs it without a GPU, GPU_PYTHON=... with another
#   make test-compatible       the bitwise tests of the passes under another instruction set
#   make docs                  the documentation, to build/site/index.html; any warning is an error

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= 2.13.0
JOBS ?= 3
PYTEST_ARGS ?=
N ?= 500
FIRST ?= 0
KILL_POINTS ?= 100
KILL_SEED ?= 0
DEVICE ?= cuda
GPU_REPORT ?= gpu-check.json

COMPATIBLE := tests/passes/joint tests/passes/split/test_split.py tests/passes/verify \
	tests/passes/split/test_structural_hash.py tests/passes/test_kernel_strides.py tests/runtime/test_in_process.py \
	tests/pipeline/test_models.py tests/pipeline/test_any_model.py tests/pipeline/test_more_kinds.py \
	tests/pipeline/test_trained_losses.py tests/pipeline/test_fixed_branches.py \
	tests/pipeline/test_failures_boundaries.py tests/pipeline/test_failures_gradients.py

VENV := $(if $(filter 2.13.0,$(TORCH)),.venv,.venv-$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(TORCH)

GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
# tests start hundreds of processes: what one of them compiled, the next ones read
export PYTHONDONTWRITEBYTECODE =

.PHONY: gpu-check release-check demo test test-compatible lint docs models kill fuzz prove install wheel clean

install: $(READY)

$(READY): constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python found: install Python 3.11 or give PYTHON=" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt setuptools wheel build torch==$(TORCH)
	$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt --no-build-isolation -e '.[test,lint]'
	touch $@

gpu-check:
	PYTHONPATH=$(CURDIR) $(GPU_PYTHON) -m zbcompile selftest --device $(DEVICE) -o $(GPU_REPORT)

release-check: $(READY)
	$(BIN)/python -m tests.release $(PYTHONS)

demo: $(READY)
	$(BIN)/zbcompile demo

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

test-compatible: $(READY)
	MKL_CBWR=COMPATIBLE $(BIN)/python -m pytest -n $(JOBS) $(COMPATIBLE) $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check zbcompile passes tests examples benchmarks docs
	$(BIN)/ruff format --check zbcompile passes tests examples benchmarks docs
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

$(VENV)/.docs-$(TORCH): $(READY)
	$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt --no-build-isolation -e '.[docs]'
	touch $@

docs: $(VENV)/.docs-$(TORCH)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

models: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) tests/pipeline/test_models.py -vv $(PYTEST_ARGS)

kill: $(READY)
	KILL_POINTS=$(KILL_POINTS) KILL_SEED=$(KILL_SEED) $(BIN)/python -m pytest -n 0 tests/runtime/test_kill.py $(PYTEST_ARGS)

fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --first $(FIRST) --count $(N)

prove: $(READY)
	$(BIN)/python -m tests.prove --first $(FIRST) --count $(N) $(PROVE)

wheel: $(READY)
	$(BIN)/python -m build --no-isolation --outdir dist

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
