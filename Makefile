# Everything runs in .venv, which the first target that needs it sets up (Python 3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
OLDEST := .venv-oldest

.PHONY: demo test test-oldest lint clean

demo: $(INSTALLED)
	$(BIN)/python examples/digits_tune.py --compare

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal --ignore tests/tune
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile tests/tune

# With the oldest Ray and Optuna, in a venv of their own.
test-oldest: $(OLDEST)/.installed
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest --numprocesses 2 --dist worksteal tests/optuna tests/searchers
	$(OLDEST)/bin/python -m pytest --numprocesses 2 --dist loadfile tests/tune

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,examples]'
	touch $@

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e '.[test]'
	touch $@
