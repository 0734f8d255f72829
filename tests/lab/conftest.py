"""The pipeline of tests/pipeline, for what measures it."""

from tests.pipeline.conftest import client, reference, stack, target

__all__ = ["client", "reference", "stack", "target"]
