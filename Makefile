# From a fresh clone with python3 (3.11 or newer), venv and make: `make demo` runs the main job on a real model,
# `make test` lints and runs the suite. Both set up .venv first; a second call finds it done.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := install

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
MODEL := examples/smollm2-135m-instruct
LOGS := .pytest_cache/closing

# The suite is three processes, since one that interprets Triton kernels cannot compile them.
PARTS := main interpret compile
# One file, one worker: what a module's fixtures build is built once.
TESTS_main := tests --ignore=tests/kernels --numprocesses=2 --dist=loadfile
TESTS_interpret := tests/kernels/interpret
TESTS_compile := tests/kernels/compile
ENV_main :=
ENV_interpret := TRITON_INTERPRET=1
ENV_compile := TRITON_CACHE_DIR=$(CURDIR)/.triton_cache

.PHONY: install demo test lint format clean $(PARTS:%=test-%)

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python3 is older than 3.11: make PYTHON=/path/to/newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--no-build-isolation --editable '.[bench,test]'
	touch $@

$(MODEL)/config.json: | $(INSTALLED)
	$(BIN)/python -m bench prepare smollm2

demo: $(INSTALLED) $(MODEL)/config.json
	$(BIN)/python -m bench budget --model $(MODEL) -p 128 -n 32 --plot examples/throughput-against-budget.png
	$(BIN)/python -m bench budget --model $(MODEL) -p 128 -n 16 --device virtual:h200-pcie5 --graph \
		--plot examples/throughput-against-budget-simulated-h200-pcie5.png
	$(BIN)/python -m offload generate --model $(MODEL) --chat --max-new-tokens 48 \
		--offload-config '{"uva": {"cpu_offload_gb": 0.1}}' --prompt 'Why does the moon have phases?'

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Two processes at a time, each part's output in one piece, and at the end every part's closing line again.
test: lint $(MODEL)/config.json
	rm -rf $(LOGS) && mkdir -p $(LOGS)
	status=0; $(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target $(PARTS:%=test-%) || status=$$?; \
	for part in $(PARTS); do echo "$$part:"; tail -n 1 $(LOGS)/$$part; done; \
	exit $$status

$(PARTS:%=test-%): test-%: $(INSTALLED)
	mkdir -p $(LOGS)
	OMP_NUM_THREADS=1 $(ENV_$*) $(BIN)/python -m pytest $(TESTS_$*) 2>&1 | tee $(LOGS)/$*

format: $(INSTALLED)
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .pytest_cache .ruff_cache .triton_cache .hypothesis build
