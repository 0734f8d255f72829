"""`coppice generate` and `coppice chat`: answers as they come, and a line of figures behind each."""

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree
from typer import Argument, Option

from coppice.client.client import Client
from coppice.client.completion import Accumulator, Completion
from coppice.client.request import MEANINGS, Options
from coppice.commands.options import names
from coppice.errors import InvalidField
from coppice.prompts import FilePrompt, read_prompts
from coppice.wire.generation import Chunk, StepTree

Address = Annotated[str | None, Option(help="HOST:PORT; default COPPICE_ADDRESS, else 127.0.0.1:50051.")]
Policy = Annotated[str, Option(help="plain, single:HEAD, route, merge, auto, ...; default: the server's.")]
Temperature = Annotated[float, Option(help="0 is greedy.")]
Seed = Annotated[int | None, Option(help="Seed of the draws; default: one is drawn.")]
MaxNewTokens = Annotated[int, Option(help="0: the server's default.")]
QUIT = "/quit"


def generate(
    context: typer.Context,
    prompt: Annotated[str | None, Argument(help="What to continue.")] = None,
    ids: Annotated[str | None, Option(help="Token ids instead, such as 1,2,3.")] = None,
    prompt_file: Annotated[
        Path | None, Option(help="A file instead, a prompt a line if it is .jsonl or .txt. All turns are asked.")
    ] = None,
    prediction_file: Annotated[
        Path | None, Option(help="A file of what the answer is expected to be: a look-up head drafts from it.")
    ] = None,
    skip_long: Annotated[bool, Option("--skip-long", help="Leave out prompts that do not fit the context.")] = False,
    address: Address = None,
    chat: Annotated[bool, Option("--chat", help="Send the prompt as a user's message.")] = False,
    policy: Policy = "",
    budget: Annotated[int | None, Option(help="Draft nodes verified a step.")] = None,
    temperature: Temperature = 0.0,
    top_p: Annotated[float, Option(help="Nucleus mass.")] = 1.0,
    top_k: Annotated[int, Option(help="Most probable ids kept; 0 keeps all.")] = 0,
    min_p: Annotated[float, Option(help="Least share of the best id's probability.")] = 0.0,
    repetition_penalty: Annotated[float | None, Option(help="1 is none; default: the target's.")] = None,
    frequency_penalty: Annotated[float, Option(help="For each time an id was generated.")] = 0.0,
    presence_penalty: Annotated[float, Option(help="For ids that were generated.")] = 0.0,
    logit_bias: Annotated[list[str] | None, names("Added to an id's logit.", metavar="ID=BIAS,...")] = None,
    seed: Seed = None,
    max_new_tokens: MaxNewTokens = 0,
    stop: Annotated[list[str] | None, Option(help="Text that ends the answer (repeatable).")] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object instead of text.")] = False,
    show_tree: Annotated[bool, Option("--show-tree", help="Then draw the draft tree that accepted most.")] = False,
) -> None:
    """Answer a prompt, streaming the text."""
    prompts = prompts_of(prompt, ids, prompt_file)
    prediction = read_text(prediction_file, "--prediction-file") if prediction_file else ""
    bias = _read_bias(logit_bias or ())
    options = _options(context, logit_bias=bias, stop=stop or (), trees=show_tree, prediction=prediction)
    with Client(address) as client:
        for each in prompts:
            conversation: Any = each.prompt
            if chat and isinstance(conversation, str):
                conversation = [_said("user", conversation)]
            try:
                for question in (*each.later, None):
                    completion = print_answer(client, conversation, options, Accumulator(), as_json)
                    if completion.trees and not as_json:
                        print_tree(completion.trees, Console())
                    if question is not None and isinstance(conversation, str):  # paragraphs take turns
                        conversation += f"{completion.text}\n\n{question}\n"
                    elif question is not None:
                        conversation = [*conversation, _said("assistant", completion.text), _said("user", question)]
            except InvalidField as error:
                if error.field != "prompt" or not prompt_file:
                    raise
                too_long = f"{each.name}: {str(error).partition(': ')[2]}"
                if not skip_long:
                    raise InvalidField("prompt-file", f"{too_long}; --skip-long goes on without it") from None
                print(f"coppice: left out: {too_long}", file=sys.stderr)


def chat(
    context: typer.Context,
    address: Address = None,
    policy: Policy = "",
    temperature: Temperature = 0.0,
    seed: Seed = None,
    max_new_tokens: MaxNewTokens = 0,
) -> None:
    """Talk with the target: it is told the whole conversation at each turn. /quit or Ctrl-D ends it."""
    messages: list[dict[str, str]] = []
    with Client(address) as client:
        if not client.describe().has_chat_template:
            raise InvalidField("chat", "this target has no chat template")
        for line in _lines():
            answer = Accumulator()
            try:
                with contextlib.suppress(KeyboardInterrupt):  # what there is of an answer stays in the conversation
                    print_answer(client, [*messages, _said("user", line)], _options(context), answer)
            except InvalidField as error:
                if error.field != "prompt":
                    raise
                print(f"coppice: {error}", file=sys.stderr)  # such as one turn too many for the context
            else:
                messages += [_said("user", line), _said("assistant", answer.completion().text)]


