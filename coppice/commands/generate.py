"""The options of `coppice generate`, `chat` and `doctor`. What they do is imported when they are called."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coppice.commands.options import names

if TYPE_CHECKING:
    from coppice.client.client import Options
    from coppice.client.completion import Completion

Address = Annotated[str | None, typer.Option(help="HOST:PORT; default COPPICE_ADDRESS, else 127.0.0.1:50051.")]
Policy = Annotated[str, typer.Option(help="plain, single:HEAD, route, merge, auto, ...; default: the server's.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the draws; default: one is drawn, which --json shows.")]
MaxNewTokens = Annotated[int, typer.Option(help="0: the server's default.")]


def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to continue.")] = None,
    ids: Annotated[str | None, typer.Option(help="Token ids instead, such as 1,2,3.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="A file instead: .jsonl and .txt hold a prompt a line, others are one prompt. All turns are asked."
        ),
    ] = None,
    prediction_file: Annotated[
        Path | None, typer.Option(help="A file of what the answer is expected to be: a look-up head drafts from it.")
    ] = None,
    skip_long: Annotated[
        bool, typer.Option("--skip-long", help="Leave out a file's prompts that the server's context has no room for.")
    ] = False,
    address: Address = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message.")] = False,
    policy: Policy = "",
    budget: Annotated[int | None, typer.Option(help="Draft nodes verified a step.")] = None,
    temperature: Temperature = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Most probable ids kept; 0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least share of the best id's probability.")] = 0.0,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 is none; default: the target's.")] = None,
    frequency_penalty: Annotated[float, typer.Option(help="For each time an id was generated.")] = 0.0,
    presence_penalty: Annotated[float, typer.Option(help="For ids that were generated.")] = 0.0,
    logit_bias: Annotated[list[str] | None, names("Added to an id's logit.", metavar="ID=BIAS,...")] = None,
    seed: Seed = None,
    max_new_tokens: MaxNewTokens = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer (repeatable).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    show_tree: Annotated[
        bool, typer.Option("--show-tree", help="Then draw the draft tree of the step that accepted most.")
    ] = False,
) -> None:
    """Answer a prompt, streaming the text."""
    from coppice.client.client import Client
    from coppice.commands.answers import answers_of, fitting, prompts_of, read_text

    prompts = prompts_of(prompt, ids, prompt_file)
    options: Options = {
        "policy": policy,
        "budget": budget,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "logit_bias": _read_bias(logit_bias or ()),
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "stop": stop or (),
        "trees": show_tree,
        "prediction": read_text(prediction_file, "--prediction-file") if prediction_file else "",
    }
    with Client(address) as client:
        if prompt_file:
            prompts = fitting(client, prompts, chat, max_new_tokens, skip_long)
        for one in prompts:
            for answer in answers_of(client, one, chat, options, as_json):
                if answer.trees and not as_json:
                    _show_tree(answer)


def chat(
    address: Address = None,
    policy: Policy = "",
    temperature: Temperature = 0.0,
    seed: Seed = None,
    max_new_tokens: MaxNewTokens = 0,
) -> None:
    """Talk with the target: it is told the whole conversation at each turn. /quit or Ctrl-D ends it."""
    from coppice.client.client import Client
    from coppice.commands.answers import talk

    options: Options = {"policy": policy, "temperature": temperature, "seed": seed, "max_new_tokens": max_new_tokens}
    with Client(address) as client:
        talk(client, options)


def doctor(
    address: Address = None,
    target: Annotated[
        Path | None, typer.Option(help="A model's folder: does it fit the device that the settings name?")
    ] = None,
) -> None:
    """Look for what is needed here, and for a server."""
    from rich.console import Console

    from coppice.commands.doctor import doctor as look

    raise typer.Exit(0 if look(Console(), address, target) else 1)


def _read_bias(pairs: Iterable[str]) -> dict[int, float]:
    """ID=BIAS each."""
    try:
        return {int(token): float(bias) for token, _, bias in (pair.partition("=") for pair in pairs)}
    except ValueError:
        raise typer.BadParameter("is not ID=BIAS", param_hint="--logit-bias") from None


def _show_tree(answer: "Completion") -> None:
    """The tree of the step that accepted most."""
    from rich.console import Console

    from coppice.commands.tree_view import longest, show

    show(longest(answer.trees), Console())
