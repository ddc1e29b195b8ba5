# `make demo` and `make run` need only Python 3.11 or newer; they first make .venv with the packages for
# running. The first target for developers, such as `make test`, adds the tools for developers.
#
#   TORCH=...       pip's requirement for torch: on a GPU machine the build for its CUDA version
#   TORCH_INDEX=... the index for torch on a machine without an NVIDIA GPU, by default PyTorch's index
#                   of CPU builds; empty for pip's own indexes
#   VENV_FLAGS=...  for python3 -m venv; `TORCH= VENV_FLAGS=--system-site-packages` uses PYTHON's
#                   torch, if it is 2.11 or newer
#   PYTHON=...      the interpreter for .venv
#   INPUTS=...      the number of inputs of `make fuzz`
#   ARGS=...        further arguments of `make run`, `demo`, `test`, `chaos`,
#                   `soak`, `sanitize` and `bench`
#   MINUTES=...     the duration of `make soak`

PYTHON ?= python3
TORCH ?= torch==2.13.0 triton==3.7.1
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VENV_FLAGS ?=
ARGS ?=
INPUTS ?= 100000
MINUTES ?= 30

BIN := .venv/bin
# Markers of installed packages: those for developers, or those for running. The first include the second.
INSTALLED := .venv/installed
CLIENTS := .venv-clients/bin
PARALLEL := tests/unit tests/property tests/kernels tests/gpu tests/integration/worker tests/integration/simulator \
	$(addprefix tests/e2e/,api cli command examples fields llm pooling structured)
RUNNABLE := $(if $(wildcard $(INSTALLED)),$(INSTALLED),.venv/runnable)
INSTALL = $(PYTHON) tools/install.py --torch '$(TORCH)' --torch-index '$(TORCH_INDEX)' --venv-flags '$(VENV_FLAGS)'

SANITIZER := compute-sanitizer --error-exitcode 1
# Racecheck does not support mbarriers: it reports the hand-overs between warps of these kernels as races.
MBARRIER_KERNELS := prefill_hopper_kernel fragment_gemm_kernel scaled_hopper_kernel \
	experts_hopper_kernel stream_kernel
NOT_RACECHECKED := $(MBARRIER_KERNELS:%=--kernel-name-exclude kernel_substring=%)

# Tests start hundreds of Python processes. Each would compile every module again.
test clients fuzz chaos soak: export PYTHONDONTWRITEBYTECODE =

.PHONY: help run demo test clients fuzz chaos soak sanitize check docs format protos bench structured clean

help:
	@echo "make run     everything on this machine: HTTP on 127.0.0.1:8000"
	@echo "make demo    start, ask one question, show the answer and its speed, end"
	@echo "make test    all tests that this machine can run"
	@echo "make clients  LangChain, instructor, LiteLLM, OpenAI Agents and LlamaIndex against real processes"
	@echo "make fuzz    100,000 wrong and nearly right inputs to every port; INPUTS=... for another number"
	@echo "make chaos   800 streams while workers, schedulers and connections die; prints the pauses"
	@echo "make soak    half an hour of load with a fault every 10 s; MINUTES=... for another time"
	@echo "make sanitize  the kernels under compute-sanitizer, memcheck and racecheck, on a GPU"
	@echo "make check   lint, format, types, import rules, generated code"
	@echo "make docs    the documentation as a site in site/, links checked"
	@echo "make format  format the code, mend what lint can mend"
	@echo "make protos  generate shared/pagewire/v1 from protos/"
	@echo "make bench   16 requests at once on this CPU, against transformers"
	@echo "make structured  10,000 outputs for random JSON schemas, checked by jsonschema"
	@echo "make clean   remove environments and caches"

define CHECK_PYTHON
@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Python 3.11 or newer is needed, %s is %d.%d; give another with PYTHON=" % (sys.executable, v[0], v[1]))'
endef

.venv/installed: pyproject.toml
	$(CHECK_PYTHON)
	@$(INSTALL) dev

.venv/runnable: pyproject.toml
	$(CHECK_PYTHON)
	@$(INSTALL) run

run: $(RUNNABLE)
	$(BIN)/pagewire run $(ARGS)

demo: $(RUNNABLE)
	$(BIN)/pagewire demo $(ARGS)

# The first part runs in parallel: tests within one process or one worker, and tests of whole stacks without
# measurements. The tests of a file stay together, because they share compiled kernels or a stack.
# Tests of faults, load and pauses run one after the other.
# Status 5: ARGS selects no test of a part. This is an error only if both parts have none.
test: $(INSTALLED)
	first=0; $(BIN)/pytest -n auto --dist loadfile $(PARALLEL) $(ARGS) || first=$$?; \
	test $$first = 0 || test $$first = 5 || exit $$first; \
	$(BIN)/pytest $(PARALLEL:%=--ignore=%) $(ARGS) || { second=$$?; test $$first = 0 && test $$second = 5; }

# The clients need other versions of some packages. Modules are compiled when they are imported.
.venv-clients/installed: tests/clients/requirements.txt
	$(PYTHON) -m venv .venv-clients
	$(CLIENTS)/python -m pip install --quiet --no-deps --no-compile -r $<
	touch $@

clients: $(INSTALLED) .venv-clients/installed
	$(CLIENTS)/pytest tests/clients --confcutdir tests/clients $(ARGS)

fuzz: $(INSTALLED)
	PAGEWIRE_FUZZ_INPUTS=$(INPUTS) $(BIN)/pytest tests/fuzz --timeout 3600 $(ARGS)

chaos: $(INSTALLED)
	$(BIN)/pytest -s tests/chaos --ignore tests/chaos/test_soak.py --requests 800 $(ARGS)

soak: $(INSTALLED)
	$(BIN)/pytest -s tests/chaos/test_soak.py --minutes $(MINUTES) $(ARGS)

sanitize: $(INSTALLED)
	for tool in memcheck "racecheck $(NOT_RACECHECKED)"; do PAGEWIRE_SMALL_KERNELS=1 \
		$(SANITIZER) --tool $$tool $(BIN)/python -m pytest tests/kernels \
		--ignore tests/kernels/test_kernel_bench.py --ignore tests/kernels/compile \
		$(ARGS) || exit 1; done

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/import_graph.py
	$(BIN)/python tools/generate_stubs.py --check

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict --site-dir site

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

protos: $(INSTALLED)
	$(BIN)/python tools/generate_stubs.py

bench: $(INSTALLED)
	$(BIN)/python benchmarks/compare_transformers.py --output benchmarks/results/cpu-embedded.jsonl $(ARGS)

structured: $(INSTALLED)
	$(BIN)/python benchmarks/structured_output.py validity $(ARGS)

clean:
	rm -rf .venv .venv-clients site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
