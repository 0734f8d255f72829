"""The forms in which chat templates have models write reasoning and calls of tools: the grammar of a required call, and
a parser of answers that takes them in parts.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from coppice.client.request import to_json
from coppice.config.token_bytes import TokenBytes
from coppice.errors import InvalidField
from coppice.limits import MAX_GRAMMAR_CHARS
from coppice.speculation.grammar import AS_JSON_DUMPS
from coppice.wire.common import Grammar

from ..text import overlap

Json = dict[str, Any]
Kind = Literal["content", "reasoning_content"]


@dataclass(frozen=True, slots=True)
class Part:
    """Some text of an answer, under the name that it has in OpenAI's messages."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool; arguments are a JSON object as text."""

    name: str
    arguments: str


def _call(name: Any, arguments: Any) -> Call:
    """Raises ValueError or TypeError for what is no call."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError("is no call")
    escaped = json.dumps(arguments, allow_nan=False)
    text = json.dumps(json.loads(escaped), ensure_ascii=False)  # two escapes that are one character become it
    text.encode()
    return Call(name, text)


# --- formats ---

_BEGINNING = re.compile(r"[^\s;,]")  # of a call in JSON, behind another one
_NAMED_ARGS = re.compile(r"\s*([\w.:-]+)(?:\[CALL_ID\]\w+)?\[ARGS\](.*)", re.DOTALL)
_CONSTANTS = {"true": True, "false": False, "null": None}


def _read_json(body: str) -> list[Call]:
    """Objects with a name and arguments (or parameters), in a list or one behind the other."""
    calls, end = list[Call](), 0
    while beginning := _BEGINNING.search(body, end):
        value, end = json.JSONDecoder().raw_decode(body, beginning.start())
        for entry in value if isinstance(value, list) else [value]:
            calls.append(_call(entry["name"], entry.get("arguments", entry.get("parameters", {}))))
    return calls


def _read_mistral(body: str) -> list[Call]:
    """JSON, or in newer models NAME[ARGS]OBJECT for each call."""
    if "[ARGS]" not in body:
        return _read_json(body)
    calls = []
    for text in body.split("[TOOL_CALLS]"):
        if (match := _NAMED_ARGS.fullmatch(text)) is None:
            raise ValueError("is no call")
        calls.append(_call(match[1], match[2]))
    return calls


def _read_python(body: str) -> list[Call]:
    """A list of Python's calls, as [f(a=1), g(**{"b": 2})]."""
    tree = ast.parse(body.strip(), mode="eval").body
    if not isinstance(tree, ast.List):
        raise TypeError("is no list")
    calls = []
    for node in tree.elts:
        if not isinstance(node, ast.Call) or node.args:
            raise TypeError("is no call with named arguments")
        arguments: Json = {}
        for keyword in node.keywords:
            value = ast.literal_eval(_Constants().visit(keyword.value))
            arguments |= {keyword.arg: value} if keyword.arg else value
        calls.append(_call(ast.unparse(node.func), arguments))
    return calls


