"""`coppice faults` or `coppice bench identity` on tiny models, so that processes and not forwards are what takes time.

`python -m tests.faults.campaign faults --kinds verifier --repeat 20 --json FILE`, and any other option of the command;
`--tls` alone makes the certificates too.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from pathlib import Path

from coppice.cli import main
from tests.certificates import Authority
from tests.tiny import make_target
from tests.unit.test_feature_heads import save_random

if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="coppice-tiny-") as made:
        folder = Path(made)
        target = make_target(folder / "target", 32, layers=8, tokenizer=False)  # so few ids that a random head is right
        block = save_random(folder / "block", "specblock", vocab_size=32, draft_vocab_size=24)
        told = ["--target", str(target), "--heads", f"self=lm:{target}", "--heads", f"block=specblock:{block}"]
        os.environ |= {"COPPICE_VERIFIER__THREADS": "1", "COPPICE_DRAFTER__THREADS": "1", "OMP_NUM_THREADS": "1"}
        words = list(itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
        if "--tls" in sys.argv:
            sys.argv.insert(sys.argv.index("--tls") + 1, str(Authority(folder / "certificates").folder))
        sys.argv = ["coppice", *words, *told, *sys.argv[1 + len(words) :]]
        main()
