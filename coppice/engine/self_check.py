"""Does packed attention say what the model says? The engine asks itself once, before it serves anybody."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from coppice.engine.attention import NAME, UnsupportedModel
from coppice.engine.batch import Piece, pack
from coppice.engine.engine import Engine
from coppice.engine.ordered_tiles import SEGMENT

# A tree of 12 rows with four leaves, the root at row 0; siblings and cousins that do not see each other.
_PARENTS = (-1, 0, 0, 1, 1, 2, 3, 3, 5, 6, 8, 9)
_DEPTHS = (0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5)
_PREFIX = 40  # tokens, when no window asks for more
_BORDER = SEGMENT - 3  # a prefix behind which the tree lies across a border
_MAX_PREFIX = 1024  # bounds the check of a large model; a larger window is not crossed
# Largest difference allowed, relative to the spread of the logits.
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Share of the rows that may exceed it. In 16 bits rounding alone can send a row to another expert; a wrong scale,
# window or mask spoils nearly all rows.
_ROWS_OFF = {torch.float32: 0.0, torch.bfloat16: 0.25, torch.float16: 0.25}
# Of a model that rounds what its layers are given to 8 bits or fewer: the least difference of an input may move it a
# step, 6% in fp8, whatever the dtype of the rest.
_STEPPED, _STEPPED_OFF = 0.25, 0.25


class SelfCheckError(UnsupportedModel):
    """Packed attention and eager attention disagree: the engine must not serve."""


class NotInvariant(UnsupportedModel):
    """A row's bits depend on what is computed beside it, or on how its text came in."""


@dataclass(frozen=True)
class SelfCheck:
    """What was compared: logits of `rows` rows after `prefix_len` tokens.

    max_difference: largest absolute logit difference. tolerance: what was allowed. rows_off: rows that exceeded it.
    argmax_differs: rows whose best token differs. window_crossed: the prefix was longer than every window.
    """

    rows: int
    prefix_len: int
    max_difference: float
    tolerance: float
    rows_off: int
    argmax_differs: int
    window_crossed: bool


