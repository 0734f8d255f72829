# syntax=docker/dockerfile:1
# The image of every component: `docker build --target cpu .`, `docker build --target cuda .`
# torch comes from the index that pip is pointed at: PyPI's Linux builds hold CUDA; for `cpu` give --build-arg
# TORCH_INDEX=URL of an index with CPU builds. EXTRAS=serve,ranks,ray adds Ray, for values with rayService; otel traces.
# /app is a checkout: the code is there once, and installed as editable.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG TORCH_INDEX=""
ARG EXTRAS=serve,ranks,gguf
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/venv/bin:$PATH
WORKDIR /app
RUN python -m venv /venv
# What is installed changes rarely, so that the code below does not install it anew.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY coppice/__init__.py coppice/
RUN if [ -n "$TORCH_INDEX" ]; then pip install --constraint constraints.txt --index-url "$TORCH_INDEX" torch; fi \
    && pip install --constraint constraints.txt --editable ".[$EXTRAS]" && pip uninstall --yes pip
COPY coppice coppice
COPY services services
COPY orchestrator orchestrator
RUN python -m compileall -q --invalidation-mode unchecked-hash coppice services orchestrator

FROM python:${PYTHON}-slim AS cpu
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp GOMP_SPINCOUNT=50000
WORKDIR /app
COPY --from=build /venv /venv
COPY --from=build /app /app
COPY models/demo models/demo
USER 10001:10001
EXPOSE 50051 8000 8081 9090
CMD ["python", "-m", "orchestrator"]

# Triton compiles a launcher in C for each of its kernels when it first runs, for which Python's own headers are here. Of
# the chart's file system only /tmp can be written.
FROM cpu AS cuda
USER root
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
USER 10001:10001
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TRITON_CACHE_DIR=/tmp/triton TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
