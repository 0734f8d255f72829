"""Reasoning and calls of tools: an answer's text is split as it comes, and what is required is a call that is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from coppice.config.token_bytes import TokenBytes
from coppice.errors import InvalidField
from coppice.speculation.grammar import compile_grammar
from orchestrator.http.tools import FORMATS, REASONING_TAGS, AnswerParser, Call, ChatFormat, Part, ToolFormat
from services.verifier.grammars import vocabulary_of
from tests.tiny import make_tokenizer

HERMES, MISTRAL_ARGS, MISTRAL, LFM, PYTHONIC, LLAMA = FORMATS
THINK = REASONING_TAGS[0]
NAMES = ("f", "g", "get.time")
NESTED = {"a": [1, {"b": "}]</x>\n\"'"}], "é": None, "c": -1.5, "d": True}
F, G = Call("f", json.dumps({"a": 1})), Call("g", "{}")
DEEP = Call("f", json.dumps(NESTED, ensure_ascii=False))
PYTHON_NESTED = """[f(a=[1, {'b': '}]</x>\\n"\\''}], é=None, c=-1.5, d=true), g()]"""

Expected = tuple[str, str, list[Call]]  # content, reasoning, calls
SPLIT: list[tuple[ToolFormat | None, str, Expected]] = [
    (None, "<think>\nWhy?\n\nSo.\n</think>\n\nHi ", ("Hi ", "Why?\n\nSo.", [])),
    (None, "\n<think></think>\n\nHi", ("Hi", "", [])),
    (None, "<think>on and on", ("", "on and on", [])),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', ("", "", [F])),
    (
        HERMES,
        '<think>x</think>\n\nWait.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>{"name": "g"}</tool_call>\n Done ',
        ("Wait.Done ", "x", [F, G]),
    ),
    (HERMES, f'<tool_call>{{"name": "f", "arguments": {json.dumps(NESTED)}}}', ("", "", [DEEP])),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", "", [F])),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', ("", "", [F])),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', ("", "", [F, G])),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', ("", "", [F, G])),
    (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}', ("", "", [F, G])),
    (PYTHONIC, "[f(a=1), g()]", ("", "", [F, G])),
    (PYTHONIC, PYTHON_NESTED, ("", "", [DEEP, G])),
    (PYTHONIC, "[f(**{'a': 1}), g()]", ("", "", [F, G])),
    (PYTHONIC, '[get.time(zone="UTC")]', ("", "", [Call("get.time", '{"zone": "UTC"}')])),
    (PYTHONIC, '[f(a="\\ud83d\\ude42")]', ("", "", [Call("f", '{"a": "🙂"}')])),
    (LFM, "<|tool_call_start|>[f(a=1)]<|tool_call_end|>Wait", ("Wait", "", [F])),
]
CONTENT: dict[ToolFormat | None, list[str]] = {  # what cannot be read is content
    None: ["", " \n ", " Hi <think> there</think> ", "<thin"],
    HERMES: [
        *("Hi", "5 <tool < 6", "<tool_call>" + "[" * 100_000, '<tool_call>{"name": 5}</tool_call>'),
        *("a <tool_call>{broken}</tool_call> b", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
    ],
    LLAMA: ['{"name": "h", "parameters": {}}', '{"answer": 5}', 'It is {"name": "f", "parameters": {}}'],
    MISTRAL: ['Hm.[TOOL_CALLS][{"name": "f"'],
    MISTRAL_ARGS: ["[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]"],
    PYTHONIC: [
        *("[1, 2]", "[f(1)]", "[f(a=b'x')]", "[h()]", "[f(a=open('x'))]", "[f(a=1 + x)]", "[" * 5000, "[f(a="),
    ],
}
ANSWERS = [*SPLIT, *((form, text, (text, "", [])) for form, texts in CONTENT.items() for text in texts)]


def joined(parts: list[Part | Call]) -> Expected:
    """What the parts of an answer say together."""
    texts = {
        kind: "".join(part.text for part in parts if isinstance(part, Part) and part.kind == kind)
        for kind in ("content", "reasoning_content")
    }
    return *texts.values(), [part for part in parts if isinstance(part, Call)]  # type: ignore[return-value]


@pytest.mark.parametrize(("form", "text", "expected"), ANSWERS, ids=[text[:40] for _, text, _ in ANSWERS])
def test_an_answer_is_split_the_same_in_whatever_slices_it_comes(
    form: ToolFormat | None, text: str, expected: Expected
) -> None:
    for size in (1, 2, 3, 5, 8, 13, len(text) or 1):
        if len(text) / size > 500:
            continue
        parser = AnswerParser(THINK, form, NAMES)
        parts = [part for at in range(0, len(text), size) for part in parser.push(text[at : at + size])]
        assert all(part.text for part in parts if isinstance(part, Part))
        assert joined([*parts, *parser.push("", ended=True)]) == expected


def test_text_is_held_back_only_while_it_may_be_a_tag() -> None:
    parser = AnswerParser(THINK, HERMES, NAMES)
    for text, told in (("Hi", "Hi"), (" <to", ""), ("ol", ""), ("s>", " <tools>"), (" b", " b")):
        assert joined(parser.push(text))[0] == told
    parser = AnswerParser(THINK, HERMES, NAMES)
    assert joined(parser.push("<think>a</th"))[1] == "a"
    assert joined(parser.push("ank>"))[1] == "</thank>"


def test_what_a_prompt_opens_is_thought() -> None:
    for prompt, text, expected in (
        ("<|assistant|><think>\n", "Why?\n</think>\nHi", ("Hi", "Why?", [])),
        ("<|assistant|><think>\n\n</think>\n\n", "Hi", ("Hi", "", [])),
        ("", "Hi</think>", ("Hi</think>", "", [])),
    ):
        parser = AnswerParser(THINK, HERMES, NAMES)
        parser.begin(prompt)
        assert joined([*parser.push(text), *parser.push("", ended=True)]) == expected


TEMPLATES = Path(__file__).parents[1] / "chat_templates"
KNOWN = {"mistral": MISTRAL, "llama-32": LLAMA}
MARKS = {
    "<tool_call>": HERMES,
    "<tool_call>\n<function=f>": None,
    "[TOOL_CALLS] name [ARGS]": MISTRAL_ARGS,
    "[func_name1(params_name1=params_value1)]": PYTHONIC,
    "<|tool_call_start|>": LFM,
    "{{ messages }}": None,
    "": None,
}


def test_a_template_tells_its_format() -> None:
    for file in sorted(TEMPLATES.glob("*.jinja")):
        chat = ChatFormat.of(file.read_text(encoding="utf-8"), TokenBytes(None))
        assert chat.tools == KNOWN.get(file.stem), file.stem
        assert (chat.reasoning == THINK) == (file.stem in ("qwen-3", "deepseek-r1", "smollm-3", "names")), file.stem
    for template, form in MARKS.items():
        assert ChatFormat.of(template, TokenBytes(None)).tools == form


DEFS = {"$defs": {"P": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}}
TOOLS: list[tuple[str, dict[str, Any]]] = [
    ("f", {"properties": {"o": {"type": "string"}, "a": {"type": "integer"}}, "required": ["a"]}),
    ("g", {}),
    ("at", {**DEFS, "properties": {"p": {"$ref": "#/$defs/P"}}, "required": ["p"], "additionalProperties": False}),
]
CALLS: list[tuple[ToolFormat, list[str], list[str]]] = [  # by format: what is taken, and what is not
    (
        HERMES,
        [
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
            '<tool_call>\n{"name": "at", "arguments": {"p": {"x": 1}}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        ],
        [
            "Hi",
            '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>',
            '<tool_call>\n{"name": "at", "arguments": {"p": {"x": "1"}}}\n</tool_call>',
        ],
    ),
    (MISTRAL, ['[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'], ["[TOOL_CALLS][]"]),
    (MISTRAL_ARGS, ['[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'], ["[TOOL_CALLS]f"]),
    (LLAMA, ['{"name": "f", "parameters": {"a": 1}}'], ['{"name": "f", "parameters": {"a": "x"}}', "{}"]),
    (
        PYTHONIC,
        ['[f(**{"a": 1})]', '[f(**{"o": "x", "a": 1}), at(**{"p": {"x": 1}})]'],
        ["[]", "[f(a=1)]", '[f(**{"o": "x"})]', "[h(**{})]"],
    ),
    (LFM, ['<|tool_call_start|>[f(**{"a": 1})]<|tool_call_end|>'], ['[f(**{"a": 1})]']),
]


@pytest.fixture(scope="module", params=[False, True], ids=["tags as text", "tags as tokens"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, 512, None)
    made: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if request.param:
        made.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "<|tool_call_start|>"])
        made.add_tokens(["<tool_call>", "</tool_call>"])
    return made


def is_taken(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether a text is one of a grammar's, token by token."""
    size, ids = tokenizer.get_vocab_size(), tokenizer.encode(text).ids
    vocabulary = vocabulary_of(Tokenizer.from_str(tokenizer.to_str()), size, [0])
    matcher = compile_grammar(vocabulary, "lark", grammar)
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and bool(matcher.is_accepting())


@pytest.mark.parametrize(("form", "taken", "refused"), CALLS)
def test_what_is_required_is_a_call_that_is_read(
    tokenizer: Tokenizer, form: ToolFormat, taken: list[str], refused: list[str]
) -> None:
    names, special = {name for name, _ in TOOLS}, TokenBytes(tokenizer).special
    several, single = (form.grammar(TOOLS, parallel, special).text for parallel in (True, False))
    for text in taken:
        content, _, calls = joined(AnswerParser(None, form, names).push(text, ended=True))
        assert (content, {call.name for call in calls} <= names) == ("", True)
        assert is_taken(tokenizer, several, text), text
        assert is_taken(tokenizer, single, text) == (len(calls) == 1), text
    assert not [text for text in refused if is_taken(tokenizer, several, text)]


def test_tools_that_cannot_be_called_are_refused_by_name() -> None:
    long: list[tuple[str, dict[str, Any]]] = [("f", {"description": "x" * (1 << 17)})]
    for form, tools in ((PYTHONIC, [("get-time", {})]), (HERMES, long)):
        with pytest.raises(InvalidField, match=r"^tools: "):
            form.grammar(tools, True, {})