def _options(context: typer.Context, **others: Any) -> Options:
    """What a command was given of a request's options, which have the same names, and others."""
    return cast(Options, {name: given for name, given in context.params.items() if name in MEANINGS} | others)


def prompts_of(prompt: str | None, ids: str | None, file: Path | None) -> list[FilePrompt]:
    """The prompts of the options, of which exactly one is given. Raises BadParameter."""
    if sum(source is not None for source in (prompt, ids, file)) != 1:
        raise typer.BadParameter("give exactly one of PROMPT, --ids and --prompt-file", param_hint="PROMPT")
    if prompt is not None:
        return [FilePrompt(prompt)]
    if file:
        is_list = file.suffix in (".jsonl", ".txt")
        return read_prompts(file) if is_list else [FilePrompt(read_text(file, "--prompt-file"), where=str(file))]
    try:
        return [FilePrompt(tuple(int(token) for token in (ids or "").split(",")))]
    except ValueError:
        raise typer.BadParameter(f"{ids!r} is not ids with commas between", param_hint="--ids") from None


def read_text(file: Path, option: str) -> str:
    """The text of the file that an option names. Raises BadParameter."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _read_bias(pairs: Iterable[str]) -> dict[int, float]:
    """ID=BIAS each."""
    try:
        return {int(token): float(bias) for token, _, bias in (pair.partition("=") for pair in pairs)}
    except ValueError:
        raise typer.BadParameter("is not ID=BIAS", param_hint="--logit-bias") from None


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def print_answer(
    client: Client, prompt: Any, options: Options, answer: Accumulator, as_json: bool = False
) -> Completion:
    """Print an answer as it comes and, on a terminal, its figures; or its JSON. `answer` survives Ctrl-C."""
    try:
        for event in client.stream(prompt, **options):
            answer.add(event)
            if isinstance(event, Chunk) and not as_json:
                print(event.text, end="", flush=True)
    finally:
        completion = answer.completion()
        if as_json and completion.policy:  # else the call failed before it began
            print(json.dumps(completion.to_json()))
        elif not as_json and completion.ids:
            # A target without a tokenizer answers in ids only.
            print("" if completion.text else ",".join(map(str, completion.ids)))
            console = Console(stderr=True)
            if console.is_terminal:
                console.print(completion.summary, style="dim", highlight=False)
    return completion


def _lines() -> Iterator[str]:
    """What people type until /quit, empty lines left out."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() then knows the arrow keys
    terminal = sys.stdin.isatty()
    if terminal:
        print(f"{QUIT} or Ctrl-D ends it", file=sys.stderr)
    try:
        while (line := input("> " if terminal else "").strip()) != QUIT:
            if line:
                yield line
    except (EOFError, KeyboardInterrupt):
        if terminal:
            print()


TERMINAL_COLOURS = ("green", "blue", "magenta", "cyan", "yellow")
WIDEST_LABEL = 14


def _label(tree: StepTree, node: int) -> str:
    """The text of a node, or of the root, as it can be shown on one line; its id if it has none."""
    piece, token = (tree.pieces[node - 1], tree.tokens[node - 1]) if node else (tree.root_piece, tree.root)
    shown = repr(piece)[1:-1].replace(" ", "␣") if piece else str(token)
    return shown if len(shown) <= WIDEST_LABEL else f"{shown[: WIDEST_LABEL - 1]}…"


def print_tree(trees: Sequence[StepTree], console: Console) -> None:
    """Print the tree that accepted most (SpecBlock, figure 7), coloured by forward; what the verifier cut is struck."""
    tree = max(trees, key=lambda tree: len(tree.accepted))
    accepted, cut, forwards = set(tree.accepted), set(tree.cut), sorted(set(tree.forwards))
    colours = dict(zip(forwards, cycle(TERMINAL_COLOURS), strict=False))

    def add(branch: Tree, node: int) -> None:
        children = [child for child, parent in enumerate(tree.parents, 1) if parent == node]
        for child in sorted(children, key=lambda child: -tree.log_probs[child - 1]):  # the likeliest first
            taken, colour = child in accepted, colours[tree.forwards[child - 1]]
            text = Text(_label(tree, child), style=f"{'bold ' * taken}{'strike ' * (child in cut)}{colour}")
            add(branch.add(text.append(" ✓" if taken else "")), child)

    root = Tree(Text(_label(tree, 0), style="red"))
    add(root, 0)
    console.print(root)
    key = Text("forward ")
    for forward in forwards:
        key.append(f"{forward} ", style=colours[forward])
    left_out = f", {len(tree.cut)} left out" if tree.cut else ""
    console.print(key.append(f"· {len(tree.tokens)} nodes, {len(tree.accepted)} accepted ✓{left_out}"))
