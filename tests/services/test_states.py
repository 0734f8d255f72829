"""Targets whose layers keep a state of the text say what transformers' own `generate` says, through trees, rejections,
sessions side by side and sessions that are opened again.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice.config.model import ModelSize
from coppice.config.sections import DrafterSettings, VerifierSettings
from coppice.engine.attention import UnsupportedModel
from coppice.engine.engine import Engine
from coppice.engine.kv_cache import BlockTable
from coppice.engine.loading import load_engine
from coppice.engine.rows import Piece, pack
from coppice.engine.self_check import check_invariant, self_check
from coppice.heads.lm import LanguageModelHead
from coppice.telemetry import SessionMetrics
from coppice.testing.tiny_models import VOCAB, save_tiny
from services.verifier.worker import Worker

DELTA = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "kimi_linear", "bailing_hybrid")
MAMBA = ("bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "mamba2", "jamba", "falcon_mamba", "mamba")
CONVOLUTIONS = ("lfm2", "lfm2_moe", "lfm3")
PROMPTS, NEW, CHUNK = (5, 40, 90), 16, 33
Ids = list[int]
Patch = pytest.MonkeyPatch


@cache
def texts_of(kind: str) -> tuple[Any, list[Ids], list[Ids]]:
    """A model, prompts, and what `generate` says to them; the model is never given to an engine."""
    with TemporaryDirectory() as folder:
        save_tiny(kind, "", Path(folder))
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [random.Random(length).choices(range(3, VOCAB), k=length) for length in PROMPTS]
    asked: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    return model, prompts, [model.generate(torch.tensor([ids]), **asked)[0, len(ids) :].tolist() for ids in prompts]


def engine_of(kind: str, folder: Path) -> Engine:
    texts_of(kind)[0].save_pretrained(folder)
    return load_engine(folder, kv_tokens=2048)


class Decoding:
    """One session that decodes greedily through trees, in each of which some of a guess is, beside what is wrong."""

    def __init__(self, engine: Engine, name: str, prompt: Ids, guess: Ids) -> None:
        self.pool, self.prompt, self.guess, self.ids = engine.pool, prompt, guess, list[int]()
        self.table: BlockTable = engine.pool.allocate(name, len(prompt))
        self.choose = random.Random(len(prompt))
        for start in range(0, len(prompt), CHUNK):
            part = prompt[start : start + CHUNK]
            logits = engine.forward(pack([Piece.chain(self.table, start, part, [len(part) - 1])])).logits
        self.ids.append(int(logits[0].argmax()))

    def piece(self) -> Piece:
        """The latest token and a tree below it."""
        self.base, self.tokens, self.parents, node = len(self.prompt) + len(self.ids) - 1, [self.ids[-1]], [-1], 0
        for token in self.guess[len(self.ids) :][: self.choose.randrange(5)]:
            for _ in range(self.choose.randrange(3)):
                self.parents.append(self.choose.randrange(len(self.tokens)))
                self.tokens.append(self.choose.randrange(3, VOCAB))
            self.parents.append(node)
            node = len(self.tokens)
            self.tokens.append(token)
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        self.pool.extend(self.table, self.base + len(self.tokens))
        keep = range(len(self.tokens))
        return Piece(self.table, self.base, self.tokens, self.parents, depths, keep, certain=len(keep) == 1)

    def take(self, best: Ids) -> tuple[BlockTable, int, Ids]:
        """Walk the tree; what the pool keeps of it."""
        path = [0]
        while onward := [
            row for row, parent in enumerate(self.parents) if parent == path[-1] and self.tokens[row] == best[parent]
        ]:
            path.append(onward[0])
        self.ids += [best[row] for row in path]
        return self.table, self.base, path


def decoded(engine: Engine, prompts: Sequence[Ids], guesses: Sequence[Ids], name: str = "s") -> list[Ids]:
    """The texts of sessions side by side, some of which miss a forward now and then."""
    rng = random.Random(7)
    sessions = [
        Decoding(engine, f"{name}{number}", *texts) for number, texts in enumerate(zip(prompts, guesses, strict=True))
    ]
    while waiting := [session for session in sessions if len(session.ids) < NEW]:
        some = [session for session in waiting if rng.random() < 0.7] or waiting
        pieces = [session.piece() for session in some]
        logits = engine.forward(pack(pieces)).logits.split([len(piece.tokens) for piece in pieces])
        best = [rows.argmax(-1).tolist() for rows in logits]
        engine.pool.compact([session.take(rows) for session, rows in zip(some, best, strict=True)])
    for session in sessions:
        engine.pool.free(session.table)
    return [session.ids[:NEW] for session in sessions]


def differences(kind: str, engine: Engine) -> Iterator[tuple[Ids, Ids]]:
    """What the engine says and what it should, where these differ: at first, and of sessions opened again half-way."""
    _, prompts, expected = texts_of(kind)
    half = NEW // 2
    again = [prompt + text[:half] for prompt, text in zip(prompts, expected, strict=True)]
    said = decoded(engine, prompts, expected)
    # Behind the end of what `generate` says there is no guess.
    rest = [ids[:half] for ids in decoded(engine, again, [text[half:] for text in expected], "again")]
    for text, first, later in zip(expected, said, rest, strict=True):
        if (first, later) != (text, text[half:]):
            yield first + later, text


@pytest.mark.parametrize("kind", [*DELTA, *MAMBA, *CONVOLUTIONS])
def test_trees_of_a_hybrid_say_what_generate_says(kind: str, tmp_path: Path) -> None:
    engine = engine_of(kind, tmp_path)  # it has passed the self-check, whose prompt crosses a chunk's border
    assert engine.states is not None
    assert "MiB a session" in engine.memory
    assert ModelSize.of(tmp_path, "float32").states == engine.states.bytes_each
    assert list(differences(kind, engine)) == []
    assert engine.timing(5, sessions=2, context=9, repeats=2) > 0
    assert engine.pool.free_tokens == engine.pool.spare


def test_a_state_continues_its_own_text_alone(tmp_path: Path) -> None:
    engine = engine_of("lfm2", tmp_path)
    table = engine.pool.allocate("a", 20)
    engine.forward(pack([Piece.chain(table, 0, [5, 6, 7])]))
    tree = Piece(table, 3, [8, 9, 10], [-1, 0, 0], [0, 1, 1], [])
    for _ in range(2):
        engine.forward(pack([tree]))  # a tree changes nothing until it is accepted
    for prefix in (2, 6, 9):
        with pytest.raises(ValueError, match=f"a state of 3 tokens cannot continue a text of {prefix}"):
            engine.forward(pack([Piece.chain(table, prefix, [5])]))
    engine.pool.compact([(table, 3, [0, 2])])
    engine.forward(pack([Piece.chain(table, 5, [5])]))
    with pytest.raises(ValueError, match="a state of 6 tokens"):
        engine.forward(pack([Piece.chain(table, 5, [5])]))


def test_a_hybrid_leaves_room_for_states_and_describes_no_prefix_cache(tmp_path: Path, monkeypatch: Patch) -> None:
    folder = str(saved("qwen3_5_text", tmp_path))
    size = ModelSize.of(folder, "float32")
    room = size.weights + 99.0 * size.states + 8000 * size.kv
    monkeypatch.setattr("coppice.config.model.free_memory", lambda _: room)
    worker = Worker(VerifierSettings(target=folder, prune=False), SessionMetrics("verifier"), sessions=99)
    worker.load()
    assert (worker.settings.kv_tokens, worker.settings.prefix_cache_tokens) == (4000, 0)


def bits_behind(engine: Engine, prompts: Sequence[Ids]) -> list[list[torch.Tensor]]:
    """What layers keep of texts that go in side by side."""
    states = engine.states
    assert states is not None
    tables = [engine.pool.allocate(f"bits{number}", len(ids)) for number, ids in enumerate(prompts)]
    engine.forward(pack([Piece.chain(table, 0, ids) for table, ids in zip(tables, prompts, strict=True)]))
    slots = [states._texts[table.session].slot for table in tables]
    bits = [[kept[slot].clone() for kept in (*states.conv, *states.recurrent) if kept is not None] for slot in slots]
    for table in tables:
        engine.pool.free(table)
    return bits


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(("qwen3_5_text", dtype) for dtype in (torch.float32, torch.bfloat16)),
        *(("olmo_hybrid", torch.bfloat16), ("bamba", torch.float32), ("lfm2", torch.bfloat16)),
    ],
)
def test_an_invariant_hybrid_says_the_same_alone_and_beside_others(kind: str, dtype: torch.dtype) -> None:
    model, prompts, texts = texts_of(kind)
    engine = Engine(copy.deepcopy(model).to(dtype), kv_tokens=1024, invariant=True)
    assert check_invariant(engine)
    alone = [decoded(engine, [prompt], [text])[0] for prompt, text in zip(prompts, texts, strict=True)]
    assert decoded(engine, prompts, texts) == alone
    # Roundings of a state seldom show in a row of bfloat16.
    for prompt, bits in zip(prompts, bits_behind(engine, prompts), strict=True):
        assert all(map(torch.equal, bits, bits_behind(engine, [prompt])[0]))


def test_what_cannot_keep_states_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"^verifier.invariant: Mamba 1 "):
        load_engine(saved("mamba", tmp_path / "mamba"), kv_tokens=256, invariant=True)
    save_tiny("qwen3_5_text", "", tmp_path)
    for refuse in (
        lambda: load_engine(tmp_path, kv_tokens=256, ranks=2),
        lambda: LanguageModelHead(DrafterSettings(path=str(tmp_path))),
    ):
        with pytest.raises(UnsupportedModel, match=r"^Qwen3_5ForCausalLM keeps states of texts") as refused:
            refuse()
        assert "\n" not in str(refused.value)


def test_bfloat16_passes(tmp_path: Path) -> None:
    for kind in ("qwen3_5_text", "bamba", "lfm2"):
        model = AutoModelForCausalLM.from_pretrained(saved(kind, tmp_path / kind), dtype=torch.bfloat16)
        self_check(Engine(model.eval(), kv_tokens=1024))


def saved(kind: str, folder: Path) -> Path:
    save_tiny(kind, "", folder)
    return folder
