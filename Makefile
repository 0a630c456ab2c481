# The one entry. Every target sets up what it needs: on a machine with Python 3.11, gcc, g++ and make,
#   make demo     trains a small GPT on text that is already there
#   make test     runs the tests that CI runs
# `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
NATIVE := $(shell find native -type f -not -path '*/build*')
JOBS ?= 2

# Where the sanitized kernels are built, and how long their tests take: "short" or nothing.
NATIVE_BUILD ?= build/native
NATIVE_ARGS ?=

export PIP_NO_INPUT := 1
export HYPOTHESIS_STORAGE_DIRECTORY := .hypothesis

.PHONY: help setup setup-dev demo triton test soak test-full test-newer test-versions check format bench bench-full bench-grads bench-ckpt bench-stores gpu gpu-wheels quality native-test wheels test-wheel docs site browse clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# torch comes first and pinned: whatever asks for it later finds it there.
$(VENV)/torch.done: constraints.txt
	@command -v "$${CXX:-g++}" >/dev/null || command -v c++ >/dev/null || command -v clang++ >/dev/null || \
		{ echo 'Trackbed needs a C++20 compiler such as g++, found none on PATH: apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora, RHEL), conda install gxx (conda)' >&2; exit 1; }
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Trackbed needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	touch $@

$(VENV)/tools.done: $(VENV)/torch.done
	$(PIP) scikit-build-core nanobind cmake ninja
	touch $@

$(VENV)/installed.done: $(VENV)/tools.done pyproject.toml $(NATIVE)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --no-build-isolation --editable '.[plot]'
	touch $@

$(VENV)/dev.done: $(VENV)/installed.done
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --no-build-isolation --editable '.[dev]'
	touch $@

setup: $(VENV)/installed.done ## Make the virtual environment, build and install

setup-dev: $(VENV)/dev.done ## The same, with what tests and checks need

demo: ## Train a small GPT, kill it, resume it on other ranks, and compare: the whole way in five minutes
	@date +%s > .demo-started
	@$(MAKE) --no-print-directory setup
	@$(BIN)/python examples/demo.py --output demo-out --setup-seconds $$(( $$(date +%s) - $$(cat .demo-started) )); \
		status=$$?; rm -f .demo-started; exit $$status

triton: setup-dev ## Triton, whose interpreter runs the kernel of GPUs in tests: 1 GB
	$(PIP) triton

test: setup-dev ## The tests that CI runs
	$(BIN)/python -m pytest -m "not slow" --numprocesses $(JOBS) --durations=15 $(PYTEST_ARGS)

soak: setup-dev ## Training runs that are ended twenty times in all ways, and compared with one that is not: ten minutes
	$(BIN)/python -m pytest -m slow tests/runs $(PYTEST_ARGS)

test-full: setup-dev ## All counts of configurations and faults: up to 90 minutes
	TRACKBED_TIER=full $(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-newer: ## The tests of kernels and indices with a newer Python, if there is one: two minutes
	$(PYTHON) tests/versions/newer.py

# Needs no environment of its own: each of its environments is made and removed.
test-versions: ## The fast tests with Python 3.11 to 3.14, torch 2.9 and newest, megatron-core 0.16 and 0.19: two hours
	$(PYTHON) tests/versions/run.py $(VERSIONS_ARGS)

check: setup-dev ## Style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/clang-format --dry-run --Werror $$(find native -name '*.cpp' -o -name '*.hpp')

format: setup-dev ## Let the tools lay the code out
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find native -name '*.cpp' -o -name '*.hpp')

bench: $(VENV)/dev.done ## Measure against megatron-core, in the same run
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.starts
	$(BIN)/python -m benchmarks.batches
	$(BIN)/python -m benchmarks.recording
	$(BIN)/python -m benchmarks.masked
	$(BIN)/python -m benchmarks.writing
	$(BIN)/python -m benchmarks.text
	$(BIN)/python -m benchmarks.sentences
	$(BIN)/python -m benchmarks.shards

bench-grads: $(VENV)/dev.done ## Training steps, collectives and hooks of two ranks, against their peers: five minutes
	$(BIN)/python -m benchmarks.grads

bench-ckpt: $(VENV)/dev.done ## Saves, loads and exports of checkpoints, against their peers: half an hour, and 15 GB of disk
	$(BIN)/python -m benchmarks.checkpoints
	$(BIN)/python -m benchmarks.exports
	$(BIN)/python -m benchmarks.stalls
	$(BIN)/python -m benchmarks.saves_in_training

