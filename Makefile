# Every target makes or refreshes .venv first; all that is needed beforehand is Python 3.11 and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Two cores, several processes: more threads than this only get in each other's way.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# "make test WORKERS=" runs in one process, as a debugger wants it.
WORKERS ?= -n 2 --dist loadfile
# Of the tests that ARGS names, one of the two halves may have none: pytest then ends with 5.
MAY_BE_NONE = || test $$? -eq 5 -a -n "$(ARGS)"

.PHONY: demo test slow zoo fuzz lint bench ci clean

# Measures this machine once, then trains GPT-2 on four processes under a plan that autopar makes,
# beside the same model on one.
demo: $(VENV)/.stamp
	$(BIN)/python -m autopar profile --if-missing
	$(BIN)/torchrun --standalone --nproc-per-node 4 examples/train_gpt2.py

# First what runs in one process, on two workers; then what starts processes of its own, alone, since
# those are as many as there are cores, and some speak of time.
test: $(VENV)/.stamp
	$(BIN)/python -m pytest -m "not dist and not slow and not gpu and not fuzz" $(WORKERS) $(ARGS) $(MAY_BE_NONE)
	$(BIN)/python -m pytest -m "dist and not slow and not gpu and not fuzz" $(ARGS) $(MAY_BE_NONE)

slow: $(VENV)/.stamp
	$(BIN)/python -m pytest -m "not dist and slow and not gpu and not fuzz" $(WORKERS) $(ARGS) $(MAY_BE_NONE)
	$(BIN)/python -m pytest -m "dist and slow and not gpu and not fuzz" $(ARGS) $(MAY_BE_NONE)

# Random models under random plans against one device; FUZZ_SEED=1 FUZZ_MODELS=1000 for other ones.
fuzz: $(VENV)/.stamp
	$(BIN)/python -m pytest -m fuzz tests/equivalence/test_generated_models.py $(ARGS)

# Every model of the zoo captured, planned and run on simulated ranks: a table, and a failure if a
# row fails.  ARGS=--write puts the table into the README of autopar/sharding; ARGS="BERT T5" takes
# two rows.
zoo: $(VENV)/.stamp
	$(BIN)/python -m tests.zoo_models $(ARGS)

lint: $(VENV)/.stamp-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# Time to plan GPT-2 of several sizes for several clusters.
bench: $(VENV)/.stamp
	$(BIN)/python examples/benchmark.py $(ARGS)

ci:
	.ci/run

clean:
	rm -rf $(VENV) build dist *.egg-info

# --no-build-isolation: the pinned setuptools of the venv builds the package, nothing is fetched
# twice.  The constraints keep torch at the pinned version.
$(VENV)/.stamp: pyproject.toml tests/requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "autopar needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c tests/requirements.txt setuptools torch
	$(PIP) -c tests/requirements.txt --no-build-isolation -e ".[test,demo]"
	touch $@

$(VENV)/.stamp-lint: $(VENV)/.stamp .ci/requirements.txt
	$(PIP) -c tests/requirements.txt -r .ci/requirements.txt
	touch $@
