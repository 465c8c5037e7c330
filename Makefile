# `make` alone lists what there is. Every target that needs the virtual environment sets it up first (tools/setup.sh, quick when done).

PYTHON ?= python3
RUN := OMP_NUM_THREADS=1 .venv/bin/python -m
ARGS ?=

.PHONY: help setup demo test check bench soak clean

help:
	@echo "make setup   make .venv and install everything (PYTHON, TORCH_SPEC, TORCH_INDEX choose others)"
	@echo "make demo    train a small K3 on this machine; runs/demo keeps the model, and another make demo goes on from there"
	@echo "make test    the tests, with lint and type checks (ARGS='-k name' runs some)"
	@echo "make check   lint, formatting and types only"
	@echo "make bench   every benchmark (one: .venv/bin/perilune bench NAME)"
	@echo "make soak    the tests that are too long for make test"
	@echo "make clean   remove what was built; keeps .venv and runs/"

setup:
	@PYTHON="$(PYTHON)" tools/setup.sh

demo: setup
	.venv/bin/perilune train k3-tiny-stdlib --out runs/demo $(if $(wildcard runs/demo/recipe.json),--resume)

test: setup
	$(RUN) pytest $(ARGS)

check: setup
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

bench: setup
	$(RUN) perilune bench all $(ARGS)

soak: setup
	$(RUN) pytest -m soak $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .venv/.perilune-setup
	find perilune/native -maxdepth 1 -name '*.so' -delete
	find perilune tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
