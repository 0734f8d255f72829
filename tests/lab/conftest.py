"""The pipeline of tests/pipeline, for what measures it, and the distribution's entry points as they stand here."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Sequence

import pytest

from coppice.client.completion import Accumulator, Completion
from coppice.machine import extensions
from coppice.wire.generation import Chunk, Finished, Origin, Started, Timings
from tests.pipeline.conftest import client, reference, stack, target
from tests.pipeline.test_extend import ROOT, install

__all__ = ["client", "reference", "stack", "target"]


@pytest.fixture(scope="session", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What lab/pyproject.toml adds is found here, and in processes that tests start, whatever is installed."""
    folder = tmp_path_factory.mktemp("packages")
    project = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    install(folder, "coppice_lab", project["entry-points"])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}", prepend=os.pathsep)
        extensions.cache_clear()
        yield
    extensions.cache_clear()


def completion(lengths: Sequence[int], seconds: float, head: str = "", ids: Sequence[int] = ()) -> Completion:
    """An answer in steps that commit so many tokens, 10 ms each of which 1 is drafting, decoded in so many seconds."""
    new, steps = 1 + sum(lengths), len(lengths)
    answer = Accumulator()
    answer.add(Started(3, f"single:{head}" if head else "plain", (head,) if head else (), 8))
    answer.add(Chunk("", tuple(ids or range(new)), (Origin.ROOT,) * new, ("",) * new))
    timings = Timings(
        decode_ns=int(seconds * 1e9), draft_ns=10**6 * steps, step_ns=[10**7] * steps, split_ns=[10**6] * steps
    )
    answer.add(Finished("length", 3, new, list(lengths), [0] * steps, [4] * steps, 1, 0, timings))
    return answer.completion()
