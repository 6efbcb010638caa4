# Everything a person or CI runs. Each target sets up what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
CLASSES := $(VENV)/spark/classes.jsa
# Where HOME cannot be written, downloads are kept in the environment.
ifneq ($(shell test -w "$$HOME" || echo no),)
export UV_CACHE_DIR := $(abspath $(VENV))/cache
export PIP_NO_CACHE_DIR := 1
endif
# Container images set it. Without compiled modules every process of the tests compiles them again: twice the time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test kills soak check format docs bench bench-peers lock sbom dist java chromium screenshots clean

run: $(READY) java
	$(BIN)/penstock quickstart

# Three rings. What runs in which is said by markers, see docs/testing.md.
# More processes than cores: many tests wait for a server most of the time.
PYTEST := $(BIN)/pytest -n 4

test: $(READY) java chromium $(CLASSES)
	$(PYTEST) -m "not soak and (short or not kills)"

kills: $(READY) java chromium $(CLASSES)
	$(PYTEST) -m "kills and not soak"

soak: $(READY) java chromium $(CLASSES)
	$(BIN)/pytest -m soak

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The reference pages that are written from tables in the code.
docs: $(READY)
	$(BIN)/python -m penstock.topology.reference docs

# Pictures of every page of `penstock ui`, for docs/ui.md.
screenshots: $(READY) java chromium
	$(BIN)/python scripts/screenshots

bench: $(READY) java
	$(BIN)/penstock bench

# Beside Kafka with Spark's own connector, both from Maven Central, and beside FastStream: no part of the product.
bench-peers: $(READY) java
	$(BIN)/python tests/bench/kafka_peer.py
	$(BIN)/python tests/bench/faststream_peer.py
	$(BIN)/penstock bench kafka app

$(READY): requirements.lock pyproject.toml scripts/locks/tools.lock scripts/locks/build.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Penstock needs Python 3.11 or newer; name one with: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --require-hashes -r scripts/locks/tools.lock
	$(BIN)/uv pip sync -q --require-hashes --compile-bytecode --python $(BIN)/python requirements.lock
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps \
	  --build-constraints scripts/locks/build.lock -e .
	@touch $(READY)

# Spark as the tests start it: its classes in an archive, with which a JVM starts in 0.6 of the time.
$(CLASSES): $(READY) | java
	$(BIN)/python -m tests.support.spark_homes $(VENV)/spark

# What it is installed with, as a CycloneDX document.
sbom:
	$(PYTHON) scripts/sbom

# What can be published: the wheel and the source, as dist/penstock_nats-….
dist: $(READY)
	$(BIN)/uv build -q --build-constraints scripts/locks/build.lock --out-dir dist

java:
	@scripts/ensure-java

chromium:
	@scripts/ensure-chromium

# Resolve pyproject.toml anew and pin the result.
lock: $(VENV)/bin/uv
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --all-extras --generate-hashes --no-emit-index-url \
	  --no-header -o requirements.lock pyproject.toml

$(VENV)/bin/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --require-hashes -r scripts/locks/tools.lock

clean:
	rm -rf $(VENV) .penstock
