# Each target sets up what it needs; a second run is quick. `make check` and `make test` are what CI runs.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SUPPORTED := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$python -c '$(SUPPORTED)' 2>/dev/null && echo $$python && break; done)

.DEFAULT_GOAL := help
.PHONY: help venv reproduce publish test check browser-test bench bench-ssd bench-gpu docker clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

venv: $(INSTALLED)  ## install the project and its pinned dependencies into .venv

$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/pip || "$(PYTHON)" -c '$(SUPPORTED)' 2>/dev/null || { \
		echo "error: Python 3.11 or newer is needed; name one: make venv PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/pip || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev,ray]'
	@touch $@

PROFILE ?= main
CONFIG = $(if $(filter paper,$(PROFILE)),paper-cpu,reproduce)

reproduce: $(INSTALLED)  ## fetch the default pair, run AR, SD and SSD, write the report; PROFILE=paper: the paper's figures
	@test "$(PROFILE)" = main || test "$(PROFILE)" = paper || { \
		echo "error: PROFILE=$(PROFILE): must be main or paper" >&2; exit 2; }
	$(BIN)/harness pairs pull qwen2.5-coder
	@run="$(CURDIR)/runs/$(CONFIG)-$$(date -u +%Y%m%dT%H%M%SZ)" && \
	$(BIN)/harness run --config configs/$(CONFIG).yaml --out "$$run"; status=$$?; \
	test ! -e "$$run/manifest.json" || $(BIN)/harness report "$$run" || exit 1; \
	test "$(PROFILE)" = main || $(BIN)/harness paper "$$run" || exit 1; exit $$status

publish: $(INSTALLED)  ## build the dashboard in site/ from every run below runs/
	$(BIN)/harness dashboard runs --out site

BY_DEFAULT := not slow and not gpu and not network

test: $(INSTALLED)  ## run the tests in two processes, with coverage; those that time something first, alone
	$(BIN)/harness pairs pull smollm2-135m
	$(BIN)/pytest -m 'alone and $(BY_DEFAULT)'
	$(BIN)/pytest -m 'not alone and $(BY_DEFAULT)' -n 2 --dist loadfile --no-loadscope-reorder \
		--cov --cov-report=term:skip-covered

check: $(INSTALLED)  ## lint, formatting, container recipes and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/hadolint docker/*.Dockerfile
	$(BIN)/mypy

browser-test: $(INSTALLED)  ## open every kind of page in Chromium (needs chromium, node and npm)
	npm ci --prefix tests/browser --no-audit --no-fund
	$(BIN)/pytest tests/browser

bench: $(INSTALLED)  ## time the engine beside the memory-bandwidth floor
	$(BIN)/harness pairs pull smollm2-135m
	$(BIN)/pytest tests/bench -m 'not gpu and not slow' --benchmark-only

bench-ssd: $(INSTALLED)  ## SSD beside SD and AR, an hour; HARNESS_DATA_DIR=FOLDER for all datasets
	$(BIN)/harness pairs pull qwen2.5-coder
	$(BIN)/pytest tests/bench/test_ssd_speed.py -m 'not gpu' --benchmark-only -s

bench-gpu:  ## time the engine on one GPU, 8 minutes; runs under any Python that has torch and transformers
	PYTHONPATH=. $(firstword $(wildcard $(BIN)/python) $(PYTHON)) scripts/bench_gpu

DEVICE ?= cpu

docker:  ## build the container image saguaro-harness:cpu; DEVICE=cuda for NVIDIA GPUs
	@test -f docker/$(DEVICE).Dockerfile || { echo "error: DEVICE=$(DEVICE): must be cpu or cuda" >&2; exit 2; }
	docker build -f docker/$(DEVICE).Dockerfile -t saguaro-harness:$(DEVICE) .

clean:  ## remove .venv, caches and build products; runs/ stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks .coverage build dist site *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
