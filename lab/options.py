"""The options of `coppice bench`, each once: a command takes some of them, with defaults of its own."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer
from typer import Option

from coppice.commands.options import Heads, JsonFile, names, split, stack_spec
from coppice.errors import InvalidField
from coppice.limits import check_range
from coppice.speculation.policy import POLICIES, Policy
from coppice.stack.spec import SHIPPED_HEADS, HeadSpec, StackSpec

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
        names("llama.cpp's modes, such as ngram-simple or draft-eagle3:DIR; default: those of n-grams."),
    ] = None
    llama_cpp: Annotated[Path | None, Option(help="Where llama.cpp is built, once; default: in HF_HOME.")] = None
    budgets: Annotated[str, Option(help="Draft nodes verified a step, comma-separated; default: the server's.")] = ""
    budget: Annotated[int, Option(min=1, max=64, help="Draft nodes of every tree.")] = 31
    temperatures: Annotated[str, Option(help="Comma-separated.")] = "0,1"
    sessions: Annotated[str, Option(help="Prompts answered at once, comma-separated.")] = "1"
    t_m: Annotated[float, Option(min=0, help="Milliseconds of a forward of the target.")] = 6.0
    t_d: Annotated[float, Option(min=0, help="Milliseconds of a draft, or of a batch of them.")] = 2.0
    ids: Annotated[int, Option(min=1, help="Token ids of each line, at least.")] = 100_000
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
