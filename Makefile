# Two commands for everybody: `make demo` and `make test` do all their set-up. `make help` lists the rest.
PYTHON ?= python3
# `make test TORCH=2.15.0`: another torch than the pinned one, in an environment of its own.
VENV := .venv$(if $(TORCH),-torch$(TORCH))
BIN := $(VENV)/bin
JOBS ?= $(shell nproc)
export MAX_JOBS ?= $(JOBS)
# One architecture, for quick builds: the GPU's, or Hopper where there is none. pip builds them all.
export TORCH_CUDA_ARCH_LIST ?= $(or $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u | paste -sd ';'),9.0)
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Where it is set, each of the hundreds of programs that the tests start would compile what it imports again.
export PYTHONDONTWRITEBYTECODE =

# The pins decide when the environment is made again.
PINS := constraints.txt $(wildcard requirements/*.txt)
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
OF_TORCH := ^(torch|torchvision|triton|nvidia-.*|cuda-.*)==
STAMP := $(VENV)/.installed-$(shell cat $(PINS) 2>/dev/null | sha256sum | cut -c1-12)
FORMATTED = $(shell find csrc tests examples -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')

GPU := $(shell command -v nvidia-smi)
# The system's CMake compiles GoogleTests while pip makes the environment.
CMAKE := $(or $(shell command -v cmake),$(BIN)/cmake)
FOR_CMAKE := $(if $(filter $(BIN)/cmake,$(CMAKE)),$(STAMP))

# A .venv of another Python is not replaced unasked. Targets that make do without it go on.
IN_VENV := $(filter-out help clean test-gpu fuzz-operators-gpu gpu-report-check wheels $(if $(GPU),bench),$(or $(MAKECMDGOALS),help))
ifneq ($(and $(filter command line,$(origin PYTHON)),$(wildcard $(BIN)/python),$(IN_VENV)),)
version = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
FOUND := $(call version,$(BIN)/python)
WANTED := $(call version,$(PYTHON))
ifeq ($(WANTED),)
$(error torch_fastdet: found no $(PYTHON), but PYTHON wants it; type: make $(MAKECMDGOALS) (with $(VENV) as it is))
else ifneq ($(FOUND),$(WANTED))
TYPE := rm -rf $(VENV) (and then the same again)
$(error torch_fastdet: found Python $(or $(FOUND),that fails) in $(VENV), but $(WANTED) is expected; type: $(TYPE))
endif
endif

.PHONY: help venv build demo test test-all test-nightly test-python test-orders test-alone test-cpp test-versions canary serve-test test-asan test-aarch64 test-aarch64-extension fuzz fuzz-operators fuzz-operators-gpu fuzz-files soak test-gpu gpu-report-check release-check lint format bench docs wheel wheels clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 22

# --no-compile: Python compiles what is imported, a small part; pip would compile everything, for half a minute.
$(STAMP): $(PINS)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' \
	  || { echo "torch_fastdet: found $$($(PYTHON) --version 2>&1), but Python 3.10 to 3.13 is expected; type: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "torch_fastdet: found no venv module for $(PYTHON); type: apt-get install python3-venv"; exit 1; }
	@command -v $(or $(CXX),g++) >/dev/null || { echo "torch_fastdet: found no C++ compiler; type: apt-get install g++"; exit 1; }
	rm -f $(VENV)/.installed-*
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),{ grep -vE '$(OF_TORCH)' constraints.txt; echo torch==$(TORCH); } > $(CONSTRAINTS))
	$(BIN)/pip install --upgrade -c $(CONSTRAINTS) pip setuptools wheel
	$(BIN)/pip install --no-compile -c $(CONSTRAINTS) -r requirements/dev.txt
	$(BIN)/pip install --no-compile --no-deps -c $(CONSTRAINTS) -r requirements/yolov5.txt
	$(BIN)/python -m examples.yolov5_env
	touch $@

venv: $(STAMP) ## virtual environment .venv with the pinned dependencies

# The editable install is made once; setup.py compiles what changed.
$(VENV)/.editable: $(STAMP) pyproject.toml setup.py torch_fastdet/_version.py
	$(BIN)/pip install --no-build-isolation --no-deps -e .
	touch $@

build: $(VENV)/.editable ## compile the operators in place
	@mkdir -p build
	@$(BIN)/python setup.py -q build_ext --inplace > build/build.log 2>&1 || { tail -n 40 build/build.log; exit 1; }
	@tail -n 1 build/build.log

demo: build ## train yolov5n on real digits with the stock train.py, stock and with torch_fastdet (EPOCHS=2: a quick look)
	$(BIN)/python -m examples.demo $(if $(EPOCHS),--epochs $(EPOCHS))

test: build test-cpp test-python ## the tests for every change, without a GPU; TORCH=2.15.0: on that torch, in .venv-torch2.15.0

test-all: SLOW = not nightly
test-all: PART = 1
test-all: test ## `make test` and the tests marked slow

test-nightly: SLOW = nightly
test-nightly: test-python ## the tests marked nightly

# TESTS="tests/ops -k nms" chooses; WORKERS=0 runs them in one process, for a debugger.
WORKERS ?= $(shell echo $$(($(JOBS) < 8 ? $(JOBS) : 8)))
SLOW = not slow
test-python: build ## the Python tests of `make test`
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "$(SLOW)" -n $(WORKERS) --dist loadgroup $(TESTS)

# A seed is an order: what failed in one fails again by the same SEEDS and TESTS. TESTS="tests/patching tests/yolov5"
SEEDS ?= 1 2 3 4 5 6 7 8 9 10
test-orders: build ## the Python tests of `make test` in random orders (SEEDS="1 2 3")
	@failed=; for seed in $(SEEDS); do echo "seed $$seed"; \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "$(SLOW)" -n $(WORKERS) --dist loadgroup -p randomly -p no:cacheprovider \
	    --randomly-seed $$seed $(TESTS) || failed="$$failed $$seed"; done; [ -z "$$failed" ] || { echo "failed with SEEDS=\"$$failed\""; exit 1; }

test-alone: build ## each file of the Python tests of `make test` in a process of its own
	@find $(or $(TESTS),tests) -name 'test_*.py' | sort | OMP_NUM_THREADS=1 xargs -P $(WORKERS) -I{} sh -c \
	  '$(BIN)/python -m pytest -q -m "$(SLOW)" -p no:cacheprovider {} > build/alone-$$$$.log 2>&1; status=$$?; \
	  [ $$status = 0 ] || [ $$status = 5 ] || { cat build/alone-$$$$.log; exit 1; }; rm build/alone-$$$$.log'  # 5: no test of it is chosen

# Of the random problems of a kernel `make test` tries a quarter, and `make test-all` all.
PART = 4
# CORE=OFF: the kernels alone, where `make test-asan` runs the tests of csrc/core.
CORE = ON
test-cpp: $(FOR_CMAKE) ## the GoogleTests of `make test`
	@$(call googletest,build/cpp,-DSANITIZE=OFF,$(filter ON,$(CORE)))

# Triton's environment: nvidia-pytriton wants numpy below 2, so it is apart, and sees the torch of .venv behind its own packages.
# It brings early releases of Python 3.8 to 3.13, which load their standard library from the Python that made this environment: the
# system's is as old. Another one: SERVE_PYTHON=...
SERVE := build/serve
SERVE_PYTHON ?= $(or $(wildcard /usr/bin/python$(call version_of,$(BIN)/python)),$(BIN)/python)
version_of = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
$(SERVE)/.installed: examples/triton/requirements.txt $(STAMP)
	rm -rf $(SERVE)
	$(SERVE_PYTHON) -m venv --without-pip $(SERVE)
	$(BIN)/python -m pip --python $(SERVE)/bin/python install -r examples/triton/requirements.txt
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > $$(echo $(SERVE)/lib/python3*/site-packages)/zz_project.pth
	touch $@

