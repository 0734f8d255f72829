"""`coppice generate`: answers as they come, and a line of figures behind each."""

import json
from collections.abc import Iterable, Sequence
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


def generate(
    context: typer.Context,
    prompt: Annotated[str | None, Argument(help="What to continue.")] = None,
    ids: Annotated[str | None, Option(help="Token ids instead, such as 1,2,3.")] = None,
    prompt_file: Annotated[Path | None, Option(help="A file instead, a prompt a line if it is .jsonl or .txt.")] = None,
    prediction_file: Annotated[
        Path | None, Option(help="A file of what the answer is expected to be: a look-up head drafts from it.")
    ] = None,
    address: Address = None,
    chat: Annotated[bool, Option("--chat", help="Send the prompt as a user's message.")] = False,
    policy: Annotated[str, Option(help="plain, single:HEAD, route, merge, auto, ...; default: the server's.")] = "",
    budget: Annotated[int | None, Option(help="Draft nodes verified a step.")] = None,
    temperature: Annotated[float, Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, Option(help="Nucleus mass.")] = 1.0,
    top_k: Annotated[int, Option(help="Most probable ids kept; 0 keeps all.")] = 0,
    min_p: Annotated[float, Option(help="Least share of the best id's probability.")] = 0.0,
    repetition_penalty: Annotated[float | None, Option(help="1 is none; default: the target's.")] = None,
    frequency_penalty: Annotated[float, Option(help="For each time an id was generated.")] = 0.0,
    presence_penalty: Annotated[float, Option(help="For ids that were generated.")] = 0.0,
    logit_bias: Annotated[list[str] | None, names("Added to an id's logit.", metavar="ID=BIAS,...")] = None,
    seed: Annotated[int | None, Option(help="Seed of the draws; default: one is drawn.")] = None,
    max_new_tokens: Annotated[int, Option(help="0: the server's default.")] = 0,
    stop: Annotated[list[str] | None, Option(help="Text that ends the answer (repeatable).")] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object instead of text.")] = False,
    show_tree: Annotated[bool, Option("--show-tree", help="Then draw the draft tree that accepted most.")] = False,
) -> None:
    """Answer a prompt, streaming the text."""
    prompts = prompts_of(prompt, ids, prompt_file)
    prediction = read_text(prediction_file, "--prediction-file") if prediction_file else ""
    bias = _read_bias(logit_bias or ())
    others = {"logit_bias": bias, "stop": stop or (), "trees": show_tree, "prediction": prediction}
    given = {name: value for name, value in context.params.items() if name in MEANINGS}
    options = cast(Options, given | others)
    with Client(address) as client:
        for each in prompts:
            is_chat = chat and isinstance(each.prompt, str)
            asked: Any = [{"role": "user", "content": each.prompt}] if is_chat else each.prompt
            try:
                completion = print_answer(client, asked, options, as_json)
            except InvalidField as error:
                if error.field != "prompt" or not prompt_file:
                    raise
                raise InvalidField("prompt-file", f"{each.name}: {str(error).partition(': ')[2]}") from None
            if completion.trees and not as_json:
                print_tree(completion.trees, Console())


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


def print_answer(client: Client, prompt: Any, options: Options, as_json: bool) -> Completion:
    """Print an answer as it comes and, on a terminal, its figures; or its JSON: what there is of it on Ctrl-C."""
    answer = Accumulator()
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