bench-stores: $(VENV)/dev.done ## Samples and checkpoints in an S3 server on loopback, against obstore and megatron-core: a quarter of an hour; needs root and Ceph
	$(BIN)/python tests/support/stores/ceph.py $(BIN)/python -W ignore -m benchmarks.stores
	$(BIN)/python tests/support/stores/ceph.py $(BIN)/python -W ignore -m benchmarks.stored_checkpoints
	$(BIN)/python tests/support/stores/ceph.py $(BIN)/python -W ignore -m benchmarks.mirrors

# Uses the Python that has torch for CUDA, and no virtual environment: `make gpu PYTHON=python3 GPU_ARGS="--only steps"`.
gpu: ## Everything that needs a GPU, on a machine with one: eight minutes
	$(PYTHON) tests/gpu/accept.py --out gpu-out $(GPU_ARGS)

GPU_PYTHON ?= 3.12
gpu-wheels: $(VENV)/tools.done ## Wheels into .whl for `make gpu` on a machine without a network: GPU_PYTHON=3.12
	rm -rf .whl
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --dest .whl --python-version $(GPU_PYTHON) \
		--implementation cp --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
		$$(grep -E '^(isal|nanobind|orjson|scikit-build-core)==' constraints.txt)

.venv-wheels/done: constraints.txt
	$(PYTHON) -m venv .venv-wheels
	.venv-wheels/bin/python -m pip install --quiet --upgrade pip
	.venv-wheels/bin/python -m pip install --quiet --constraint constraints.txt \
		abi3audit auditwheel capstone cmake nanobind ninja pyelftools scikit-build-core wheel ziglang
	touch $@

wheels: .venv-wheels/done ## Wheels and the sdist into dist, without a compiler of the system: fifteen minutes
	.venv-wheels/bin/python native/make_wheels.py $(WHEELS_ARGS)

# Needs no environment of its own: WHEEL_PYTHONS="3.12-newest" for another Python, or several.
WHEEL_PYTHONS ?= 3.11
test-wheel: ## The wheels in dist, each installed alone: kernels, token files, conformance, golden vectors, the README
	$(PYTHON) tests/versions/run.py --wheel dist --jobs $(JOBS) $(WHEEL_PYTHONS)

quality: setup-dev ## Statistics of the permutation, with limits: a minute
	$(BIN)/python -m quality

bench-full: $(VENV)/dev.done ## The headlines: 2e9 samples, 2e8 documents, 5e12 tokens; half an hour, and 55 GB of disk
	$(BIN)/python -m benchmarks.full

native-test: $(VENV)/tools.done ## The kernels under address, undefined and thread sanitizers
	@for sanitizers in address,undefined thread; do \
		$(BIN)/cmake -S native -B $(NATIVE_BUILD)/$$sanitizers -G Ninja -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" \
			-DTRACKBED_PYTHON=OFF -DTRACKBED_TESTS=ON -DSAN_FLAGS=$$sanitizers > /dev/null && \
		$(BIN)/cmake --build $(NATIVE_BUILD)/$$sanitizers && \
		echo "kernels under $$sanitizers:" && \
		$(NATIVE_BUILD)/$$sanitizers/test_kernels $(NATIVE_ARGS) && \
		$(NATIVE_BUILD)/$$sanitizers/test_files && \
		$(NATIVE_BUILD)/$$sanitizers/test_comm || exit 1; \
	done

docs: setup-dev site ## Run every snippet, check every link of the documentation, and build the site
	$(BIN)/python -m pytest tests/docs $(PYTEST_ARGS)

.venv-site/done: docs/site/requirements.txt
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet --disable-pip-version-check --requirement docs/site/requirements.txt
	touch $@

site: setup-dev .venv-site/done ## The site of the documentation into build/site; a warning or a dead link fails
	rm -rf build/reference
	$(BIN)/python docs/site/reference.py build/reference
	.venv-site/bin/python docs/site/build.py build/site --reference build/reference

browse: site ## Open every page of the site in Chromium at two widths; an error or a request fails
	.venv-site/bin/python docs/site/browse.py build/site --search resume NFS

clean: ## Remove what was built
	rm -rf $(VENV) .venv-wheels .venv-site build dist demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
