"""The reference in a process of its own: it says the same, and it ends with whoever asks, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coppice.speculation.sampling import SamplingParams
from coppice.testing.reference import Reference
from lab.reference_process import ReferenceProcess
from tests.tiny import make_target

PROMPT, NEW = tuple(range(20)) * 2, 24
SAMPLED = SamplingParams(temperature=0.8, top_k=40, seed=5)
ENDS_S = 20.0
ASKING = """
import sys
from pathlib import Path
from lab.reference_process import ReferenceProcess
from coppice.stack.process import ProcessFailed
with ReferenceProcess(Path(sys.argv[1]), "float32", threads=1) as reference:
    while True:
        try:
            reference.greedy((5, 6, 7), 200)
            print("answered", flush=True)
        except ProcessFailed as error:
            print(error, flush=True)
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random target."""
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def beside(target: Path) -> Iterator[ReferenceProcess]:
    """The process of it."""
    with ReferenceProcess(target, "float32", threads=1) as reference:
        yield reference


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_it_says_what_the_reference_says(target: Path, beside: ReferenceProcess, sampling: SamplingParams) -> None:
    here = Reference(target, "float32", threads=1)
    own = here.generate(PROMPT, NEW, sampling)
    look_up = {"prompt_lookup_num_tokens": 4}
    assisted = {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.0}
    for told in ((), (None, look_up), (target, assisted)):
        answers = [each.generate(PROMPT, NEW, sampling, *told) for each in (here, beside)]
        assert answers[0].ids == answers[1].ids
        assert answers[0].accept_lengths == answers[1].accept_lengths
        assert answers[1].decode_s > 0
    assert answers[1].steps < own.steps  # the target itself assisted
    assert beside.greedy(PROMPT, NEW).ids == here.greedy(PROMPT, NEW).ids
    for ids in (own.ids, (*own.ids[:-1], (own.ids[-1] + 1) % 300)):
        assert beside.judge(PROMPT, ids, sampling, own.ids) == here.judge(PROMPT, ids, sampling, own.ids)
    assert beside.redraw(PROMPT, own.ids, sampling) == here.redraw(PROMPT, own.ids, sampling)
    assert beside.text.encode("abc") == here.text.encode("abc")


@pytest.fixture
def asking(target: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that asks again and again, with what it starts in a session of its own."""
    command = [sys.executable, "-c", ASKING, str(target)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, start_new_session=True, **output) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def until(asking: subprocess.Popen[str], line: str) -> psutil.Process:
    """Wait for a line; returns the process that answers."""
    assert asking.stdout
    assert line in iter(asking.stdout.readline, "")
    (child,) = psutil.Process(asking.pid).children()
    assert child.cmdline()[1:4] == ["-m", "coppice.stack.child", "lab.reference_process"]  # as services are
    return child


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_it_ends_with_whoever_asks(asking: subprocess.Popen[str], number: signal.Signals) -> None:
    child = until(asking, "answered\n")
    os.killpg(asking.pid, number)  # as Ctrl-C does
    _, errors = asking.communicate(timeout=ENDS_S)
    assert asking.returncode == -number
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    child.wait(ENDS_S)


def test_the_next_call_starts_another_where_it_was_killed(asking: subprocess.Popen[str]) -> None:
    first = until(asking, "answered\n")
    first.kill()
    assert asking.stdout
    assert "the process of transformers ended; its log is empty\n" in iter(asking.stdout.readline, "")
    assert until(asking, "answered\n").pid != first.pid
