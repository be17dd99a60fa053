# make pretrain   the main job on this machine's CPU: installs once, trains, resumes when run again
# make test       lint and all tests
PYTHON ?= python3
RUN ?= recipes/runs/stdlib.yaml
ARM ?= local_zero1_bf16
RANKS := 2
CORES := $(shell getconf _NPROCESSORS_ONLN)
BIN := .venv/bin

# Cores divided by ranks: more threads than cores would make both ranks wait for each other.
threads := $(shell echo $$(( $(CORES) / $(RANKS) > 0 ? $(CORES) / $(RANKS) : 1 )))

.PHONY: pretrain test lint bench clean

pretrain: .venv/run.installed
	OMP_NUM_THREADS=$(threads) $(BIN)/accelerate launch \
		--config_file accelerate_configs/$(ARM).yaml \
		recipes/pretrain.py $(RUN) $(if $(FRESH),--fresh) $(ARGS)

test: lint
	$(BIN)/python -m pytest $(TESTS)

lint: .venv/test.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: .venv/test.installed
	$(BIN)/python benchmarks/run_all.py

.venv/run.installed: setup.cfg constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

.venv/test.installed: setup.cfg constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	touch $@ .venv/run.installed

clean:
	rm -rf .venv outputs .pytest_cache .mypy_cache .ruff_cache *.egg-info
