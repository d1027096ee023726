# SPDX-License-Identifier: Apache-2.0
# Two commands matter: `make serve` and `make test`. Both set up what they need.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
PYTEST_ARGS ?=
FUZZ_SECONDS ?= 60
SERVE_ARGS ?=
EVAL_DATA ?=
BENCH_ARGS ?=
TRACE ?=
SIMULATE_ARGS ?=
BIN := .venv/bin

.PHONY: help serve test bench bench-quick bench-ops fuzz sanitize gpu-check simulate lint format build demo install install-dev doctor clean distclean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | sort | expand -t 14

serve: install ## set up everything and serve the demo model (HOST, PORT, MODEL, SPECULATIVE_CONFIG)
	@HOST=$(HOST) PORT=$(PORT) MODEL='$(MODEL)' SPECULATIVE_CONFIG='$(SPECULATIVE_CONFIG)' \
		exec scripts/serve.sh $(SERVE_ARGS)

test: install-dev demo ## set up everything and run all tests (PYTEST_ARGS)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q $(PYTEST_ARGS)

bench: install ## the sweep through the server: plain decoding, eagle3, echo; hours (EVAL_DATA, BENCH_ARGS)
	@$(BIN)/python -m benchmarks.serving $(if $(EVAL_DATA),--data '$(EVAL_DATA)') $(BENCH_ARGS)

bench-quick: install ## a small table of the same in under ten minutes (EVAL_DATA, BENCH_ARGS)
	@$(BIN)/python -m benchmarks.serving --quick $(if $(EVAL_DATA),--data '$(EVAL_DATA)') $(BENCH_ARGS)

bench-ops: install ## the operators against their floors, minutes (BENCH_ARGS)
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.ops.bench_operators $(BENCH_ARGS)

fuzz: ## malformed trees under the sanitizers (FUZZ_SECONDS)
	@mkdir -p build
	$(CXX) -std=c++20 -O1 -g -Wall -Wextra -Werror -fsanitize=address,undefined \
		-fno-sanitize-recover=all csrc/fuzz/fuzz_trees.cpp -o build/fuzz_trees
	build/fuzz_trees $(FUZZ_SECONDS) $$(date +%s)

sanitize: install-dev ## the operator tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@scripts/sanitize.sh $(PYTEST_ARGS)

gpu-check: ## build for CUDA and check the operators on a GPU, minutes, without vLLM (PYTHON, BENCH_ARGS)
	@$(PYTHON) -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null || { \
		echo "gpu-check: PYTHON=$(PYTHON) must be a Python whose PyTorch (2.11 or newer) is built for CUDA and" \
			"sees a device; nvcc, pytest and hypothesis are needed, too" >&2; exit 1; }
	ECHO_BUILD_CUDA=1 $(PYTHON) setup.py -q build_ext --inplace
	$(PYTHON) -m benchmarks.ops.gpu_check $(BENCH_ARGS)

simulate: install ## replay draft traces under GPU cost curves (TRACE, SIMULATE_ARGS; docs/simulation.md)
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.simulate --trace $(TRACE) $(SIMULATE_ARGS)

lint: install-dev ## ruff, mypy and clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $$(find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

format: install-dev ## let ruff and clang-format write the layout
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

build: ## build the operators again
	@rm -f .venv/.vllm-echo/build
	@scripts/install.sh

demo: install ## prepare the demo model, its head and echo.json
	@$(BIN)/vllm-echo demo

doctor: install ## what is installed, patched, built, and who would serve
	@$(BIN)/vllm-echo doctor

install:
	@scripts/install.sh

install-dev:
	@scripts/install.sh --dev

clean: ## remove what was built and what tools left behind
	rm -rf build *.egg-info vllm_echo/_C*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -type d -exec rm -rf {} +

distclean: clean ## remove the virtual environment as well
	rm -rf .venv
