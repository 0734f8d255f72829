"""A picture of median steps: a lane for each event loop and each model's thread."""

from __future__ import annotations

from pathlib import Path

from lab.timeline import Part

LANES = ("orchestrator", "drafter", "head", "wire", "verifier", "target")
"""event loops, the threads of the models, and what lies between the processes"""


def draw(steps: dict[str, list[Part]], file: Path) -> None:
    """Draw a median step of each method into a file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from coppice.pictures.style import BLUE, GREEN, GREY, ORANGE

    colours = {
        "orchestrator": BLUE,
        "drafter": GREEN,
        "head": GREEN,
        "verifier": ORANGE,
        "target": ORANGE,
        "wire": GREY,
    }
    with rc_context({"font.size": 8, "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 1.7 * len(steps) + 0.4), layout="constrained")
        all_axes = figure.subplots(len(steps), 1, squeeze=False, sharex=True)[:, 0]
        for axes, (method, parts) in zip(all_axes, steps.items(), strict=True):
            lanes = [lane for lane in LANES if any(part.lane == lane for part in parts)]
            for part in parts:
                at, width = lanes.index(part.lane), part.ended - part.began
                model = part.name == "forward"
                axes.barh(
                    at, width, left=part.began, color=colours[part.lane], alpha=0.35 if model else 1.0, height=0.8
                )
                if width > 0.06 * parts[-1].ended:
                    axes.text(part.began + width / 2, at, part.name, ha="center", va="center", fontsize=6)
            axes.set_yticks(range(len(lanes)), lanes)
            axes.invert_yaxis()
            axes.set_title(f"{method}: {parts[-1].ended:.1f} ms", loc="left", fontsize=8)
            axes.spines[["top", "right"]].set_visible(False)
        all_axes[-1].set_xlabel("ms since the step began")
        figure.savefig(file)
