# make demo and make test set the environment up first; nothing else is needed than Python 3.11 to 3.14.
PYTHON ?= python3
PYTEST_ARGS ?=
PINS ?= -c constraints.txt
COMPILED := tests/runtime/deepspeed/test_compiled.py # these compile operators of DeepSpeed
NONE := [ $$? -eq 5 ] # pytest's way to say that PYTEST_ARGS left no test of these
VENV := .venv
BIN := $(VENV)/bin
SUPPORTED := import sys; (3, 11) <= sys.version_info[:2] < (3, 15) or \
  sys.exit("bigplan needs Python 3.11 to 3.14, this is " + sys.version.split()[0] + ": add PYTHON=python3.12")

.DEFAULT_GOAL := help
.PHONY: help demo test test-compiled check docs venv

help:
	@echo "make demo    plan two models, train a small one on this machine, resume it twice (a few minutes)"
	@echo "make test    run all tests (9 minutes on 2 quiet cores, 22 on busy ones)"
	@echo "make test VENV=.venv-newest PINS=   the same with the newest versions that pyproject.toml allows"
	@echo "make test-compiled   those that compile operators of DeepSpeed first (5 minutes)"
	@echo "make check   lint, format, types, import rules, sizes"
	@echo "make docs    build the documentation into site/; a dead link is an error"
	@echo "make venv    only install, into $(VENV)"

demo: venv
	@echo "Demo: plans without a GPU, then trains a small model here as planned, and resumes it."
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash launch/demo.sh

# Without compiled modules every process that a test starts would take a second of a core to compile
# them again. In a fresh clone all workers would compile them at once, 5 s each.
test: venv
	@echo "Tests: all of them; those that need a GPU skip themselves where there is none."
	@$(BIN)/python -m compileall -q -j 0 bigplan
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --ignore $(COMPILED) $(PYTEST_ARGS) || $(NONE)

test-compiled: venv
	@echo "Tests with operators that DeepSpeed compiles, for minutes the first time."
	@$(BIN)/python -m pytest $(COMPILED) $(PYTEST_ARGS) || $(NONE)

check: venv
	@echo "Check: lint"
	@$(BIN)/ruff check .
	@echo "Check: format"
	@$(BIN)/ruff format --check .
	@echo "Check: types"
	@$(BIN)/mypy
	@echo "Check: import rules"
	@PATH="$(CURDIR)/$(BIN):$$PATH" lint-imports
	@$(BIN)/python .ci/sizes.py

docs: venv
	@$(BIN)/python -m mkdocs build --strict

venv: $(VENV)/.installed

# Installs again only when the requirements change; a failed install leaves no stamp. pip would compile
# all modules on one core, a third to a half of its time; some packages hold files that no Python compiles.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Setup: installing bigplan and what it needs into $(VENV) (2 to 4 minutes; 1.5 GB, or 6 with torch for CUDA)"
	@test -x $(BIN)/pip || $(PYTHON) -c '$(SUPPORTED)'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e '.[all]' $(PINS)
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@
