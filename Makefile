# The commands of newcomers, developers and CI. `make help` lists them.
#
# Every target does the set-up that it needs. A file in .stamps/, named after the hash of the inputs,
# marks a set-up as done, so that the next command skips it.
#
#   PYTHON=python3.12     interpreter for .venv (default: the first usable one found)
#   TORCH=torch==2.11.0   torch to install in place of the pinned one; any pip requirement or file
#   COVERAGE=1            print the coverage of the tests, server and lane processes included
#   ARGS="-k meter -x"    arguments for pytest; -n 0 runs it in one process
#   FRONT=native          front end of the servers that tests start (server.front)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

TORCH_PIN := $(shell sed -n 's/^torch==//p' constraints.txt)
BIN := .venv/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check -qq
# Only the hash is in a stamp's name, so that the content of a file never reaches a shell.
TOOLS_KEY := $(shell { cat constraints.txt locks/dev.txt locks/torch*.txt; echo '$(TORCH)'; } | sha256sum | cut -c1-16)
PACKAGE_KEY := $(shell { find csrc -type f | sort | xargs cat pyproject.toml; \
                        echo $(TOOLS_KEY); } | sha256sum | cut -c1-16)
TOOLS := .stamps/tools-$(TOOLS_KEY)
PACKAGE := .stamps/package-$(PACKAGE_KEY)
CPP_FILES = $(shell git ls-files 'csrc/*.hpp' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh')
# Four processes, also on two cores: tests wait for servers, timers and each other a third of the time.
# A file stays in one process, and so does a folder that tests/conftest.py names, as its tests share
# servers; files run in the order of their folders, so that long ones are not last.
PYTEST := $(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder
TESTS = $(PYTEST) --durations=15 $(if $(COVERAGE),--cov --cov-report=term:skip-covered)
SAY := @printf '\033[1m==> %s\033[0m\n'

# Tests start hundreds of processes, and each would compile all sources that it imports.
unexport PYTHONDONTWRITEBYTECODE
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)
# Time of all files in a wheel, so that a commit has one wheel.
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 315532800)

.PHONY: help setup demo test test-all test-ci test-benches cpp fuzz explore mutants chaos bench gpu-check check lint type arch generated format proto client stub \
        wheel cuda-wheel sbom lock clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

setup: $(PACKAGE) ## Make .venv, install pinned dependencies, build csrc/ (done by the others as needed)

demo: $(PACKAGE) ## Start a server on the demo models, load it, show the report
	@$(BIN)/gnnserve demo

test: $(PACKAGE) ## Python tests, but those that are slow or start whole servers or browsers
	$(SAY) "tests, neither slow nor live"
	@$(TESTS) -m "not slow and not live" $(ARGS)

test-all: $(PACKAGE) ## All Python tests; with COVERAGE=1 also their coverage
	$(SAY) "tests"
	@$(TESTS) $(ARGS)

test-ci: $(PACKAGE) ## The same; up to three tests that fail are run again, alone, and named
	$(SAY) "tests"
	@.ci/tests $(TESTS) $(ARGS)

test-benches: $(PACKAGE) ## A quick run of every bench
	$(SAY) "quick runs of the benches"
	@$(PY) -m bench --quick

cpp: $(PACKAGE) ## C++ tests: plain, under ASan and UBSan, under TSan
	@for preset in release asan tsan; do \
	    printf '\033[1m==> ctest, %s\033[0m\n' $$preset; \
	    (cd csrc; export PATH="$(abspath $(BIN)):$$PATH"; cmake --preset $$preset >/dev/null; \
	     cmake --build --preset $$preset -- --quiet; ctest --preset $$preset); done

