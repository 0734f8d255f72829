"""Masks of a grammar against what a partial match of a regular expression says, and what is refused before decoding."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import regex
from llguidance import LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from coppice.config.token_bytes import TokenBytes
from coppice.errors import InvalidField
from coppice.speculation.grammar import Guide, compile_grammar
from coppice.speculation.tree import graft, paths, validate
from services.verifier.grammars import vocabulary_of
from tests.reference import make_tree, random_tree
from tests.unit.test_text_stream import MAKERS

END, SPECIAL, VOCAB = 0, 1, 420  # wider than the tokenizer
PIECES = ["ab", "abc", "bc", "12", '{"', '":', "é", "  "]
PATTERNS = ["(ab|c)*d", "[a-c]{2,5}12?", "(é|b+)x{0,3}", '\\{"a":[0-9]{1,3}\\}', "a(b(c(d)?)?)?", "[^a]{3}"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Every byte, some longer pieces, and two special tokens."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = [level.pre_tokenize_str(piece)[0][0] for piece in PIECES]
    ids = {sign: at for at, sign in enumerate(["<end>", "<s>", *sorted(level.alphabet()), *spelled])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<s>"])
    return tokenizer


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    return vocabulary_of(tokenizer, VOCAB, [END])


def is_begun(pattern: str, text: bytes) -> bool:
    """Whether a text, which may end within a character, can become one that matches."""
    for more in range(4):  # bytes of a character that are not there yet
        try:
            whole = text[: len(text) - more].decode()
        except UnicodeDecodeError:
            continue
        rest = text[len(text) - more :]
        completions = [c for c in "éü€🌲ñ" if c.encode().startswith(rest)] if rest else [""]
        return any(regex.fullmatch(pattern, whole + c, partial=True) for c in completions)
    return False


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_id_is_allowed_where_the_text_can_go_on_with_it(
    pattern: str, tokenizer: Tokenizer, vocabulary: LLTokenizer
) -> None:
    spelled, rng = TokenBytes(tokenizer), random.Random(1)
    pieces = [spelled.of(token) for token in range(VOCAB)]
    of_ascii = {token for token, piece in enumerate(pieces) if piece and piece.isascii()}
    for _ in range(6):
        guide, text = Guide(compile_grammar(vocabulary, "regex", pattern), VOCAB), b""
        for _ in range(8):
            allowed = allowed_by(guide, [])
            assert allowed.shape == (VOCAB,)
            whole = text.decode(errors="ignore")  # characters
            assert bool(allowed[END]) == bool(whole.encode() == text and regex.fullmatch(pattern, whole))
            onward = [token for token in np.flatnonzero(allowed).tolist() if token != END]
            right = {token for token in of_ascii if is_begun(pattern, text + pieces[token])}
            assert right >= of_ascii.intersection(onward)
            # Text that is forced is cut into ids as the tokenizer does it.
            assert allowed.sum() == 1 or right <= {*onward}
            if not onward:
                break
            token = rng.choice(onward)
            assert np.array_equal(allowed_by(guide, [token]), allowed_by(guide, [token]))  # asking changes nothing
            assert np.array_equal(allowed_by(guide, []), allowed)
            guide.append([token])
            text += pieces[token]


def test_a_tree_keeps_the_nodes_whose_texts_can_go_on(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    pattern, rng = "(ab|c)*d?", np.random.default_rng(0)
    letters = [*tokenizer.encode("abcd", add_special_tokens=False).ids, END]
    spelled = TokenBytes(tokenizer)
    for _ in range(40):
        guide, tree = Guide(compile_grammar(vocabulary, "regex", pattern), VOCAB), random_tree(rng, vocab_size=5)
        tree = make_tree(zip([letters[t] for t in tree.tokens], tree.parents, tree.log_probs, strict=True))
        root = letters[2]
        kept = guide.nodes(root, tree).tolist()
        expected = [at for at, path in enumerate(paths(tree), 1) if is_possible(pattern, spelled, (root, *path))]
        assert kept == expected
        if len(kept) == len(tree):
            masks = np.unpackbits(guide.masks([root], tree), axis=1, count=VOCAB, bitorder="little")
            for ahead in (False, True):
                if ahead:
                    guide.look_ahead([root], tree, bool)
                assert np.array_equal(masks, [allowed_by(guide, [root, *path]) for path in ((), *paths(tree))])


def allowed_by(guide: Guide, ids: Sequence[int], size: int = VOCAB) -> NDArray[np.bool_]:
    """(V,) which ids a grammar allows behind some."""
    return np.isfinite(guide.masked(np.zeros(size, np.float32), ids))


def is_possible(pattern: str, spelled: TokenBytes, path: tuple[int, ...]) -> bool:
    """Whether a path's text begins a match; an id that ends the text stands behind a whole one alone."""
    text, ended = b"", False
    for token in path:
        if ended or (token == END and (text.endswith(b"d") or not regex.fullmatch(pattern, text.decode()))):
            return False  # behind what is complete it is known without a draft
        ended, text = token == END, text + spelled.of(token)
    return is_begun(pattern, text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", '{"type": "strange"}'),
        ("json", '{"$ref": "#"}'),
        ("json", '{"items":' * 5000 + "{}" + "}" * 5000),
        ("regex", "(a"),
        ("regex", "(?=a)b"),
        ("regex", "(" * 30000 + "a" + ")" * 30000),
        ("choice", "[]"),
        ("choice", '["a", 1]'),
        ("lark", "begin: /a/"),
        ("lark", "start: " + "(" * 30000 + '"a"' + ")" * 30000),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_grammar_is_refused(kind: str, text: str, vocabulary: LLTokenizer) -> None:
    with pytest.raises(InvalidField) as refused:
        compile_grammar(vocabulary, kind, text)
    assert refused.value.field == "grammar"
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("choices", [["yes", "no"], ['a"b', "line\nbreak", "back\\slash", "é🌲", "[x]*"], ["a", "ab"]])
def test_a_choice_is_one_of_its_texts(choices: list[str], tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    for choice in choices:
        guide = Guide(compile_grammar(vocabulary, "choice", json.dumps(choices)), VOCAB)
        guide.append(tokenizer.encode(choice, add_special_tokens=False).ids)
        assert allowed_by(guide, [])[END]
        if not any(each != choice and each.startswith(choice) for each in choices):
            assert np.flatnonzero(allowed_by(guide, [])).tolist() == [END]


def test_ids_that_the_grammar_does_not_allow_are_refused(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    guide = Guide(compile_grammar(vocabulary, "regex", "ab"), VOCAB)
    with pytest.raises(InvalidField, match="does not allow"):
        guide.append(tokenizer.encode("ac", add_special_tokens=False).ids)


def test_what_the_grammar_forces_is_a_branch_of_the_tree(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    root, *rest = tokenizer.encode('{"name":', add_special_tokens=False).ids
    schema = '{"type": "object", "properties": {"name": {"enum": [1]}}, "required": ["name"]}'
    guide = Guide(compile_grammar(vocabulary, "json", schema), VOCAB)
    forced = guide.forced(root)
    spelled = TokenBytes(tokenizer)
    assert b"".join(map(spelled.of, (root, *forced))).startswith(b'{"name": 1')
    tree = make_tree([(rest[0], 0, -1.0), (5, 1, -2.0), (6, 0, -3.0)])
    for tokens in ((), forced, (rest[0],), (rest[0], 5, 9), (7, 8)):
        whole = graft(tree, tokens)
        validate(whole, VOCAB)
        assert {*paths(tree), *(tuple(tokens[: at + 1]) for at in range(len(tokens)))} == {*paths(whole)}
        assert paths(whole)[: len(tree)] == paths(tree)


@pytest.mark.parametrize("family", ["byte-level", "llama", "gemma"])
def test_forced_text_is_cut_into_ids_as_behind_other_text(family: str) -> None:
    """Also where the tokenizer puts a space in front of every text, and where a special token is spelled."""
    tokenizer = MAKERS[family]()
    spelled = TokenBytes(tokenizer)
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id("</s>")
    for text in ("the cat saw the dog's hat", " the end", "naïve 🙂 </s> it"):
        guide = Guide(compile_grammar(vocabulary_of(tokenizer, size, [end]), "choice", json.dumps([text])), size)
        [root] = np.flatnonzero(allowed_by(guide, [], size)).tolist()
        ids = [root, *guide.forced(root)]
        assert b"".join(map(spelled.of, ids)) == text.encode()
        assert np.flatnonzero(allowed_by(guide, ids, size)).tolist() == [end]


def without_spaces() -> Tokenizer:
    """Cuts a space alone into the bytes of the sign that stands for it, which are no space."""
    parts = json.loads(MAKERS["gemma"]().to_str())
    model = parts["model"]
    model["vocab"]["<unused>"] = model["vocab"].pop("▁")
    model["merges"] = [pair for pair in model["merges"] if "▁" not in pair]
    return Tokenizer.from_str(json.dumps(parts))


@pytest.mark.parametrize("make", [MAKERS["llama"], without_spaces], ids=["llama", "none"])
def test_what_is_allowed_is_taken(make: Callable[[], Tokenizer]) -> None:
    tokenizer, rng = make(), random.Random(1)
    size, numbers = tokenizer.get_vocab_size(), json.dumps({"type": "array", "items": {"type": "integer"}})
    matcher = compile_grammar(vocabulary_of(tokenizer, size, [size - 1]), "json", numbers)
    for _ in range(10):
        guide, taken = Guide(matcher.deep_copy(), size), 0
        while (allowed := np.flatnonzero(allowed_by(guide, [], size)).tolist()) != [size - 1] and taken < 40:
            guide.append([rng.choice(allowed)])
            taken += 1
