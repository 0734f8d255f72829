"""The options of `coppice bench`, each once, and the prompts that they name, as a target's ids: they are known and
checked against its context before anything is started. A command takes some options, with defaults of its own.
"""

import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer
from typer import Option

from coppice.commands.options import Heads, JsonFile, names, split, stack_spec
from coppice.errors import InvalidField
from coppice.limits import check_range
from coppice.prompts import FilePrompt, demo_prompts, read_prompts
from coppice.speculation.policy import POLICIES, Policy
from coppice.stack.spec import SHIPPED_HEADS, HeadSpec, StackSpec
from coppice.testing.reference import TargetText
from coppice.wire.generation import ModelDescription

T = TypeVar("T", int, float)
ASKED = ("target", "heads", "prompts", "category", "chat", "dtype")  # the options of commands that ask a stack
Target = Annotated[Path | None, Option(help="Model's folder, GGUF file or Hub name; default: the demo's.")]


@dataclass(frozen=True, kw_only=True)
class Options:
    """All options; those that a command does not take are as they stand here."""

    target: Target = None
    heads: Heads = None
    head: Annotated[str, Option(metavar="NAME=KIND[:DIR]", help="The head.")] = "specblock-code"
    prompts: Annotated[
        list[Path] | None,
        Option(
            metavar="FILE,...",
            callback=split,
            help="JSON lines (Spec-Bench's, SPEED-Bench's) or .txt, a benchmark each if there are several. "
            "Default: the prompts that come with Coppice.",
        ),
    ] = None
    category: Annotated[list[str] | None, names("Keep prompts of these categories, such as code,maths.")] = None
    n: Annotated[int, Option("--n", min=1, help="Prompts of each file, or queries.")] = 8
    warm_up: Annotated[int, Option(min=0, help="Prompts after --n that every method answers first, uncounted.")] = 0
    chat: Annotated[bool, Option("--chat", help="Send each text as a user's message.")] = False
    max_new_tokens: Annotated[int, Option(min=2, help="Tokens made for each prompt, past end-of-text ids too.")] = 128
    methods: Annotated[list[str] | None, names("Policies or head names; default: all of them.")] = None
    peers: Annotated[
        list[str] | None,
        names("llama.cpp's n-gram modes, such as ngram-simple; default: all of them."),
    ] = None
    llama_cpp: Annotated[Path | None, Option(help="Where llama.cpp is built, once; default: in HF_HOME.")] = None
    budgets: Annotated[str, Option(help="Draft nodes verified a step, comma-separated; default: the server's.")] = ""
    budget: Annotated[int, Option(min=1, max=64, help="Draft nodes of every tree.")] = 31
    temperatures: Annotated[str, Option(help="Comma-separated.")] = "0,1"
    sessions: Annotated[str, Option(help="Prompts answered at once, comma-separated.")] = "1"
    ids: Annotated[int, Option(min=1, help="Token ids of each line, at least.")] = 100_000
    regex: Annotated[str, Option(help="Regular expression that all answers match; verifiers are invariant.")] = ""
    what: Annotated[
        Literal["shift", "turns"],
        Option(help="Without --prompts: stories, then code again; or code, stories and maths in turns."),
    ] = "shift"
    shape: Annotated[
        str, Option(metavar="NAME|DIR", help="demo, 0.5b, llama-3.1-8b, qwen3-8b, or a folder with config.json.")
    ] = "demo"
    kinds: Annotated[
        list[str] | None, names("Kinds of heads; default: eagle3,specblock.", "--head", metavar="KIND,...")
    ] = None
    device: Annotated[str, Option(help="A torch device.")] = "cpu"
    dtype: Annotated[str | None, Option(help="float32 or bfloat16.")] = None
    json_file: JsonFile = None

    def spec(self, default: Sequence[str] = ()) -> StackSpec:
        """The stack that the options describe; unusable ones are a usage error that names the option.

        Beside the demo's target are, unless heads are named, the shipped ones that methods name, else `default`, else
        the demo's own.
        """
        from coppice.commands.up import find_model

        named = {head for method in self.methods or () for head in re.split("[:/]", method)}
        shipped = [head for head in SHIPPED_HEADS if head in named] or list(default)
        heads = self.heads or (shipped if self.target is None else None)
        return stack_spec(find_model(None, self.target, None)[0], heads, dtype=self.dtype, port=0)

    def numbers(self, option: str, kind: type[T], low: float, high: float = math.inf) -> tuple[T, ...]:
        """The numbers of an option that takes several, with commas between. Raises InvalidField, which names it."""
        text = getattr(self, option)
        try:
            values = tuple(map(kind, text.split(",")))
        except ValueError:
            raise InvalidField(option, f"{text!r} is not a list of numbers") from None
        for number in values:
            check_range(option, number, low, high)
        return values


Command = Callable[[Options], None]


