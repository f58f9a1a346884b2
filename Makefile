PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install demo test check clean schema accuracy

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: install
	$(BIN)/meshwright demo --output demo

test: install
	$(BIN)/python -m pytest -q -n auto --dist loadfile -m "not distributed"
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m distributed

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# RUNS: a table of published runs (see docs/accuracy.md); VTRAIN: vTrain's ground_truth_multi.csv
accuracy: install
	$(BIN)/python -m benchmarks.accuracy $(RUNS) $(if $(VTRAIN),--vtrain $(VTRAIN)) -o docs/accuracy.md

schema: install
	$(BIN)/python -m specs.make_schema

clean:
	rm -rf $(VENV) demo .pytest_cache .mypy_cache .ruff_cache
