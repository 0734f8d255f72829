"""Does packed attention say what the model says? The engine asks itself once, before it serves anybody."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coppice.engine.attention import NAME, UnsupportedModel
from coppice.engine.engine import Engine
from coppice.engine.ordered import SEGMENT
from coppice.engine.rows import Piece, ancestors, pack
from coppice.engine.states import CACHES
from coppice.engine.steps import decoder_layers

# A tree of 12 rows with four leaves, the root at row 0; siblings and cousins that do not see each other.
_PARENTS = (-1, 0, 0, 1, 1, 2, 3, 3, 5, 6, 8, 9)
_DEPTHS = (0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5)
_PATHS = [np.flatnonzero(path).tolist() for row, path in enumerate(ancestors(_PARENTS)) if row not in _PARENTS]
"""the rows from the root to each leaf"""
_PREFIX = 40  # tokens, when no window asks for more
_BESIDE = 20  # tokens behind the borders of two chunks
_BORDER = SEGMENT - 3  # a prefix behind which the tree lies across a border
_MAX_PREFIX = 1024  # bounds the check of a large model; a larger window is not crossed
_WRITTEN = 32  # tokens of each text of which the model writes the prefix
_NUDGES, _TEXTS = 2, 3
# How many times its own rounding a row may be from eager attention, and the share of the rows that may be farther: in
# 16 bits rounding alone can send a row to another expert.
ROUNDINGS = {torch.float32: 20.0, torch.bfloat16: 1.6, torch.float16: 4.0}
ROWS_OFF = {torch.float32: 0.0, torch.bfloat16: 0.25, torch.float16: 0.25}


def self_check(engine: Engine) -> None:
    """Compare a tree, alone and packed beside another session, with eager attention over each of its paths.

    The unit is the model's own rounding (`roundings`), which needs no second copy of the weights. Of sound models
    without experts three quarters of a text's rows were below 1.3 in bfloat16, on 240 texts of 12 models, and every row
    below 2.1 in float32. The weakest fault of a scale, window, mask or position, on the least clear of 20 texts, left
    fewer than 0.7 of the rows below 1.6 in bfloat16, and none below 1,000 in float32. With experts rounding can send a
    token of the prefix to another one, which moves all rows (1 of 80 texts), so that three texts have to agree.

    Raises UnsupportedModel with the figures, OutOfBlocks when the pool is too small for it.
    """
    dtype, most = engine.model.dtype, ROUNDINGS[engine.model.dtype]
    for seed in range(_TEXTS):
        distances = roundings(engine, seed)
        off = int((~(distances <= most)).sum())  # `not <=`, so that NaN is off
        if off <= ROWS_OFF[dtype] * len(distances):
            return
    raise UnsupportedModel(
        f"{type(engine.model).__name__} says something else when it runs packed: {off} of {len(distances)} rows differ "
        f"from eager attention by more than {most:g} times their rounding, the median row by "
        f"{float(distances.median()):.2g} times"
    )


def roundings(engine: Engine, seed: int) -> Tensor:
    """(2 * rows,), by how many times its own rounding each row of a tree differs from eager attention when it is
    packed, alone and then beside another session.

    A row's rounding is how far eager attention is from itself when the numbers that the first layer reads are moved by
    up to half of their last digit. The prefix is text that the model writes, for on random ids a trained one amplifies
    rounding. It goes in as two chunks and spans two sliding windows where 1,024 tokens suffice. Raises OutOfBlocks.
    """
    window = max((window for window in engine.layout.windows if window is not None), default=0)
    border = engine.states.chunk if engine.states else 0  # of the chunks of a prompt's half
    room = min(engine.info.context.tokens, engine.pool.free_tokens // 2) - len(_PARENTS)
    random = torch.Generator().manual_seed(seed)
    prefix, tree = _write(
        engine, max(1, min(max(_PREFIX, 2 * window, 2 * border + _BESIDE), _MAX_PREFIX, room)), random
    )
    packed = _packed_logits(engine, prefix, tree)
    expected = _eager_logits(engine, prefix, tree)  # (rows, V)
    noise = torch.stack([_distance(_eager_logits(engine, prefix, tree, random), expected) for _ in range(_NUDGES)])
    # No less than a quarter of the logits' last digit, which a nudge may leave as it is.
    least = torch.finfo(engine.model.dtype).eps / 4 * expected.square().mean(-1).sqrt()
    noise = noise.square().mean(0).sqrt().maximum(least)
    return _distance(packed, expected.repeat(2, 1)) / noise.repeat(2)


def _distance(logits: Tensor, others: Tensor) -> Tensor:
    """(rows, V) twice -> (rows,), the root of the mean square difference."""
    return (logits - others).square().mean(-1).sqrt()


def _write(engine: Engine, length: int, random: torch.Generator) -> tuple[list[int], list[int]]:
    """A prefix of texts that the model writes side by side, one behind the other, and tokens that may follow the last
    text, one for each row of the tree: all are drawn from its distribution.
    """
    start = engine.model.generation_config.bos_token_id or 0
    texts = [[start] for _ in range(-(-length // _WRITTEN))]
    with ExitStack() as stack:
        names = (f"selfcheck-{number}" for number in range(len(texts)))
        tables = [stack.enter_context(engine.pool.borrow(name, _WRITTEN)) for name in names]
        for at in range(min(length, _WRITTEN)):
            steps = [Piece.chain(table, at, text[-1:], [0]) for table, text in zip(tables, texts, strict=True)]
            logits = engine.forward(pack(steps)).logits.float().cpu()
            noise = torch.rand(logits.shape, generator=random).log().neg().log()
            drawn = (logits - noise).topk(len(_PARENTS)).indices.tolist()  # without each other
            texts = [text + tokens[:1] for text, tokens in zip(texts, drawn, strict=True)]
    return list(chain.from_iterable(text[:_WRITTEN] for text in texts))[:length], drawn[-1]


def check_invariant(engine: Engine) -> bytes:
    """Compare the bits of a tree's rows, alone and beside another session, with those of the same texts committed: as
    one prompt, and as one in two parts with a step behind. Returns SHA-256 of them. Raises UnsupportedModel, and
    OutOfBlocks when the pool is too small.
    """
    modules = (module for module in engine.model.modules() if not isinstance(module, nn.Conv1d))
    if any(parameter.dim() > 2 for module in modules for parameter in module.parameters(recurse=False)):
        raise UnsupportedModel("verifier.invariant: experts multiply as many rows at once as are sent to them")
    if engine.states and not engine.states.resumes:
        raise UnsupportedModel("verifier.invariant: Mamba 1 multiplies a weight by as many rows as there are")
    room = min(engine.info.context.tokens, engine.pool.free_tokens // 2) - len(_PARENTS)
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(engine.info.vocab_size, (max(1, min(_BORDER, room)) + len(_PARENTS),), generator=random)
    prefix, tree = ids[: -len(_PARENTS)].tolist(), ids[-len(_PARENTS) :].tolist()
    alone, beside = _packed_logits(engine, prefix, tree).chunk(2)
    for path in _PATHS:
        text = prefix + [tree[row] for row in path]
        for cuts in ((0,), (0, len(text) // 3, len(text) - 1)):
            with engine.pool.borrow("selfcheck", len(text)) as table:
                for start, end in pairwise((*cuts, len(text))):
                    step = Piece.chain(table, start, text[start:end], [end - start - 1])
                    logits = engine.forward(pack([step])).logits[0].float()
            if not (torch.equal(logits, alone[path[-1]]) and torch.equal(logits, beside[path[-1]])):
                raise UnsupportedModel(
                    f"verifier.invariant: {type(engine.model).__name__} says something else of the same text here when "
                    "it comes in other parts, or beside others"
                )
    return hashlib.sha256(alone.cpu().numpy().tobytes()).digest()


def _packed_logits(engine: Engine, prefix: list[int], tree: list[int]) -> Tensor:
    """(2 * rows, V) float32: the tree's rows verified alone, then beside a shorter session."""
    length, borrow = len(prefix), engine.pool.borrow
    with borrow("selfcheck", length + len(tree)) as table, borrow("selfcheck-other", length // 2 + 1) as other:
        for start, stop in ((0, length // 2), (length // 2, length)):
            if stop > start:
                engine.forward(pack([Piece.chain(table, start, prefix[start:stop])]))
        rows = Piece(table, length, tree, _PARENTS, _DEPTHS, range(len(tree)))
        alone = engine.forward(pack([rows])).logits.clone()
        beside = engine.forward(pack([Piece.chain(other, 0, prefix[: length // 2 + 1]), rows])).logits
        return torch.cat([alone, beside]).float()


def _stepped_logits(model: Any, text: Tensor, prompt: int) -> Iterator[Tensor]:
    """(texts, 1, V) behind each token that follows the first `prompt` ones of (texts, n) ids, as `generate` asks for
    them: some layers that keep a state clamp a prompt's time steps, and no others.
    """
    places, cached = torch.arange(text.shape[1], device=text.device).expand(text.shape), dict[str, Any]()
    for start, end in pairwise((0, *range(prompt, text.shape[1] + 1))):
        ids, at = text[:, start:end], places[:, start:end]
        output = model(input_ids=ids, position_ids=at, use_cache=True, logits_to_keep=1, **cached)
        cached = {name: output[name] for name in CACHES if name in output}
        if start:
            yield output.logits


def _eager_logits(engine: Engine, prefix: list[int], tree: list[int], nudges: torch.Generator | None = None) -> Tensor:
    """(rows, V) float32: each row's logits from a plain causal forward of the model over prefix + path; where it
    keeps states, from single steps behind the prefix.

    nudges: what the first layer reads is moved by up to half of its last digit, so that all that follows is rounded
    otherwise.
    """

    def nudge(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        states = args[0] if args else kwargs["hidden_states"]
        halves = (torch.rand(states.shape, generator=nudges) - 0.5) * torch.finfo(states.dtype).eps
        nudged = states + states * halves.to(states)
        return ((nudged, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": nudged})

    depth = max(map(len, _PATHS))
    # Shorter paths are filled up on the right, which a causal model cannot see.
    texts = [prefix + [tree[row] for row in path] + [0] * (depth - len(path)) for path in _PATHS]
    model = engine.model
    layer = decoder_layers(model, engine.info.layers)[0]
    handle = layer.register_forward_pre_hook(nudge, with_kwargs=True) if nudges else None
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            text = torch.tensor(texts, device=model.device)
            if engine.states is None:
                logits = model(input_ids=text, use_cache=False, logits_to_keep=depth).logits.float()
            else:
                logits = torch.cat(list(_stepped_logits(model, text, len(prefix))), dim=1).float()
    finally:
        model.set_attn_implementation(NAME)
        if handle:
            handle.remove()
    # (leaves, depth, V)
    rows = {row: logits[leaf, step] for leaf, path in enumerate(_PATHS) for step, row in enumerate(path)}
    return torch.stack([rows[row] for row in range(len(tree))])
