"""`coppice bench architectures`: which causal LM classes the engine serves, found out on tiny random ones."""

import csv
import multiprocessing
import signal
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from rich.console import Console

from coppice.engine.attention import one_line
from coppice.engine.engine import Engine
from coppice.engine.loading import load_engine
from coppice.engine.rows import Piece, pack
from coppice.errors import CoppiceError
from coppice.speculation.tree import DraftTree
from coppice.testing.tiny_models import NotTiny, model_types, save_tiny, variants

EXACT, REFUSED, WRONG, FAILED, NOT_MADE = "exact", "refused", "wrong", "failed", "not made"
_PROMPT, _NEW = 30, 24
_ROUNDING = 2e-4  # share of the logits' spread by which the best of a row may be missed
_LIMIT_S = 180
COLUMNS = ("class", "verdict", "models", "why")


class Finding(NamedTuple):
    """What became of one tiny model; `reason` is empty for an exact one that says what `generate` says."""

    name: str  # of the class
    verdict: str
    reason: str = ""


def architectures(console: Console, table: Path | None = None, kinds: Iterable[str] | None = None) -> bool:
    """Try every class, print a line for each, for `table` write them as CSV; whether none was wrong or failed."""
    tried = [(kind, variant) for kind in (kinds or sorted(model_types())) for variant in variants(kind)]
    models, counts = defaultdict[tuple[str, str, str], list[str]](list), Counter[str]()
    for number, (kind, variant) in enumerate(tried, 1):
        finding = try_one(kind, variant)
        counts[finding.verdict] += 1
        models[finding.name, finding.verdict, finding.reason].append(f"{kind} {variant}".strip())
        line = f"{number}/{len(tried)} {kind} {variant}: {finding.verdict} {finding.reason}"
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    rows = [(name, verdict, ", ".join(its), reason) for (name, verdict, reason), its in models.items()]
    classes = Counter(verdict for _, verdict in {(name, verdict) for name, verdict, _ in models})
    summary = ", ".join(f"{count} {verdict} ({classes[verdict]} classes)" for verdict, count in counts.items())
    console.print(summary, highlight=False)
    if table:
        with table.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    return not counts[WRONG] + counts[FAILED]


def try_one(kind: str, variant: str) -> Finding:
    """Make a tiny model and serve it, in a process of its own: what ends that ends nothing else."""
    # The server of forks has one thread and knows torch, whose import takes longer than a tiny model.
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, forks) as pool:
        try:
            return pool.submit(examine, kind, variant).result()
        except BrokenProcessPool:
            return Finding(model_types()[kind], FAILED, f"the process crashed, or was not done after {_LIMIT_S} s")


def examine(kind: str, variant: str) -> Finding:
    """Make a tiny model and serve it, in at most _LIMIT_S: what the forked process does."""
    signal.alarm(_LIMIT_S)  # which ends the process
    torch.set_num_threads(1)
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    name = model_types()[kind]
    with tempfile.TemporaryDirectory(prefix="coppice-") as folder:
        try:
            name = save_tiny(kind, variant, Path(folder))
            return Finding(name, *_serve(Path(folder)))
        except NotTiny as error:
            return Finding(name, NOT_MADE, str(error))
        except CoppiceError as error:
            return Finding(name, REFUSED, str(error).replace(folder, "the folder"))
        except Exception as error:
            return Finding(name, FAILED, one_line(error))


def _serve(folder: Path) -> tuple[str, str]:
    """Decode greedily through trees, and compare with the stock model's forward and with `generate`."""
    engine = load_engine(folder, kv_tokens=1024)
    prompt = list(range(3, 3 + 4 * _PROMPT, 4))
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    stock = load(folder, local_files_only=True, dtype=torch.float32).eval()
    reason = ""
    with torch.inference_mode():
        try:
            text = stock.generate(torch.tensor([prompt]), max_new_tokens=_NEW, do_sample=False)[0, _PROMPT:].tolist()
        except Exception as error:  # it is not what is tried here: the forward below says the same
            text, reason = [0] * _NEW, f"generate fails: {type(error).__name__}"
        decoded = _decode(engine, prompt, text)
        logits = stock(torch.tensor([prompt + decoded]), use_cache=False).logits[0, _PROMPT - 1 : -1]
    gaps = logits.amax(-1) - logits.gather(-1, torch.tensor(decoded)[:, None])[:, 0]
    spread = (logits - logits.mean(-1, keepdim=True)).abs().amax(-1)
    if bool((gaps > _ROUNDING * spread).any()):
        return WRONG, "a token is not the argmax of transformers' forward"
    return EXACT, reason or ("" if decoded == text else "generate says something else than its own forward")


def _decode(engine: Engine, prompt: list[int], guess: list[int]) -> list[int]:
    """The engine's greedy text, as long as `guess`; each step verifies a tree of what the guess says and of others."""
    table = engine.pool.allocate("text", len(prompt))
    logits = engine.forward(pack([Piece.chain(table, 0, prompt, [len(prompt) - 1])])).logits
    ids = [int(logits[0].argmax())]
    while len(ids) < len(guess):
        # Below the root: two wrong children, of whom the second has a child, then the guessed path.
        ahead = guess[len(ids) : len(ids) + 3]
        tokens, parents = [5, 6, 7, *ahead], [0, 0, 2, *[0, 4, 5][: len(ahead)]]
        tree = DraftTree(np.array(tokens), np.array(parents), np.zeros(len(tokens), np.float32))
        base, above = len(prompt) + len(ids) - 1, [-1, *parents]
        engine.pool.extend(table, base + len(above))
        piece = Piece(table, base, [ids[-1], *tokens], above, tree.depths().tolist(), range(len(above)))
        best: list[int] = engine.forward(pack([piece])).logits.argmax(-1).tolist()
        path, children = [0], tree.children()
        while onward := [node for node in children[path[-1]] if tokens[node - 1] == best[path[-1]]]:
            path.append(onward[-1])
        engine.pool.compact([(table, base, path)])
        ids += [best[node] for node in path]
    return ids[: len(guess)]