# SERVE_ARGS="--weights yolov5s.pt --image street.jpg --device cuda"
serve-test: build $(SERVE)/.installed ## Triton Inference Server: export a detector, serve it, ask it, load it, stop it (downloads nvidia-pytriton)
	$(SERVE)/bin/python -m examples.triton --python $(BIN)/python $(SERVE_ARGS)

test-versions: build ## the tests of the Ultralytics drop-ins on 8.4.184 and 8.4.190, and that 8.4.169 is refused (downloads them)
	$(BIN)/python -m tools.check_versions

canary: build ## the switches with the newest YOLOv5, Ultralytics, OpenCV and NumPy (downloads them); TORCH=...: on that torch
	$(BIN)/python -m tools.canary

test-asan: $(FOR_CMAKE) ## the GoogleTests of csrc/core under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(call googletest,build/cpp-asan,-DSANITIZE=ON -DKERNELS=OFF,ON)

COUNT ?= 1000000
fuzz: $(STAMP) ## damaged JPEG files through the decoder under AddressSanitizer (COUNT=1000000)
	@mkdir -p build/cpp-fuzz
	@{ $(BIN)/cmake -S tests/cpp -B build/cpp-fuzz -DSANITIZE=ON -DKERNELS=OFF && $(BIN)/cmake --build build/cpp-fuzz --target fuzz_jpeg; } \
	  > build/cpp-fuzz/build.log 2>&1 || { tail -n 40 build/cpp-fuzz/build.log; exit 1; }
	build/cpp-fuzz/fuzz_jpeg $(COUNT)

