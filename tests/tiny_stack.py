"""A stack of tiny models, in which processes and not forwards are what takes time.

`python -m tests.tiny_stack bench identity --ids 1000000` runs a command of `coppice` that takes --target and --head
on such a stack.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coppice.cli import main
from coppice.stack.launch import Stack
from coppice.stack.spec import HeadSpec, StackSpec
from tests.tiny import make_target
from tests.unit.test_feature_heads import save_random

ONE_THREAD_EACH = {"COPPICE_VERIFIER__THREADS": "1", "COPPICE_DRAFTER__THREADS": "1", "OMP_NUM_THREADS": "1"}
"""variables for the processes of such a stack"""


def tiny_stack(folder: Path) -> tuple[Path, list[str]]:
    """Make a target in `folder`, and the options of two heads: the target itself, and a random one that can learn."""
    target = make_target(folder / "target", 32, layers=6, tokenizer=False)  # so few ids that a random head is right
    block = save_random(folder / "block", "specblock", vocab_size=32, draft_vocab_size=24)
    return target, [f"self=lm:{target}", f"block=specblock:{block}"]


@contextlib.contextmanager
def serving(
    logs: Path,
    target: Path | None,
    *heads: HeadSpec,
    draft_deadline_ms: int = 2000,
    extra: Mapping[str, Mapping[str, Any]] = {},
    **options: Any,
) -> Iterator[Stack]:
    """Run a stack whose processes have a thread each, and check that what runs in the end stops by itself.

    The machine that runs tests may be busy: no head is to be benched for that. Without a target it is the demo's.
    `extra` and `options` are StackSpec's.
    """
    patient = {"orchestrator.draft_deadline_ms": draft_deadline_ms, **extra.get("orchestrator", {})}
    options |= {"heads": heads, "dtype": "float32", "verifier_threads": 1, "drafter_threads": 1}
    options["extra"] = {**extra, "orchestrator": patient}
    spec = StackSpec(target=target, **options) if target else StackSpec.demo(**options)
    with Stack(spec, log_dir=logs) as stack:
        yield stack
        running = {name for name, process in stack.processes.items() if not process.ended}
    assert not running.intersection(stack.unclean)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="coppice-tiny-") as made:
        target, heads = tiny_stack(Path(made))
        words = list(itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
        options = ["--target", str(target), *(part for head in heads for part in ("--head", head))]
        os.environ |= ONE_THREAD_EACH
        sys.argv = ["coppice", *words, *options, *sys.argv[1 + len(words) :]]
        main()
