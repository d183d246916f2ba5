# The two commands: `make demo` and `make test`. Both set up what they need in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test test-core lint typecheck check clean

demo: $(VENV)/run.ok
	$(BIN)/scute demo

test: $(VENV)/test.ok
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=10

# What needs neither torch nor a model: the core, the kernels, and the import of checkpoints.
test-core: $(VENV)/core.ok
	$(BIN)/pytest -q -n 2 --dist loadfile tests/kernels tests/test_*.py

lint: $(VENV)/lint.ok
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The checker does not know that the top-level folders are installed inside scute_jax: a copy shows it.
typecheck: $(VENV)/test.ok $(VENV)/lint.ok
	rm -rf build/types && mkdir -p build/types
	cp -r scute_jax build/types && cp -r kernels models serving build/types/scute_jax
	$(BIN)/pyright --pythonpath $(BIN)/python

check: lint typecheck test

clean:
	rm -rf $(VENV) build/types build *.egg-info .cache

# A machine with an NVIDIA GPU gets jax with CUDA; any other the plain one.
EXTRA := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo "[cuda12]")

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip setuptools

$(VENV)/run.ok: $(VENV)/bin/python pyproject.toml
	@echo "installing scute_jax into $(VENV)"
	$(BIN)/pip install -q -e ".$(EXTRA)"
	touch $@

# torch is needed as an oracle only; the release that is named has a build without CUDA.
$(VENV)/test.ok: $(VENV)/run.ok
	@echo "installing the oracles (torch, transformers, PEFT)"
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q -e ".[test]"
	touch $@

$(VENV)/core.ok: $(VENV)/run.ok
	$(BIN)/pip install -q pytest pytest-xdist hypothesis beartype
	touch $@

$(VENV)/lint.ok: $(VENV)/run.ok
	$(BIN)/pip install -q -e ".[lint]"
	touch $@
