"""A stack of tiny models, in which processes and not forwards are what takes time.

`python -m tests.tiny_stack bench identity --ids 1000000` runs a command of `coppice` that takes --target and --head
on such a stack.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from pathlib import Path

from coppice.cli import main
from tests.tiny import make_target
from tests.unit.test_feature_heads import save_random

ONE_THREAD_EACH = {"COPPICE_VERIFIER__THREADS": "1", "COPPICE_DRAFTER__THREADS": "1", "OMP_NUM_THREADS": "1"}
"""variables for the processes of such a stack"""


def tiny_stack(folder: Path) -> tuple[Path, list[str]]:
    """Make a target in `folder`, and the options of two heads: the target itself, and a random one that can learn."""
    target = make_target(folder / "target", 32, layers=6, tokenizer=False)  # so few ids that a random head is right
    block = save_random(folder / "block", "specblock", vocab_size=32, draft_vocab_size=24)
    return target, [f"self=lm:{target}", f"block=specblock:{block}"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="coppice-tiny-") as made:
        target, heads = tiny_stack(Path(made))
        words = list(itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
        options = ["--target", str(target), *(part for head in heads for part in ("--head", head))]
        os.environ |= ONE_THREAD_EACH
        sys.argv = ["coppice", *words, *options, *sys.argv[1 + len(words) :]]
        main()
