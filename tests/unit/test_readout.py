"""What a device makes of a forward's rows is what the host makes of them: paths, draws, KV and features."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from coppice.engine.engine import Clock, ForwardOutput
from coppice.engine.kv_cache import KVPool, KVShape
from coppice.speculation.sampling import SamplingParams, decode_row, draw
from coppice.speculation.tree import DraftTree
from coppice.wire.common import Fence
from coppice.wire.verifier import OpenSession, VerifyStep
from services.verifier.acceptance import path_to, walk, walked
from services.verifier.prefix import Prefix
from services.verifier.pruner import Job
from services.verifier.readout import instruct, read_out
from services.verifier.session import Session
from tests.reference import EFFORT

VOCAB, WIDTH = 3, 5  # so few ids that most nodes have twins and long paths are accepted


def random_tree(rng: np.random.Generator) -> DraftTree:
    size = int(rng.integers(0, 24))
    reach = int(rng.integers(1, 30))
    parents = [int(rng.integers(max(0, node - reach), node + 1)) for node in range(size)]
    return DraftTree(rng.integers(0, VOCAB, size), np.array(parents, np.int64), -np.arange(size, dtype=np.float32))


def step_job(rng: np.random.Generator, key: int, pool: KVPool) -> Job:
    """A step of a session somewhere in its text."""
    sampling = SamplingParams(temperature=float(rng.integers(0, 2)), top_k=int(rng.integers(0, 3)), seed=key)
    committed = int(rng.integers(1, 40))
    stop_ids, most = frozenset({int(rng.integers(0, 12))}), committed + int(rng.integers(1, 12))
    layers = (0,) if rng.integers(0, 2) else ()
    opening = OpenSession(f"s{key}", [1] * committed, sampling, stop_ids, most, layers)
    session = Session(key, opening, Prefix(pool.allocate(f"s{key}", 90), [], "", ()), 100, VOCAB)
    session.commit([1] * committed, None)
    tree = random_tree(rng)
    step = VerifyStep(Fence(1, committed, 0), 1, tree)
    answer: Any = None
    return Job(answer, 0, session, step, tree=tree)


def logits_of(rng: np.random.Generator, tree: DraftTree) -> torch.Tensor:
    """(n + 1, V) rows, the same for nodes that spell the same text; some cannot be drawn from."""
    rows: dict[tuple[int, ...], Any] = {}
    spelt = [tuple(tree.tokens[np.array(path_to(tree, node), np.int64) - 1].tolist()) for node in range(len(tree) + 1)]
    for text in spelt:
        rows.setdefault(text, rng.normal(size=VOCAB) * 3 if rng.random() > 0.02 else np.full(VOCAB, np.nan))
    return torch.tensor(np.array([rows[text] for text in spelt]), dtype=torch.float32)


def test_steps_read_together_are_judged_as_alone() -> None:
    rng = np.random.default_rng(4)
    ends, refused, moved = set(), 0, 0
    for _ in range(150 * EFFORT):
        pool = KVPool(layers=[KVShape(1, 2, 2)] * 2, tokens=1_024)
        jobs = [step_job(rng, key, pool) for key in range(int(rng.integers(1, 6)))]
        pieces = [job.piece() for job in jobs]
        logits = [logits_of(rng, job.tree) for job in jobs]
        for slab in pool._slabs:
            slab.normal_()
        before = [slab.clone() for slab in pool._slabs]
        features = torch.randn(sum(len(piece.tokens) for piece in pieces), WIDTH)
        told = instruct(jobs, pieces, VOCAB)
        output = ForwardOutput(torch.cat(logits), features, Clock(pool.device), torch.from_numpy(told.numbers))
        readings = read_out(jobs, pieces, told, output, pool)
        after = [slab.clone() for slab in pool._slabs]
        first = 0
        for job, piece, rows, (reading, own) in zip(jobs, pieces, logits, readings, strict=True):
            session, request = job.opened, job.opened.request
            assert reading is not None
            laws: dict[int, Any] = {}

            def row_at(node: int) -> Any:
                laws[node] = decode_row(rows[node].numpy(), request.sampling)  # noqa: B023
                return laws[node]  # noqa: B023

            limit = request.max_len - session.committed_len - 1
            told = (request.sampling, request.stop_ids, limit)
            try:
                expected = walk(job.tree, session.committed_len, row_at, *told)
            except ValueError:
                assert reading.drawn[reading.rows[-1]] == -1
                refused += 1
                continue
            finally:
                first, start = first + len(piece.tokens), first
            drawn = {node: (np.array([reading.drawn[node]]), np.zeros(1)) for node in laws}
            found = walked(job.tree, reading, drawn.__getitem__, request.stop_ids, limit)
            assert (found.path, found.drawn, found.finished) == (expected.path, expected.drawn, expected.finished)
            for node, law in laws.items():
                position = session.committed_len + len(path_to(job.tree, node)) + 1
                assert reading.drawn[node] == draw(*law, request.sampling.seed, position)
            assert (own is None) == (not request.feature_layers)
            if own is not None:
                assert torch.equal(own, features[start:][[0, *expected.path]])
            for slab, old in zip(pool._slabs, before, strict=True):
                slab.copy_(old)
            pool.compact(session.table, session.committed_len, [0, *expected.path])
            slots = session.table.slots(np.arange(session.table.num_tokens))
            assert all(torch.equal(new[:, slots], slab[:, slots]) for new, slab in zip(after, pool._slabs, strict=True))
            ends.add((len(expected.path), expected.finished))
            moved += expected.path != tuple(range(1, len(expected.path) + 1))
    assert len(ends) > 8
    assert refused > 5
    assert moved > 30