class _Constants(ast.NodeTransformer):
    """Takes JSON's constants for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls: OPENS BEGINS call BETWEEN call ... ENDS CLOSES, all of it text."""

    mark: str
    """a regular expression that is found in the family's templates"""
    read: Callable[[str], list[Call]]
    """the calls in the text between the tags; fails on any other text"""
    opens: str = ""
    """the tag that begins calls; where there is none, they are the whole answer"""
    closes: str = ""
    """the tag that ends them; where there is none, the answer's end does"""
    begins: str = ""
    ends: str = ""
    between: str | None = None
    """None: an answer has one call"""
    wraps_each: bool = False
    """whether each call has tags of its own, with `between` outside of them"""
    call: tuple[str, str, str] = ('{"name": "', '", "arguments": ', "}")
    """what stands before a name, between it and the arguments, and behind these"""

    @property
    def tags(self) -> tuple[str, ...]:
        """What a tokenizer may have a token of its own for."""
        return self.opens, self.closes, self.call[1]

    def calls(self, body: str) -> list[Call]:
        """The calls between two tags; none where the text is something else."""
        try:
            return self.read(body)
        except (ValueError, TypeError, LookupError, AttributeError, SyntaxError, RecursionError, MemoryError):
            return []

    def grammar(self, tools: Sequence[tuple[str, Json]], several: bool, special: Mapping[str, int]) -> Grammar:
        """The grammar of answers that call one of these tools, or several: names, and schemas of their arguments.

        special: ids of the tokens that no text spells, by their names. Raises InvalidField.
        """

        def symbol(text: str) -> str:
            return f"<[{special[text]}]>" if text in special else json.dumps(text, ensure_ascii=False)

        def spelled(*texts: str) -> str:
            return " ".join(map(symbol, filter(None, texts)))

        def repeated(rule: str) -> str:
            more = several and self.between is not None
            return f"{rule} ({spelled(self.between or '')} {rule})*" if more else rule

        before, behind, end = self.call
        rules = []
        for number, (name, schema) in enumerate(tools):
            if self.read is _read_python and not name.replace(".", "_").isidentifier():
                raise InvalidField("tools", f"{name} is no name in Python, which is what this target calls tools in")
            arguments = to_json("tools", {"type": "object", **schema, "x-guidance": AS_JSON_DUMPS})
            rules.append(f"call_{number}: {spelled(before + name, behind)} %json {arguments} {spelled(end)}")
        rules.append(f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}")
        inside = "call" if self.wraps_each else repeated("call")
        rules.append(f"calls: {spelled(self.opens, self.begins)} {inside} {spelled(self.ends, self.closes)}")
        text = "\n".join([f"start: {repeated('calls') if self.wraps_each else 'calls'}", *rules])
        if len(text) > MAX_GRAMMAR_CHARS:
            raise InvalidField("tools", f"make a grammar of more than {MAX_GRAMMAR_CHARS} characters")
        return Grammar("lark", text)


_PYTHONIC = ToolFormat(
    mark=r"func_name1\(|<\|python_start\|>",  # Llama 4
    read=_read_python,
    begins="[",
    ends="]",
    between=", ",
    call=("", "(**", ")"),
)
_MISTRAL = ToolFormat(
    mark=r"\[TOOL_CALLS\]|\[AVAILABLE_TOOLS\]",
    read=_read_mistral,
    opens="[TOOL_CALLS]",
    begins="[",
    ends="]",
    between=", ",
)
FORMATS = (
    ToolFormat(
        mark=r"(?s)^(?!.*<function=).*<tool_call>",  # Hermes, Qwen 2.5 and 3; others write XML between these tags
        read=_read_json,
        opens="<tool_call>",
        closes="</tool_call>",
        begins="\n",
        ends="\n",
        between="\n",
        wraps_each=True,
    ),
    replace(_MISTRAL, mark=r"\[ARGS\]", begins="", ends="", between="", wraps_each=True, call=("", "[ARGS]", "")),
    _MISTRAL,
    replace(_PYTHONIC, mark=r"<\|tool_call_start\|>", opens="<|tool_call_start|>", closes="<|tool_call_end|>"),  # LFM2
    _PYTHONIC,
    ToolFormat(
        mark=r"<\|python_tag\|>|Environment: ipython",  # Llama 3.1 to 3.3
        read=_read_json,
        call=('{"name": "', '", "parameters": ', "}"),
    ),
)
"""The first whose mark is found in a template is the template's."""
REASONING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"))


@dataclass(frozen=True)
class ChatFormat:
    """The forms that a target's chat templates have it write."""

    tokens: TokenBytes
    reasoning: tuple[str, str] | None = None
    """the tags around reasoning"""
    tools: ToolFormat | None = None

    @classmethod
    def of(cls, template: str, tokens: TokenBytes) -> ChatFormat:
        """The forms of some templates, by their texts."""
        reasoning = next((tags for tags in REASONING_TAGS if all(tag in template for tag in tags)), None)
        tools = next((each for each in FORMATS if re.search(each.mark, template)), None)
        return cls(tokens, reasoning, tools)


