# Every target makes what it needs: .venv is made and kept up to date by `install`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := embedded,loadtest,mooncake,dev

.PHONY: help install demo test test-long chaos-test harness-test lint types format compose-test clean

help:
	@echo "make demo          start a cluster of simulated workers, replay an agent trace, print the report"
	@echo "make test          the tests"
	@echo "make test-long     200 crash trials more, HTTP on plain asyncio: about 25 minutes"
	@echo "make chaos-test    ten minutes of agents' work while processes are killed and frozen"
	@echo "make harness-test  mini-swe-agent and aiperf against the router; installs them outside of .venv (about 10 minutes)"
	@echo "make install       .venv with all that tests and benches need"
	@echo "make lint types    ruff and mypy"
	@echo "make compose-test  build the containers and run them (needs Docker, or root on Debian to install it)"

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	touch $(STAMP)

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/evolving demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not long and not compose and not harness and not chaos" $(PYTEST_ARGS)

test-long: $(STAMP)
	$(BIN)/python -m pytest -m "long and not harness" $(PYTEST_ARGS)

chaos-test: $(STAMP)
	$(BIN)/python -m pytest -m chaos -s $(PYTEST_ARGS)

harness-test: $(STAMP)
	$(BIN)/python -m pytest -m harness $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(STAMP)
	$(BIN)/mypy

compose-test: $(STAMP)
	docker/compose-test.sh

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
