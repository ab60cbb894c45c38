# make demo   installs into .venv and shows what the built-in GPT keeps under several policies
# make test   installs the test extras too and runs the tests
# Both need Python >= 3.11 with pip or venv; PYTHON=... and VENV=... say which and where. WITH="tpu cuda" installs the
# compilers for TPUs and GPUs too, so that the tests that need one are not skipped.

PYTHON ?= python3
VENV ?= .venv
WITH ?=
# On more cores than this the tests gain little and take a process with JAX for each.
PYTEST_ARGS ?= -n auto --maxprocesses 8 -rs

bin := $(VENV)/bin
pip := $(bin)/python -m pip --disable-pip-version-check
sources := $(shell find remat_kit -type f -not -name '*.pyc' 2>/dev/null)

.PHONY: help demo test test-browser lint docs bench wheel-check clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile
	@echo "others: test-browser lint docs bench wheel-check clean"

demo: $(VENV)/.installed
	$(bin)/remat-kit demo

test: $(VENV)/.test $(addprefix $(VENV)/.,$(WITH))
	$(bin)/python -m pytest $(PYTEST_ARGS)

# Chromium comes from Debian, or CHROMIUM=... says where it is.
test-browser: $(VENV)/.browser
	.ci/chromium
	$(bin)/python -m pytest -m browser tests/browser -rs -s

lint: $(VENV)/.dev
	$(bin)/ruff check .
	$(bin)/pyright --pythonpath $(bin)/python

# The notebooks of the documentation are executed.
docs: $(VENV)/.docs
	JAX_PLATFORMS=cpu $(bin)/python -m mkdocs build --strict

# Plans against presets, hours with all programs: BENCH_ARGS="--programs gpt --targets cpu" for a part of it.
BENCH_ARGS ?=
bench: $(VENV)/.test $(addprefix $(VENV)/.,$(WITH))
	$(bin)/python benchmarks/plan_speed.py
	$(bin)/python benchmarks/plan_speed.py --step
	$(bin)/python benchmarks/plans.py $(BENCH_ARGS)

wheel-check: $(VENV)/.made
	.ci/wheel-check $(bin)/python

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

$(VENV)/.made: .ci/venv
	.ci/venv "$(PYTHON)" "$(VENV)"
	@touch $@

# What was installed for tests is editable and sees a changed source by itself.
$(VENV)/.installed: pyproject.toml $(sources) | $(VENV)/.made
	@if [ -e $(VENV)/.test ]; then echo "installed from this checkout already"; else $(pip) install --quiet .; fi
	@touch $@

$(addprefix $(VENV)/.,test browser dev docs tpu cuda): $(VENV)/.%: pyproject.toml | $(VENV)/.made
	$(pip) install --quiet --editable '.[$*]'
	@touch $@
