"""A stack of tiny models, in which processes and not forwards are what takes time.

`python -m tests.tiny_stack KIND bench identity --ids 20000` runs a command that takes --target and --head on such a
stack. KIND is plain, grammar (the target has a tokenizer, answers match a pattern) or hybrid (the target keeps states).
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from coppice.cli import main
from coppice.testing.tiny_models import save_tiny
from tests.tiny import make_target
from tests.unit.test_feature_heads import save_random

ONE_THREAD_EACH = {"COPPICE_VERIFIER__THREADS": "1", "COPPICE_DRAFTER__THREADS": "1", "OMP_NUM_THREADS": "1"}
PATTERN = '([a-z]{2,5}: [0-9]{1,3}(, |\\.\n)|"x"){150,}'
"""of texts that are longer than what is asked for, and in parts forced"""


def tiny_stack(folder: Path) -> tuple[Path, list[str]]:
    """Make a target in `folder`, and the options of two heads: the target itself, and a random one that can learn."""
    target = make_target(folder / "target", 32, layers=6, tokenizer=False)  # so few ids that a random head is right
    block = save_random(folder / "block", "specblock", vocab_size=32, draft_vocab_size=24)
    return target, [f"self=lm:{target}", f"block=specblock:{block}"]


def stack_of(kind: str, folder: Path) -> list[str]:
    """The options of a command for a stack of a kind."""
    lookup = "lookup=lookup"
    if kind == "grammar":
        target = make_target(folder / "target")
        return [*options(target, [f"self=lm:{target}", lookup]), "--regex", PATTERN]
    if kind == "hybrid":
        save_tiny("qwen3_5_text", "", folder / "target")
        return options(folder / "target", ["bigram=bigram", lookup])
    return options(*tiny_stack(folder))


def options(target: Path, heads: Sequence[str]) -> list[str]:
    """--target and --head."""
    return ["--target", str(target), *(part for head in heads for part in ("--head", head))]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="coppice-tiny-") as made:
        _, kind, *words = sys.argv
        commands = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
        os.environ |= ONE_THREAD_EACH
        sys.argv = ["coppice", *commands, *stack_of(kind, Path(made)), *words[len(commands) :]]
        main()