fuzz: $(PACKAGE) ## Made-up bytes for all that takes bytes of others, calls of the system that fail, the front's threads under TSan; MINUTES=60
	@minutes=$(or $(MINUTES),60); FUZZ_S=$$((6 * minutes)) FUZZ_SEED=$$(date +%s) \
	    $(BIN)/pytest -q tests/fuzz; \
	 FAIL_CALLS=$$minutes $(BIN)/pytest -q tests/e2e/test_failing_calls.py; \
	 RESTARTS=100 $(BIN)/pytest -q tests/e2e/test_many_restarts.py; \
	 cd csrc; export PATH="$(abspath $(BIN)):$$PATH"; cmake --preset asan >/dev/null; \
	 cmake --build --preset asan --target front_fuzz parse_fuzz -- --quiet; \
	 cmake --preset tsan >/dev/null; cmake --build --preset tsan --target front_fuzz -- --quiet; \
	 ../build/cpp-tsan/tests/front_fuzz --threads 1000000; \
	 ../build/cpp-asan/tests/parse_fuzz $$((6 * minutes)) $$(date +%s) ../tests/fuzz/corpus/infer; \
	 ../build/cpp-asan/tests/front_fuzz $$((24 * minutes)) $$(date +%s)

explore: $(PACKAGE) ## Property tests with examples that differ from one run to the next
	@$(PY) -m pytest -q --hypothesis-profile=explore -m hypothesis $(ARGS)

mutants: $(PACKAGE) ## Do the tests of the core notice changes of it? Installs mutmut; COUNT=58 SEED=1
	@$(PIP) install -c .stamps/constraints.txt -e '.[mutants]' --no-build-isolation
	@$(PY) .ci/mutants.py --count $(or $(COUNT),58) --seed $(or $(SEED),1)

chaos: $(PACKAGE) ## A real server has a bad day, and a checker says what held; FULL=1: a million, in parts
	@$(PY) -m bench.chaos \
	    $(if $(FULL),--requests 200000 --restarts 4 --parts 5 --folder build/chaos,\
	                 --seconds 300 --restarts 3) $(ARGS)

bench: $(PACKAGE) ## Measure on this machine, then write the pages that quote the results, and draw
	@$(PY) -m bench && $(PY) -m bench.pages && $(PY) -m docs.drawings

gpu-check: ## Build, test and measure on a machine with CUDA, without network or .venv; ARGS="--only arena"
	@$(or $(PYTHON),python3) bench/gpu/check.py $(ARGS)

check: COVERAGE = 1
check: lint type arch generated cpp test-all test-benches ## Everything that CI checks on the sources

lint: $(PACKAGE) ## ruff, clang-format, file length
	$(SAY) "lint"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	@git ls-files '*.py' '*.cpp' '*.hpp' '*.cu' '*.cuh' ':!serve/pb' | xargs wc -l | \
	    awk '$$2 != "total" && $$1 > 600 {print $$2 ": " $$1 " lines; 600 is the limit"; bad = 1} \
	         END {exit bad}'

type: $(PACKAGE) ## mypy, strict
	$(SAY) "types"
	@$(BIN)/mypy

arch: $(PACKAGE) ## Import contracts, and counts of files, classes and circles with their limits
	$(SAY) "imports"
	@$(BIN)/lint-imports
	@$(PY) .ci/structure.py

generated: $(PACKAGE) ## serve/pb, serve/_core.pyi, serve/client/sync.py and locks/ are up to date
	$(SAY) "generated files"
	@$(PY) protos/generate.py --check
	@$(PY) .ci/sync_client.py --check
	@$(PY) .ci/lock.py --check
	@$(PY) -m nanobind.stubgen -q -m serve._core -o build/_core.pyi
	@diff -u serve/_core.pyi build/_core.pyi

format: $(PACKAGE) ## Let ruff and clang-format fix the sources
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(BIN)/clang-format -i $(CPP_FILES)

proto: $(PACKAGE) ## Write serve/pb from protos/
	@$(PY) protos/generate.py

client: $(PACKAGE) ## Write serve/client/sync.py from serve/client/aio.py
	@$(PY) .ci/sync_client.py

