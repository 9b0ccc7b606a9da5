# make demo    train, compare, ask, report on the embedded world   (2 to 3 minutes after set-up)
# make test    all tests                                           (under 10 minutes on two cores)
# make check   ruff and mypy
# make torture a run killed 200 times ends as one left in peace    (about 2 minutes)
# Each sets up .venv by itself; Python 3.11 or newer and make are all it needs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test check torture clean

demo: $(READY)
	$(BIN)/headway demo

test: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

torture: $(READY)
	$(BIN)/python -m tests.training.torture --kills 200

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Headway needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@echo "Setting up $(VENV) (a minute or two, once) …"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
