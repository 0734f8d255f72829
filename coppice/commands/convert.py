"""`coppice convert`: checkpoints from one layout to another."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Convert checkpoints between layouts.", no_args_is_help=True, add_completion=False)

HEAD_LAYOUTS = ("specblock", "eagle3", "speculators", "dflash", "jetspec", "dspark")
LAYOUTS = f"{', '.join(HEAD_LAYOUTS[:-1])} or {HEAD_LAYOUTS[-1]}"


@app.callback()
def _group() -> None:
    pass


@app.command("head")
def convert_head(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Folder with config.json and model.safetensors.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    from_layout: Annotated[str, typer.Option("--from", metavar="LAYOUT", help=LAYOUTS)],
    to_layout: Annotated[str, typer.Option("--to", metavar="LAYOUT", help=LAYOUTS)],
) -> None:
    """Rewrite a draft head in another public layout; every key and shape is checked."""
    from coppice.errors import InvalidField
    from coppice.heads import checkpoints

    for option, layout in (("--from", from_layout), ("--to", to_layout)):
        if layout not in HEAD_LAYOUTS:
            raise typer.BadParameter(f"{layout!r} is not {LAYOUTS}", param_hint=option)
    layout = checkpoints.layout_of(source)
    if layout != from_layout:
        raise InvalidField("from", f"{source} is in the layout {layout}")
    checkpoints.convert(source, out, to_layout)
    print(f"wrote {out} ({to_layout})")