CASES ?= 100000
fuzz-operators: build ## every operator on arguments that nobody means (CASES=100000)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.operators --count $(CASES) --log build/fuzz-operators.log

# On a GPU machine without network, as test-gpu. Memory that torch keeps for later would hide what is written behind a tensor.
fuzz-operators-gpu: ## on a GPU machine: a sample of the same under compute-sanitizer, our kernels only (SAMPLE=500)
	@mkdir -p build
	PATH="$$PATH:/usr/local/cuda/bin" PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 86 \
	  --kernel-name kernel_substring=torch_fastdet \
	  $(PYTHON) -m tests.fuzz.operators --device cuda --count $(or $(SAMPLE),500) --log build/fuzz-operators-gpu.log

fuzz-files: build ## mutated files and requests through what reads them: stage tensors, resume files, detectors, Triton's requests (CASES=100000)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.files --count $(CASES) --log build/fuzz-files.log

SOAK ?= --minutes 11
soak: $(if $(GPU),,build) ## a long training: epoch time, memory, threads and files are flat; then 40 generations, 50 kills and resumes of each host, and 100 trainings (SOAK="--hours 4")
	$(BENCH_PYTHON) -m benchmarks.soak $(SOAK)
	$(BENCH_PYTHON) -m benchmarks.soak --evolve 40
	$(BENCH_PYTHON) -m benchmarks.soak --kills 50 --jobs $(if $(GPU),11,2)
	$(BENCH_PYTHON) -m benchmarks.soak --kills 50 --jobs $(if $(GPU),11,2) --host ultralytics
	TRAININGS=100 $(BENCH_PYTHON) -m pytest -q -s tests/ultralytics/test_many_trainings.py

# Static, so that QEMU needs no libraries of the other architecture.
test-aarch64: $(STAMP) ## the GoogleTests of csrc/core compiled for aarch64, run under QEMU (g++-aarch64-linux-gnu, qemu-user)
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null \
	  || { echo "torch_fastdet: found no aarch64 compiler or no QEMU; type: apt-get install g++-aarch64-linux-gnu qemu-user"; exit 1; }
	@mkdir -p build/cpp-aarch64
	@{ $(BIN)/cmake -S tests/cpp -B build/cpp-aarch64 -DKERNELS=OFF -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static \
	  && $(BIN)/cmake --build build/cpp-aarch64 -j $(JOBS); } > build/cpp-aarch64/build.log 2>&1 \
	  || { tail -n 40 build/cpp-aarch64/build.log; exit 1; }
	@qemu-aarch64 build/cpp-aarch64/core_tests --gtest_brief=1

test-aarch64-extension: $(STAMP) ## the CPU extension compiled for aarch64, operator tests under QEMU (downloads 3 GB, takes half an hour or more)
	$(BIN)/python -m tools.aarch64

