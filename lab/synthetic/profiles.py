"""Acceptance by depth, without weights: what `coppice bench synthetic` assumes of a head, and what it commits then.

alpha_k is the chance that a step accepts a draft at depth k when it accepted those above it. A step then commits
tau = 1 + alpha_1 + alpha_1 alpha_2 + ... tokens, the root counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coppice.errors import InvalidField

# Each gives the mean tau of SpecBlock's table 1 over its benchmarks. SpecBlock drafts K = 4 slots in M = 2 blocks,
# EAGLE-3 makes seven forwards. Where the deepest rate is known (figure 5a and appendix C, greedy chains at T = 0),
# rates fall to it in a straight line, as in the figure; else all are equal. The first one follows from tau, and tells
# of the whole tree, not of its greedy chain: the paper has it "above 0.80".
PROFILES: dict[str, dict[str, tuple[float, float, int]]] = {
    "llama-3.1-8b": {"specblock": (0.8967, 0.544, 8), "eagle3": (0.9102, 0.9102, 7)},
    "llama-3.1-8b-t1": {"specblock": (0.7527, 0.7527, 8), "eagle3": (0.8379, 0.8379, 7)},
    "qwen3-8b": {"specblock": (0.8296, 0.369, 8), "eagle3": (0.7983, 0.7983, 7)},
    "qwen3-8b-t1": {"specblock": (0.7184, 0.7184, 8), "eagle3": (0.785, 0.785, 7)},
}
"""the first rate, the last one and the depth, by target of table 1 and kind; temperature 0 unless the name says 1"""


def read_profile(text: str, kinds: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """The rates of each kind of head: of a preset, or the same ones for all, such as 0.8,0.6. Raises InvalidField."""
    if text in PROFILES:
        for kind in kinds:
            if kind not in PROFILES[text]:
                raise InvalidField("profile", f"{text} says nothing of {kind} heads: give rates, such as 0.8,0.6")
        return {kind: tuple(np.linspace(*PROFILES[text][kind]).tolist()) for kind in kinds}
    try:
        rates = tuple(map(float, text.split(",")))
    except ValueError:
        raise InvalidField("profile", f"{text!r} is neither rates nor one of {', '.join(PROFILES)}") from None
    if not all(0 <= rate <= 1 for rate in rates):
        raise InvalidField("profile", f"a rate of {text!r} is not between 0 and 1")
    return dict.fromkeys(kinds, rates)


def expected_tau(alphas: Sequence[float]) -> float:
    """Mean tokens a step, the root counted."""
    return 1 + float(np.cumprod(alphas).sum())