class AnswerParser:
    """Splits one answer's text into content, reasoning and calls. Text that may turn out to be a tag is held back.

    White space around reasoning and around calls is dropped. A call that cannot be read is content.
    """

    def __init__(self, reasoning: tuple[str, str] | None, tools: ToolFormat | None, names: Collection[str]) -> None:
        """reasoning: the tags around it. names: of the tools that an answer without tags can call."""
        self._reasoning, self._tools, self._names = reasoning, tools, names
        self._state: Callable[[list[Part | Call], bool], bool] = self._in_front
        self._kind: Kind = "content"  # of the text that is read
        self._held = ""
        self._opened = ""  # the tag in front of the call that is read, and white space in front of that
        self._drops_space = False

    def begin(self, prompt: str) -> None:
        """Take in how the prompt ends: a template may have opened the reasoning there."""
        if self._reasoning and prompt.rstrip().endswith(self._reasoning[0]):
            self._state, self._kind, self._drops_space = self._in_text, "reasoning_content", True

    def push(self, text: str, ended: bool = False) -> list[Part | Call]:
        """Take more text; returns the parts that are certain by now. ended: this is the last text."""
        self._held += text
        parts: list[Part | Call] = []
        while self._state(parts, ended):
            pass
        return parts

    # Each state takes what it can of the held text, and returns whether another one goes on.

    def _in_front(self, parts: list[Part | Call], ended: bool) -> bool:
        """In front of the answer, or behind reasoning or a call: only white space has come."""
        text, tags = self._held.lstrip(), list[str]()
        if self._reasoning:
            tags.append(self._reasoning[0])
            if text.startswith(self._reasoning[0]):
                self._held = text.removeprefix(self._reasoning[0])
                self._state, self._kind, self._drops_space = self._in_text, "reasoning_content", True
                return True
        if self._tools and not self._tools.opens:
            tags.append((self._tools.begins + self._tools.call[0])[0])
            if text.startswith(tags[-1]):
                self._state = self._in_call
                return True
        if ended or (text and not any(tag.startswith(text) for tag in tags)):
            self._state, self._kind = self._in_text, "content"
            return True
        return False

    def _in_text(self, parts: list[Part | Call], ended: bool) -> bool:
        """In content, up to the tag of a call, or in reasoning, up to its end."""
        thinks = self._kind == "reasoning_content" and self._reasoning
        tag = thinks[1] if thinks else self._tools.opens if self._tools else ""
        at, text = self._held.find(tag) if tag else -1, self._held
        if at >= 0:
            text = text[:at].rstrip()
        elif tag and not ended:  # a tag, or white space in front of it, may begin at the end
            text = text[: len(text) - overlap(text, [tag])].rstrip()
        self._add(parts, text)
        behind = len(text) if at < 0 else at + len(tag)
        between, self._held = self._held[len(text) : behind], self._held[behind:]
        if at < 0:
            return False
        if thinks:
            self._state, self._drops_space = self._in_front, True
        else:
            self._state, self._opened = self._in_call, between
        return True

    def _in_call(self, parts: list[Part | Call], ended: bool) -> bool:
        assert self._tools
        tag = self._tools.closes
        body, closed, rest = self._held.partition(tag) if tag else (self._held, "", "")
        if not (closed or ended):
            return False
        calls = self._tools.calls(body)
        if calls and (self._opened or all(call.name in self._names for call in calls)):
            parts += calls
            self._state, self._drops_space = self._in_front, True
        else:
            self._state, self._kind = self._in_text, "content"
            self._add(parts, self._opened + body + closed)
        self._held, self._opened = rest, ""
        return True

    def _add(self, parts: list[Part | Call], text: str) -> None:
        if self._drops_space:
            text = text.lstrip()
        if text:
            self._drops_space = False
            parts.append(Part(self._kind, text))
