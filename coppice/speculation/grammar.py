"""Structured output: which ids may follow a text, by a grammar that the whole answer must match.

A grammar is one more part of the operator G: a mask that depends on the text alone. So it commutes with speculation: a
walk that draws each node's token from that node's own masked row says what plain decoding would. llguidance compiles
and computes masks, by Earley parsing over derivatives of regular expressions along a trie of the vocabulary.
"""

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from coppice.errors import InvalidField
from coppice.speculation.tree import DraftTree, IntArray

Bits = NDArray[np.uint8]  # (S, B): rows of a bit an id, the lowest first, in words of 8 bytes
FIELD = "grammar"
# The white space of JSON where a schema has no x-guidance of its own; else a model could write it without an end.
AS_JSON_DUMPS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MOST_REASON_CHARS = 300
# (256, 8) what each byte of a mask adds to the logits of its ids.
_ADDED = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, np.float32(0), np.float32(-np.inf))
# A mask takes 3 ms at most: about 14,000 units of fuel and 3,500 items are a millisecond.
_LIMITS = LLParserLimits(
    step_lexer_fuel=40_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    precompute_large_lexemes=False,  # which nothing would bound
    verbose_errors=False,
)


def make_vocabulary(
    tokens: Sequence[bytes], special_ids: Collection[int], eos_ids: Sequence[int], encode: Callable[[str], list[int]]
) -> LLTokenizer:
    """What masks are made of. tokens: what each id adds to a text, a special one its name. encode: a text's ids."""
    words: Any = partial(encode)
    words.tokens, words.special_token_ids = tokens, [*special_ids]
    words.eos_token_id, words.bos_token_id = eos_ids[0], None
    return LLTokenizer(TokenizerWrapper(words), eos_token=list(eos_ids))


def compile_grammar(vocabulary: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """The state before an answer, of a grammar of one of the kinds of `wire.common.Grammar`.

    Raises InvalidField for what is no grammar or none that llguidance does, and for one that no text matches. Holds no
    lock of the interpreter for long, but may take any time and memory: see `orchestrator.text` for a bound.
    """
    try:
        matcher = LLMatcher(vocabulary, _source(kind, text), log_level=0, limits=_LIMITS)
    except ValueError as error:
        raise _refusal(error) from None
    matcher.compute_bitmask()  # finds what the first step would
    _check(matcher)
    return matcher


def _source(kind: str, text: str) -> str:
    """A grammar as llguidance reads it. Raises ValueError."""
    if kind == "json":
        return LLMatcher.grammar_from_json_schema(text, defaults=AS_JSON_DUMPS)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        choices = json.loads(text)
        if not isinstance(choices, list) or not choices or not all(isinstance(each, str) for each in choices):
            raise ValueError("a choice is between texts")
        text = f"start: {' | '.join(map(json.dumps, choices))}"
    return LLMatcher.grammar_from_lark(text)


def _check(matcher: LLMatcher) -> None:
    """Raise InvalidField unless the text can go on or is complete."""
    if matcher.is_error():
        raise _refusal(matcher.get_error())
    if matcher.is_stopped() and not matcher.is_accepting():
        raise _refusal("no text can complete it")


def _refusal(reason: object) -> InvalidField:
    return InvalidField(FIELD, str(reason).partition("\n")[0].removesuffix(" <non-verbose/>")[:_MOST_REASON_CHARS])


class Guide:
    """Where one text stands in its grammar. The text that is asked about is always that of the state and some more ids.

    Every method raises InvalidField where the grammar has become too much to compute.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._ahead: dict[tuple[int, ...], bytes] = {}  # masks behind some ids, from before they were asked for
        self.spent_ns = 0

    def append(self, ids: Sequence[int]) -> None:
        """Take the next ids of the answer. Raises InvalidField for ids that the grammar does not allow."""
        self._ahead.clear()
        taken = self._matcher.try_consume_tokens(list(ids))
        _check(self._matcher)
        is_complete = self._matcher.is_stopped() and taken == len(ids) - 1  # then it takes no id that ends the text
        if taken < len(ids) and not is_complete:
            raise InvalidField("ids", f"the grammar does not allow id {ids[taken]} of the answer")

    @contextmanager
    def _behind(self, ids: Sequence[int]) -> Iterator[bool]:
        """The state behind more ids for the length of the block, and whether the grammar allows them."""
        began = time.perf_counter_ns()
        taken = self._matcher.try_consume_tokens(list(ids))
        yield taken == len(ids)
        _check(self._matcher)
        self._matcher.rollback(taken)
        self.spent_ns += time.perf_counter_ns() - began

    def masked(self, row: NDArray[np.float32], ids: Sequence[int]) -> NDArray[np.float32]:
        """A (V,) row behind more ids, which the grammar allows, with -inf for what may not stand there."""
        if (mask := self._ahead.get(tuple(ids))) is None:
            with self._behind(ids):
                mask = self._matcher.compute_bitmask()
        # Whatever the bits are, this takes 70 us for 262,144 ids; a mask of bools takes up to 600.
        masked: NDArray[np.float32] = row + _ADDED.take(np.frombuffer(mask, np.uint8), axis=0).ravel()[: len(row)]
        return masked

    def forced(self, root: int) -> tuple[int, ...]:
        """The ids behind the next root of which the grammar leaves no choice but how the text is cut into ids."""
        with self._behind([root]) as is_allowed:
            return tuple(self._matcher.compute_ff_tokens()) if is_allowed else ()

    def nodes(self, root: int, tree: DraftTree) -> IntArray:
        """The numbers, ascending, of a tree's nodes that the grammar allows behind a root."""
        return np.array(sorted(self._visit([root], tree))[1:], np.int64)

    def look_ahead(self, ids: Sequence[int], tree: DraftTree, enough: Callable[[], bool]) -> None:
        """Prepare what `masked` needs behind more ids and at the nodes of a tree there, its first path first, until it
        is enough. It may run on any thread, while no other uses the guide.
        """
        texts, tokens, parents = [tuple(ids)], tree.tokens.tolist(), tree.parents.tolist()
        for token, parent in zip(tokens, parents, strict=True):
            texts.append((*texts[parent], token))
        with suppress(InvalidField):
            for node in self._visit(ids, tree, enough):
                self._ahead[texts[node]] = self._matcher.compute_bitmask()

    def masks(self, ids: Sequence[int], tree: DraftTree) -> Bits:
        """(n + 1, B) what may stand behind more ids and at each node of a tree there; nothing where it raises."""
        rows = np.zeros((len(tree) + 1, -(-self._vocab_size // 64) * 8), np.uint8)
        with suppress(InvalidField):
            for node in self._visit(ids, tree):
                bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
                rows[node, : len(bits)] = bits
        return rows

    def _visit(self, ids: Sequence[int], tree: DraftTree, enough: Callable[[], bool] = bool) -> Iterator[int]:
        """The numbers of the nodes that the grammar allows behind some ids, 0 first; each is the state in turn."""
        tokens, children, matcher = tree.tokens.tolist(), tree.children(), self._matcher

        def visit(node: int) -> Iterator[int]:
            yield node
            for child in children[node]:
                if not enough() and matcher.try_consume_tokens([tokens[child - 1]]):
                    yield from visit(child)
                    matcher.rollback(1)

        with self._behind(ids) as is_allowed:
            yield from visit(0) if is_allowed else ()
