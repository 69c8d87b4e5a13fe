# Every target sets up what it needs in .venv; a second call starts at once.
#
#   make run      train the digits example on 2 ps + 2 workers on this machine
#   make test     lint, type-check, test
#   make test-thorough   and more seeds, faults, cases of what is tried once; before a release
#   make test-fast   the tests of each package by itself, without clusters; three minutes
#   make chaos    ten minutes of faults on local clusters, with every update counted
#   make simulate   clusters on virtual time, one for each of SEEDS=0-2000, on all cores
#   make soak     200 sessions and 1,000,000 closures on the same daemons, which stay flat
#   make test-accelerator   the tests that compute on this machine's GPUs or TPUs, too
#   make test-engines   fleets on real ssh servers, Slurm, Ray and Dask; INSTALL=1 installs them
#   make test-optax   every transformation of optax under every strategy; takes minutes
#   make cluster  local daemons in the foreground with a live table; Ctrl-C stops them
#   make attack   hostile peers and 200,000 messages that are nearly right (15 minutes)
#   make bench    the benchmarks, as a table and as JSON under out/
#   make bench-check   the same, and what has become worse since benchmarks/reached.json
#   make scale    docs/scale.md, of what things cost on this machine (minutes)
#   make api      docs/api.md, of docs/names.toml, the code and the tests
#   make durations   tests/durations.txt, of how long each file of tests takes
#   make metrics   the table of docs/observing.md, of the numbers that tasks report
#   make messages  tests/messages.txt, of every sentence that the code may say
#   make size     how many files, classes, functions and lines there are
#   make optimizers   docs/optimizers_table.md, of what every transformation does
#   make docs     the documentation as a site, out/site/index.html; needs no network to be read
#   make lint | units | clean

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help run test test-thorough chaos soak attack simulate test-accelerator test-engines test-optax optimizers messages metrics durations size lint pytest test-fast cluster bench bench-check scale api docs units clean
.DELETE_ON_ERROR:

# Where this is set, each of the hundreds of processes that the tests start would compile
# all of zstrat again, a third of its start, and each process of pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
PY := $(VENV)/bin/python
# Python compiles what is imported; to have all files of all packages compiled now would
# be half of the time that an installation takes.
PIP := $(PY) -m pip --disable-pip-version-check -qq install --no-compile -c constraints.txt
ARGS ?=

help:
	@sed -n 's/^#   //p' Makefile

run: $(VENV)/.run
	@$(PY) examples/digits.py $(ARGS)

cluster: $(VENV)/.run
	@$(VENV)/bin/zstrat cluster --ps 2 --workers 2 $(ARGS)

# Beside the tests: mypy uses one core for half a minute.
test: $(VENV)/.dev
	@$(MAKE) --no-print-directory lint & lint=$$!; code=0; \
	$(MAKE) --no-print-directory pytest || code=$$?; wait $$lint && exit $$code

lint: $(VENV)/.dev
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --check --quiet . || \
	  { echo 'not formatted: run $(VENV)/bin/ruff format .'; exit 1; }
	@$(VENV)/bin/mypy --no-error-summary
	@$(PY) docs/make_api.py --check
	@$(PY) tests/test_words.py --check

pytest: $(VENV)/.dev
	@$(PY) -m pytest -q -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

# All tests but those with targets of their own.
test-thorough: $(VENV)/.dev
	@$(MAKE) --no-print-directory pytest ARGS="-m 'not (optax or engines)' $(ARGS)"

# The slowest files begin first.
durations: $(VENV)/.dev
	@$(MAKE) --no-print-directory pytest ARGS="--record-durations $(ARGS)"

# Without daemons, systems, and files of eight seconds or more (tests/durations.txt).
test-fast: $(VENV)/.dev
	@$(PY) -m pytest -q -n auto --dist loadfile --no-loadscope-reorder \
	  -m 'not (optax or engines or thorough or processes or slow)' $(ARGS)

attack: $(VENV)/.dev
	@ZSTRAT_ATTACK=hard $(PY) -m pytest -q -s -o faulthandler_timeout=0 tests/attack $(ARGS)

bench: $(VENV)/.run
	@$(PY) -m benchmarks $(ARGS)

bench-check: $(VENV)/.run
	@$(PY) -m benchmarks --check $(ARGS)

scale: $(VENV)/.dev
	@JAX_PLATFORMS=cpu $(PY) -m benchmarks.scale docs $(ARGS)