def command(app: typer.Typer, *names: str, **defaults: Any) -> Callable[[Command], Command]:
    """Make a function a command with the options of these names; `defaults` has those whose defaults differ."""
    hints = get_type_hints(Options, include_extras=True)
    parameters = [
        Parameter(
            name, Parameter.KEYWORD_ONLY, default=defaults.get(name, getattr(Options, name)), annotation=hints[name]
        )
        for name in hints
        if name in (*names, *defaults, "json_file")
    ]

    def register(function: Command) -> Command:
        def called(**given: Any) -> None:
            function(Options(**given))

        called.__doc__ = function.__doc__
        called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(function.__name__)(called)
        return function

    return register


def read_methods(
    requested: Sequence[str] | None, heads: Sequence[HeadSpec], others: Sequence[str] = ()
) -> tuple[str, ...]:
    """The policies of a stack with these heads that are wanted, plain first; HEAD is short for single:HEAD.

    Without any all policies. `others`: what may be wanted too. Raises InvalidField, before anything is started.
    """
    names = [head.name for head in heads]
    methods = ["plain"]
    for text in requested or (*names, *(POLICIES[1:] if names else ())):
        method = f"single:{text}" if text in names else text
        if text not in others:
            if requested and len(names) < 2 and method in POLICIES and method.startswith(("route", "merge")):
                raise InvalidField("methods", f"{text} needs at least two heads, there are {len(names)}")
            try:
                Policy.parse(method, names)
            except InvalidField as error:
                raise InvalidField("methods", str(error).partition(": ")[2]) from None
        methods.append(method)
    return tuple(dict.fromkeys(methods))


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt as ids; the benchmark is its file where there are several files, else its category."""

    ids: tuple[int, ...]
    benchmark: str = ""
    name: str = ""  # its place for people


def prompt_ids(options: Options, spec: StackSpec) -> list[tuple[int, ...]]:
    """The ids of the prompts that are asked. Raises InvalidField."""
    return [question.ids for question in read_questions(options, spec)[0]]


def read_questions(options: Options, spec: StackSpec) -> tuple[list[Question], list[Question]]:
    """Those that are asked, and those to warm up with.

    Those that do not fit into the context with their answers are left out, and named on stderr. Raises InvalidField for
    a target without a chat template, and for too few questions.
    """
    text = TargetText(spec.target)
    context = text.context(spec.settings().verifier.kv_tokens)
    if options.chat and not text.has_chat_template:
        raise InvalidField("chat", "this target has no chat template")
    asked, warming = list[Question](), list[Question]()
    files, count = options.prompts or (None,), options.n + options.warm_up
    for file in files:
        # Of files that are called alike, as gsm8k/question.jsonl, the folders tell them apart.
        name = "prompts" if file is None else file.stem if len(files) == 1 else f"{file.parent.name}/{file.stem}"
        fit: list[Question] = []
        for question in _questions(file, name, options, text):
            if len(fit) == count:
                break
            if (tokens := len(question.ids) + options.max_new_tokens) <= context.tokens:
                fit.append(question)
            else:
                print(f"coppice: left out, {question.name}: {tokens} tokens of {context}", file=sys.stderr)
        if len(fit) < (count if options.warm_up else 1):
            needed = f"{options.n} and {options.warm_up} to warm up with" if options.warm_up else "any"
            prompts = read_prompts(file) if file else demo_prompts()
            there = sorted({prompt.category for prompt in prompts if prompt.category})
            among = f"; categories there: {', '.join(there)}" if options.category else ""
            reason = f"{len(fit)} in {name} fit the category and the context, too few for {needed}{among}"
            raise InvalidField("prompts", reason)
        asked += fit[: options.n]
        warming += fit[options.n :]
    return asked, warming


def _questions(file: Path | None, name: str, options: Options, text: TargetText) -> Iterator[Question]:
    """A file's questions in order, or of Coppice's own as many as are wanted."""
    categories = options.category or ()
    for prompt in read_prompts(file) if file else own_prompts(text, options.n + options.warm_up, categories):
        if categories and prompt.category not in categories:
            continue
        benchmark = name if len(options.prompts or ()) > 1 else prompt.category or name
        ids = prompt.prompt if isinstance(prompt.prompt, tuple) else text.encode(prompt.prompt, options.chat)
        yield Question(ids, benchmark, prompt.name)


def own_prompts(text: TargetText | ModelDescription, count: int, categories: Sequence[str] = ()) -> list[FilePrompt]:
    """`count` of Coppice's own prompts, of all categories in turn; random ids for a target without a tokenizer."""
    if text.has_tokenizer:
        by_category: dict[str, list[FilePrompt]] = {}
        for prompt in demo_prompts():
            if not categories or prompt.category in categories:
                by_category.setdefault(prompt.category, []).append(prompt)
        return [prompt for turn in zip_longest(*by_category.values()) for prompt in turn if prompt is not None][:count]
    rng = random.Random(0)  # noqa: S311
    return [
        FilePrompt(tuple(rng.randrange(text.vocab_size) for _ in range(8 + 5 * number)), where=f"random {number + 1}")
        for number in range(count)
    ]
