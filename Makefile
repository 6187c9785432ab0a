# Everything runs in .venv, made on the first call from the versions in constraints.txt; nothing global is needed.
#
#   make train    train a small language model, and measure its gradient against the whole batch's
#   make test     the tests
#   make lint types docs bench
#   make ultralytics   the tests of its integration, in a .venv of their own
#
# PYTHON is the interpreter of a new .venv (the pinned versions need 3.11 or newer; the library runs on 3.10).
# TORCH  is what pip installs as torch. A Linux machine without a GPU can save gigabytes with
#        make test TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH  ?= torch==2.13.0

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PINNED := --constraint constraints.txt

.PHONY: train test ultralytics lint types docs bench tables clean

train: .venv/.run
	$(BIN)/wholebatch train $(ARGS)

test: .venv/.dev
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal $(ARGS)

# In a .venv of its own: Ultralytics needs torchvision, and transformers will not load beside one without operators.
ultralytics: .venv-ultralytics/.done
	.venv-ultralytics/bin/python -m pytest tests/integrations/test_ultralytics.py $(ARGS)

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev
	$(BIN)/mypy

docs: .venv/.dev
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

bench: .venv/.bench
	$(BIN)/python benchmarks/exactness.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/overhead.py --noise
	$(BIN)/python benchmarks/variable_length.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/long_rows.py
	$(BIN)/python benchmarks/long_rows.py --decoder --tokens 256 --width 64
	$(BIN)/python benchmarks/precision.py
	$(BIN)/python benchmarks/batch_growth.py
	$(BIN)/python benchmarks/soak.py
	$(BIN)/python benchmarks/attacks.py
	$(BIN)/python benchmarks/ranks.py
	$(BIN)/python benchmarks/coupled.py
	$(BIN)/python benchmarks/watching.py
	$(BIN)/python benchmarks/transformers_sweep.py
	$(BIN)/python benchmarks/trainers.py
	$(BIN)/python benchmarks/tables.py

tables: .venv/.dev
	$(BIN)/python benchmarks/tables.py

clean:
	rm -rf .venv .venv-ultralytics docs/_build build dist .pytest_cache .mypy_cache .ruff_cache

# The stamps: a second call installs nothing unless the lists have changed.
.venv/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "wholebatch: the pinned versions need Python 3.11 or newer; this is %s. Choose one: make PYTHON=python3.12" % sys.version.split()[0])'
	@echo "making .venv with $(PYTHON) and $(TORCH)"
	$(PYTHON) -m venv .venv
	$(PIP) $(TORCH)
	@touch $@

.venv/.run: .venv/.torch pyproject.toml
	$(PIP) $(PINNED) --editable '.[train]'
	@touch $@

.venv/.dev: .venv/.torch pyproject.toml
	$(PIP) $(PINNED) --editable '.[dev]'
	@touch $@ .venv/.run

.venv/.bench: .venv/.dev
	$(PIP) $(PINNED) --editable '.[dev,bench]'
	@touch $@

.venv-ultralytics/.done: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv-ultralytics
	.venv-ultralytics/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	.venv-ultralytics/bin/python -m pip install --quiet --disable-pip-version-check \
		torchvision==0.28.0 ultralytics==8.4.190 pytest==9.2.0 pytest-timeout==2.4.0 hypothesis==6.170.17 \
		--editable .
	@touch $@