stub: $(PACKAGE) ## Write serve/_core.pyi from the built extension
	@$(PY) -m nanobind.stubgen -q -m serve._core -o serve/_core.pyi

wheel: $(PACKAGE) ## Build dist/gnnserve-*.whl
	$(SAY) "wheel"
	@rm -rf dist
	@$(PIP) wheel --no-deps --no-build-isolation -w dist .
	@ls dist/*.whl

# In a build folder of its own, so that a later wheel is without.
cuda-wheel: $(PACKAGE) ## Build the same with our kernels for GPUs; gets nvcc where the machine has none
	$(SAY) "wheel with libgnnserve_cuda"
	@rm -rf dist
	@nvcc=$$(.ci/nvcc); \
	 CMAKE_ARGS="-DGNNSERVE_CUDA=ON -DCMAKE_CUDA_COMPILER=$$nvcc $${CMAKE_ARGS:-}" \
	 $(PIP) wheel --no-deps --no-build-isolation -C build-dir=build/cuda-wheel -w dist .
	@ls dist/*.whl

sbom: wheel ## Write dist/gnnserve-*.cdx.json: all that a server of the wheel installs (CycloneDX)
	$(SAY) "bill of materials"
	@.ci/sbom

lock: .venv/pyvenv.cfg ## Write locks/ from pyproject.toml and constraints.txt, by uv
	@mkdir -p .stamps; [ -x .stamps/uv/bin/uv ] || $(PIP) install --target .stamps/uv uv
	@PATH="$(abspath .stamps/uv/bin):$$PATH" $(PY) .ci/lock.py

clean: ## Remove everything built, except .venv
	rm -rf build dist .stamps .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .coverage*

# --- set-up ---------------------------------------------------------------------------------------

define find_python
for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do
    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
    python=
done
fail() { printf 'error: %s\n' "$$@" >&2; exit 1; }
[ -n "$$python" ] || fail "gnnserve needs Python 3.11 or newer; say which with make PYTHON=/path/to/python"
"$$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$$python cannot make virtual environments: apt install python3-venv"
header=$$("$$python" -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")')
[ -f "$$header" ] || fail "$$header is missing: apt install python3-dev"
command -v c++ >/dev/null || fail "there is no C++ compiler: apt install g++"
endef
export find_python

.venv/pyvenv.cfg:
	$(SAY) "making .venv"
	@eval "$$find_python"; "$$python" -m venv .venv; $(PY) --version

# Prefer a CPU build of torch, if pip finds one through its own settings such as PIP_FIND_LINKS or
# PIP_EXTRA_INDEX_URL: the ordinary build brings gigabytes of CUDA libraries, which have no hashes
# here. A build of one's own is named by TORCH.
$(TOOLS): .venv/pyvenv.cfg
	$(SAY) "installing what locks/ has hashes of"
	@mkdir -p .stamps
	@$(PIP) install --no-deps --require-hashes -r locks/dev.txt
	@if [ -n '$(TORCH)' ]; then $(PIP) install '$(TORCH)'; \
	 else hashed='install --no-deps --require-hashes'; \
	   $(PIP) $$hashed -r locks/torch-cpu.txt 2>/dev/null || \
	   { $(PIP) $$hashed -r locks/torch.txt && $(PIP) install 'torch==$(TORCH_PIN)'; }; fi
	@{ grep -v '^torch==' constraints.txt; \
	   $(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))'; \
	 } > .stamps/constraints.txt
	@rm -f .stamps/tools-*; touch $@

$(PACKAGE): $(TOOLS)
	$(SAY) "building csrc and installing gnnserve"
	@$(PIP) install --no-build-isolation --no-deps -e .
	@$(PY) -m pip --disable-pip-version-check check >/dev/null || $(PY) -m pip check
	@rm -f .stamps/package-*; touch $@