# Its short form is one of the tests. A seed repeats the choice of faults, not their timing.
chaos: $(VENV)/.dev
	@JAX_PLATFORMS=cpu PYTHONPATH=tests $(PY) tests/chaos/chaos_run.py $(ARGS)

# Thirty seeds are among the tests, a hundred in test-thorough.
# ARGS="--mutation NAME" breaks zstrat on purpose.
SEEDS ?= 0-2000
simulate: $(VENV)/.dev
	@JAX_PLATFORMS=cpu PYTHONPATH=tests/testing $(PY) -m simulation $(SEEDS) $(ARGS)

# Minutes less: ARGS="--sessions 20 --closures 20000".
soak: $(VENV)/.dev
	@JAX_PLATFORMS=cpu PYTHONPATH=tests $(PY) tests/chaos/soak_run.py $(ARGS)

# Skips what needs a GPU or a TPU where jax sees none (it is pip that brings its plugin).
test-accelerator: $(VENV)/.dev
	@$(PY) -m pytest -q tests/accelerator $(ARGS)

# On Debian and Ubuntu; their packages may start services, which the tests do not use.
ENGINES := openssh-server slurmctld slurmd slurm-client munge
test-engines: $(VENV)/.dev
	@missing=; for program in sshd slurmctld slurmd sbatch munged; do \
	  PATH=$$PATH:/usr/sbin command -v $$program >/dev/null || missing="$$missing $$program"; done; \
	if [ -z "$$missing" ]; then :; \
	elif [ -n "$${INSTALL:-}" ]; then \
	  apt-get update -qq; apt-get install -y --no-install-recommends $(ENGINES); \
	else echo "not installed:$$missing; INSTALL=1 has apt-get install $(ENGINES)"; fi
	@if $(PY) -c 'import distributed, kubernetes_validate, ray.train' 2>/dev/null; then :; \
	elif [ -n "$${INSTALL:-}" ]; then \
	  $(PIP) --no-build-isolation -e '.[ray,dask]' kubernetes-validate; \
	else echo "not installed: Ray, Dask or kubernetes-validate; INSTALL=1 has pip install them"; fi
	@$(PY) -m pytest -q -m engines -o faulthandler_timeout=0 tests/engines $(ARGS)

# Against plain optax, step by step: equal, or refused by parameter servers with words.
test-optax: $(VENV)/.dev
	@$(PY) -m pytest -q -n auto --dist load -m 'optax or not optax' tests/optax $(ARGS)
	@$(PY) tests/optax/optax_list.py --check

# Which transformation runs how; nothing is written while a result is wrong.
optimizers: $(VENV)/.dev
	@$(PY) tests/optax/optax_list.py

# The table of tf.distribute's names; `make lint` fails where it lacks one.
api: $(VENV)/.dev
	@$(PY) docs/make_api.py

# Read the diff of this file after a change of words: it is what users read.
messages: $(VENV)/.dev
	@$(PY) tests/test_messages.py

metrics: $(VENV)/.dev
	@$(PY) tests/telemetry/test_telemetry_metrics.py

# A reader has to hold all of this in mind: look at it before and after a change.
size: $(VENV)/.dev
	@$(PY) tests/size.py

# Warnings are errors. (The variable silences a notice that Material prints at each build:
# it is mended until May 2027, and Zensical is its successor.)
docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet $(ARGS)
	@echo "out/site/index.html"

# Writes the systemd units as an installation from this checkout would need them.
units: $(VENV)/.run
	@$(VENV)/bin/zstrat units --bindir $(abspath $(VENV)/bin) --to out/systemd

clean:
	@rm -rf $(VENV) build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The interpreter: $PYTHON if given, else the first of these that is new enough.
$(PY):
	@found=; for python in $${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then found=$$python; break; fi; done; \
	if [ -z "$$found" ]; then \
	  echo "zstrat needs Python 3.11 or newer; found $$($${PYTHON:-python3} --version 2>&1 || true)."; \
	  echo "Install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; \
	  exit 1; fi; \
	echo "setting up $(VENV) with $$($$found --version) (once)"; \
	"$$found" -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "python -m venv failed; on Debian and Ubuntu: apt install python3-venv"; exit 1; }

$(VENV)/.run: pyproject.toml constraints.txt | $(PY)
	@echo "installing zstrat and what it needs (about a minute, once)"
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation -e '.[examples]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@$(PIP) --no-build-isolation -e '.[dev,examples,gce,orbax,tensorboard]'
	@touch $@

$(VENV)/.docs: $(VENV)/.run
	@$(PIP) --no-build-isolation -e '.[docs]'
	@touch $@