# $(1) build folder, $(2) options of cmake, $(3) ON, or empty without the tests of csrc/core
define googletest
mkdir -p $(1) && { $(CMAKE) -S tests/cpp -B $(1) $(2) -DCORE=$(or $(3),OFF) && $(CMAKE) --build $(1) -j $(JOBS); } > $(1)/build.log 2>&1 \
  || { tail -n 40 $(1)/build.log; exit 1; }; $(if $(3),$(1)/core_tests --gtest_brief=1 &&) \
  { [ ! -x $(1)/kernel_tests ] || seq 0 $$(($(JOBS) - 1)) \
    | xargs -P $(JOBS) -I{} env GTEST_TOTAL_SHARDS=$(JOBS) GTEST_SHARD_INDEX={} EMULATOR_PART=$(PART) $(1)/kernel_tests --gtest_brief=1; }
endef

# On a GPU machine without network: the torch that is there, no virtual environment.
test-gpu: ## on a GPU machine (offline): the tests that a GPU can change, GoogleTests, compute-sanitizer; writes tests/gpu_report-<gpu>.json
	$(PYTHON) -m tools.gpu_report run

.SILENT: gpu-report-check
gpu-report-check: ## says whether the reports tests/gpu_report-*.json are of this tree
	@$(ANY_PYTHON) -m tools.gpu_report check

release-check: build ## what stands against a release: version, changelog, tests/api.txt, GPU reports, what is not committed
	@$(BIN)/python -m tools.release_check

lint: $(STAMP) ## ruff, mypy, clang-format, the layering rule of csrc/core, actionlint, and the schemas of .github
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)
	@! grep -rnE '#\s*include\s*[<"](torch|ATen|c10|pybind11|Python\.h|ops/)' csrc/core \
	  || { echo "csrc/core must include nothing of torch, ATen, c10, pybind11, Python or the glue"; exit 1; }
	$(BIN)/actionlint -shellcheck= -pyflakes=  # which some machines have and others not
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/check-jsonschema -q --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.citation-file-format CITATION.cff

format: $(STAMP) ## rewrites the sources as lint wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

# On a GPU machine without network: the torch that is there, unless there is a .venv. BENCH="--only nms" and the like reach the command.
ANY_PYTHON = $(or $(wildcard $(BIN)/python),$(PYTHON))
BENCH_PYTHON = $(if $(GPU),$(if $(filter command line,$(origin PYTHON)),$(PYTHON),$(ANY_PYTHON)),$(BIN)/python)
bench: $(if $(GPU),,build) ## every benchmark on this machine (GPU where there is one, offline), into benchmarks/results/; then the tables
	$(if $(GPU),$(BENCH_PYTHON) setup.py -q build_ext --inplace)
	$(BENCH_PYTHON) -m benchmarks $(BENCH)

$(VENV)/.docs-$(notdir $(STAMP)): $(STAMP)
	$(BIN)/pip install -c $(CONSTRAINTS) -r requirements/docs.txt
	touch $@

docs: $(VENV)/.docs-$(notdir $(STAMP)) ## the documentation as a site in site/, warnings are errors
	$(BIN)/mkdocs build --strict

# What a user on another machine installs: every architecture, unless TORCH_CUDA_ARCH_LIST says otherwise on the command line.
FOR_USERS = env $(if $(filter command line,$(origin TORCH_CUDA_ARCH_LIST)),,-u TORCH_CUDA_ARCH_LIST)
wheel: $(STAMP) ## the wheel in dist/, for every supported architecture, checked for what it holds and needs
	rm -rf build/lib.* build/bdist.*  # setuptools packs what an older build left there
	$(FOR_USERS) TORCH_FASTDET_LOCAL_VERSION=1 $(BIN)/pip wheel --no-build-isolation --no-deps -w dist .
	$(BIN)/python -m tools.check_wheel dist/torch_fastdet-*.whl

# PYTHONS="python3.11 python3.12" TORCHES="2.11.0 2.15.0" choose; the defaults are all that are supported.
wheels: ## one wheel for each supported Python and torch, built, checked and tried in environments of its own, and their index pages
	$(FOR_USERS) $(PYTHON) -m tools.wheels build $(if $(PYTHONS),--pythons $(PYTHONS)) $(if $(TORCHES),--torches $(TORCHES))

clean: ## removes build outputs, not .venv
	rm -rf build dist *.egg-info torch_fastdet/*.so torch_fastdet/_build_config.json torch_fastdet/include torch_fastdet/share