def self_check(engine: Engine) -> SelfCheck:
    """Compare a tree, alone and packed beside another session, with eager attention over each of its paths.

    The prefix goes in as two chunks and spans two sliding windows where 1,024 tokens suffice. Raises SelfCheckError
    with the figures, OutOfBlocks when the pool is too small for it.
    """
    window = max((window for window in engine.layout.groups if window is not None), default=0)
    room = min(engine.info.max_context, engine.pool.free_tokens // 2) - len(_PARENTS)
    prefix_len = max(1, min(max(_PREFIX, 2 * window), _MAX_PREFIX, room))
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(engine.info.vocab_size, (prefix_len + len(_PARENTS),), generator=random).tolist()
    prefix, tree = ids[:prefix_len], ids[prefix_len:]

    packed = _packed_logits(engine, prefix, tree)
    expected = _eager_logits(engine, prefix, tree).repeat(2, 1)  # (2 * rows, V)
    differences = (packed - expected).abs().amax(dim=-1)  # (2 * rows,)
    spread = (expected - expected.mean(dim=-1, keepdim=True)).abs().max()
    stepped = _rounds_inputs(engine.model.config)
    tolerance = (_STEPPED if stepped else TOLERANCE[engine.model.dtype]) * float(spread)
    check = SelfCheck(
        rows=len(packed),
        prefix_len=prefix_len,
        max_difference=float(differences.max()),
        tolerance=tolerance,
        rows_off=int((~(differences <= tolerance)).sum()),  # `not <=`, so that NaN is off
        argmax_differs=int((packed.argmax(dim=-1) != expected.argmax(dim=-1)).sum()),
        window_crossed=prefix_len > window,
    )
    if check.rows_off > (_STEPPED_OFF if stepped else _ROWS_OFF[engine.model.dtype]) * check.rows:
        raise SelfCheckError(
            f"{type(engine.model).__name__} says something else when it runs packed: {check.rows_off} of {check.rows} "
            f"rows differ from eager attention, by up to {check.max_difference:.2g}; rounding is {tolerance:.1g}"
        )
    return check


def _rounds_inputs(config: Any) -> bool:
    """Whether a model is quantised so that its layers' inputs are, too."""
    told = getattr(config, "quantization_config", None) or {}
    said = told if isinstance(told, dict) else told.to_dict()
    groups = (said.get("config_groups") or {}).values()
    return bool(said.get("activation_scheme") or any(group.get("input_activations") for group in groups))


def check_invariant(engine: Engine) -> bytes:
    """Compare the bits of a tree's rows, alone and beside another session, with those of the same texts committed: as
    one prompt, and as one in two parts with a step behind. Returns SHA-256 of them. Raises NotInvariant, and
    OutOfBlocks when the pool is too small.
    """
    if any(parameter.dim() > 2 for parameter in engine.model.parameters()):
        raise NotInvariant("verifier.invariant: experts multiply as many rows at once as are sent to them")
    room = min(engine.info.max_context, engine.pool.free_tokens // 2) - len(_PARENTS)
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(engine.info.vocab_size, (max(1, min(_BORDER, room)) + len(_PARENTS),), generator=random)
    prefix, tree = ids[: -len(_PARENTS)].tolist(), ids[-len(_PARENTS) :].tolist()
    alone, beside = _packed_logits(engine, prefix, tree).chunk(2)
    for path in _paths():
        text = prefix + [tree[row] for row in path]
        for cuts in ((0,), (0, len(text) // 3, len(text) - 1)):
            table = engine.pool.allocate("selfcheck", len(text))
            try:
                for start, end in pairwise((*cuts, len(text))):
                    chunk = text[start:end]
                    said = engine.forward(pack([Piece.chain(table, start, chunk, [len(chunk) - 1])])).logits[0].float()
            finally:
                engine.pool.free(table)
            if not (torch.equal(said, alone[path[-1]]) and torch.equal(said, beside[path[-1]])):
                raise NotInvariant(
                    f"verifier.invariant: {type(engine.model).__name__} says something else of the same text here when "
                    "it comes in other parts, or beside others"
                )
    return hashlib.sha256(alone.cpu().numpy().tobytes()).digest()


def _packed_logits(engine: Engine, prefix: list[int], tree: list[int]) -> Tensor:
    """(2 * rows, V) float32: the tree's rows verified alone, then beside a shorter session."""
    length = len(prefix)
    table = engine.pool.allocate("selfcheck", length + len(tree))
    other = None
    try:
        other = engine.pool.allocate("selfcheck-other", length // 2 + 1)
        for start, stop in ((0, length // 2), (length // 2, length)):
            if stop > start:
                engine.forward(pack([Piece.chain(table, start, prefix[start:stop])]))
        rows = Piece(table, length, tree, _PARENTS, _DEPTHS, range(len(tree)))
        alone = engine.forward(pack([rows])).logits.clone()
        beside = engine.forward(pack([Piece.chain(other, 0, prefix[: length // 2 + 1]), rows])).logits
        return torch.cat([alone, beside]).float()
    finally:
        engine.pool.free(table)
        if other is not None:
            engine.pool.free(other)


def _eager_logits(engine: Engine, prefix: list[int], tree: list[int]) -> Tensor:
    """(rows, V) float32: each row's logits from a plain causal forward of the model over prefix + path."""
    paths = _paths()
    depth = max(map(len, paths))
    # Shorter paths are filled up on the right, which a causal model cannot see.
    texts = [prefix + [tree[row] for row in path] + [0] * (depth - len(path)) for path in paths]
    model = engine.model
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            text = torch.tensor(texts, device=model.device)
            logits = model(input_ids=text, use_cache=False, logits_to_keep=depth).logits.float()  # (leaves, depth, V)
    finally:
        model.set_attn_implementation(NAME)
    rows = {row: logits[leaf, step] for leaf, path in enumerate(paths) for step, row in enumerate(path)}
    return torch.stack([rows[row] for row in range(len(tree))])


def _paths() -> list[list[int]]:
    """The rows from the root to each leaf."""
    paths: list[list[int]] = []
    for row in range(len(_PARENTS)):
        if row not in _PARENTS:
            path = [row]
            while _PARENTS[path[0]] >= 0:
                path.insert(0, _PARENTS[path[0]])
            paths.append(path)
    return paths
