# Everything runs from .venv, which the first target that needs it makes. See `make help`.

PYTHON ?= python3
ARGS ?=
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INTEGRATIONS := $(VENV)/.integrations
DOCS := $(VENV)/.docs
RELEASE := $(VENV)/.release
# Node and pyright both come out of wheels; this keeps pyright from asking the index for news.
PYRIGHT := PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

# The tests start hundreds of processes; without compiled modules each start takes twice as long.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-integrations quick check docs release-check clean

help:
	@echo 'make demo    set up $(VENV) and run the demo            (ARGS="..." for `pccl demo`)'
	@echo 'make test    set up $(VENV) and run all tests           (ARGS="..." for pytest; JOBS=0: one by one)'
	@echo 'make test-integrations   Ray, and trainers of other libraries, which it installs; the page in a'
	@echo '             headless Chromium (PCCL_TEST_BROWSER=...), if there is one'
	@echo 'make quick   the tests of a minute: unit, scenarios, packaging'
	@echo 'make check   ruff, formatting, mypy and pyright, both strict'
	@echo 'make docs    the site, in build/site: guides, and the reference from docstrings; warnings are errors'
	@echo 'make release-check   build what a release consists of, and install it with each Python found'
	@echo 'make clean   remove $(VENV), caches and what builds left behind'
	@echo
	@echo 'PYTHON=python3.12 chooses the interpreter (3.11 or newer) when $(VENV) is made.'
	@echo 'PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu takes the small torch on Linux.'

demo: $(STAMP)
	$(BIN)/pccl demo $(ARGS)

test: $(STAMP)
	$(BIN)/pytest -n $(JOBS) --dist worksteal $(ARGS)

test-integrations: $(INTEGRATIONS)
	$(BIN)/pytest -rs tests/browser tests/ray tests/trainers $(ARGS)

quick: $(STAMP)
	$(BIN)/pytest -n $(JOBS) --dist worksteal tests/unit tests/scenario tests/packaging $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYRIGHT)

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

release-check: $(RELEASE)
	$(BIN)/python -m tests.packaging.release_check

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage htmlcov
	find pccl transports bindings stress tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@command -v '$(PYTHON)' >/dev/null || { \
	  echo 'pccl needs Python 3.11 or newer and there is no "$(PYTHON)" here; name one: make PYTHON=python3.12' >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "pccl needs Python 3.11 or newer; $(PYTHON) is $$('$(PYTHON)' --version 2>&1 | head -n 1). Name another: make PYTHON=python3.12" >&2; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo '$(PYTHON) lacks venv or ensurepip; on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	'$(PYTHON)' -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(INTEGRATIONS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray,trainers]'
	@touch $@

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

$(RELEASE): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	@touch $@
