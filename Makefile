# make pretrain   the main job on this machine's CPU: installs once, trains, resumes when run again
# make rehearsal  (as root) the hostfile's machines as network namespaces, 8 ranks, ZeRO-1 in fp16
# make test       lint and all tests
# make soak       the tests that kill runs, 10 times as long (SOAK=100: a night)
PYTHON ?= python3
RUN ?= recipes/runs/stdlib.yaml
ARM ?= local_zero1_bf16
RANKS := 2
SOAK ?= 10
CORES := $(shell getconf _NPROCESSORS_ONLN)
BIN := .venv/bin

# Cores divided by ranks: more threads than cores would make both ranks wait for each other.
threads := $(shell echo $$(( $(CORES) / $(RANKS) > 0 ? $(CORES) / $(RANKS) : 1 )))

# The launcher loads DeepSpeed too, which else warns that it found no GPU.
quiet := $(if $(findstring local_,$(ARM)),DS_ACCELERATOR=cpu)

.PHONY: pretrain rehearsal test soak lint bench clean

pretrain: .venv/run.installed
	@$(quiet) OMP_NUM_THREADS=$(threads) $(BIN)/accelerate launch \
		--config_file accelerate_configs/$(ARM).yaml \
		recipes/pretrain.py $(RUN) $(if $(FRESH),--fresh) $(ARGS)
	@echo "next         make pretrain ARGS='name=hotter optim.lr=2e-3'       another setting"
	@echo "             make pretrain ARGS='name=ddp' ARM=local_ddp_bf16     another strategy"
	@echo "             make pretrain FRESH=1                                the same, anew"

rehearsal: .venv/run.installed
	@$(BIN)/octet rehearse --hostfile hostfile -- $(CURDIR)/$(BIN)/octet launch \
		--hostfile hostfile --config accelerate_configs/local_zero1_fp16.yaml \
		recipes/runs/rehearsal.yaml $(if $(FRESH),--fresh) $(ARGS)

test: lint
	$(BIN)/python -m pytest $(TESTS)

soak: .venv/test.installed
	OCTET_SOAK=$(SOAK) $(BIN)/python -m pytest \
		tests/test_kill_harness.py tests/test_power_loss.py tests/test_engine_kills.py

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
