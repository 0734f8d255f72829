"""Acceptance by depth, without weights: what `coppice bench synthetic` assumes of a head, and what it commits then.

alpha_k is the chance that a step accepts a draft at depth k when it accepted those above it. A step then commits
tau = 1 + alpha_1 + alpha_1 alpha_2 + ... tokens, the root counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coppice.errors import InvalidField

_HALVINGS = 60


@dataclass(frozen=True, slots=True)
class Published:
    """What a paper says of one head: tau, the mean of SpecBlock's table 1 over its benchmarks; the deepest draft; and
    alpha of the deepest where it is known (SpecBlock, figure 5a and appendix C, of greedy chains)."""

    tau: float
    depth: int
    last: float | None = None

    def alphas(self) -> tuple[float, ...]:
        """Rates that give this tau: falling in a straight line to the last one, as figure 5a does, else all equal.

        Only the last point of the curve is printed as a number; the first comes out of tau (0.90 for Llama-3.1-8B,
        0.83 for Qwen3-8B, "above 0.80" in the paper) and tells of the whole tree, not of its greedy chain.
        """
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if expected_tau(self._line(middle)) < self.tau else (low, middle)
        return self._line(low)

    def _line(self, first: float) -> tuple[float, ...]:
        return tuple(np.linspace(first, first if self.last is None else self.last, self.depth).tolist())


# SpecBlock: K = 4 slots in M = 2 blocks. EAGLE-3: seven forwards. T = 1 has no figure of rates by depth.
PROFILES: dict[str, dict[str, Published]] = {
    "llama-3.1-8b": {"specblock": Published(4.41, 8, 0.544), "eagle3": Published(5.89, 7)},
    "llama-3.1-8b-t1": {"specblock": Published(3.73, 8), "eagle3": Published(4.67, 7)},
    "qwen3-8b": {"specblock": Published(3.47, 8, 0.369), "eagle3": Published(4.14, 7)},
    "qwen3-8b-t1": {"specblock": Published(3.37, 8), "eagle3": Published(3.98, 7)},
}
"""by target of SpecBlock's table 1, temperature 0 unless the name says 1"""


def read_profile(text: str, kinds: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """The rates of each kind of head: of a preset, or the same ones for all, such as 0.8,0.6. Raises InvalidField."""
    if text in PROFILES:
        for kind in kinds:
            if kind not in PROFILES[text]:
                raise InvalidField("profile", f"{text} says nothing of {kind} heads: give rates, such as 0.8,0.6")
        return {kind: PROFILES[text][kind].alphas() for kind in kinds}
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
