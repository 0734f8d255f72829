"""How a method looks: the same in every picture, and told apart by colour-blind readers and in grey."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

BLACK, GREY, SAND, OLIVE, WINE = "#000000", "#7F7F7F", "#B8A05A", "#999933", "#882255"
ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"
"""Okabe and Ito's colours, and some of Paul Tol's that differ from them."""

FAMILIES = {
    "plain": GREY,
    "hf": SAND,
    "bigram": OLIVE,
    "lookup": SKY,
    "lm": GREEN,
    "dflash": "#666633",
    "jetspec": "#225522",
    "dspark": "#332288",
    "eagle3": ORANGE,
    "specblock": BLUE,
    "route": VERMILION,
    "merge": "#AA4499",
    "auto": BLACK,
    # what updates a head
    "never": GREY,
    "always": PURPLE,
    "head": ORANGE,
    "full": BLUE,
    "bandit": BLACK,
}
UNKNOWN = (GREEN, VERMILION, SKY, WINE, ORANGE, BLUE)
LINES, MARKERS = ("-", "--", ":", "-."), ("o", "s", "^", "D")


class Look(NamedTuple):
    """A colour, and what tells methods of one colour apart."""

    colour: str
    line: str
    marker: str

    @property
    def drawn(self) -> dict[str, Any]:
        """The options of a line with markers."""
        return {"color": self.colour, "linestyle": self.line, "marker": self.marker}


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Give each method the colour of its family, such as of `specblock` for `specblock-code`.

    Unknown families have colours that no family of these names has. The second method of a colour has another line and
    another marker than the first.
    """
    families = {name: re.split("[^a-z0-9]", name, maxsplit=1)[0] for name in names}
    taken = {FAMILIES[family] for family in families.values() if family in FAMILIES}
    free = itertools.cycle([colour for colour in UNKNOWN if colour not in taken] or UNKNOWN)
    found: dict[str, Look] = {}
    others: dict[str, str] = {}
    for name, family in families.items():
        if family not in FAMILIES and family not in others:
            others[family] = next(free)
        colour = FAMILIES.get(family) or others[family]
        before = sum(look.colour == colour for look in found.values())
        found[name] = Look(colour, LINES[before % len(LINES)], MARKERS[before % len(MARKERS)])
    return found
