"""Methods of `coppice bench run`: policies of the server, its heads by name, and transformers' own ways."""

from __future__ import annotations

from collections.abc import Sequence

from coppice.bench.report import HF_GENERATE
from coppice.bench.run.peers import HF_ASSISTED, PEERS
from coppice.errors import InvalidField
from coppice.speculation.policy import POLICIES, Policy
from coppice.stack.spec import HeadSpec


def read_methods(wanted: Sequence[str], heads: Sequence[HeadSpec], sessions: Sequence[int]) -> tuple[str, ...]:
    """The methods to run, plain first; each of `wanted` may hold several with commas between.

    Without any: all heads, route and merge if there are several, and transformers' `generate`. Raises InvalidField for
    what this stack cannot run.
    """
    names = [head.name for head in heads]
    listed = [name for text in wanted for name in text.split(",")]
    if not listed:
        listed = [*names, *(["route", "merge"] if len(names) > 1 else []), *([HF_GENERATE] if 1 in sessions else [])]
    methods = tuple(dict.fromkeys(parse(text, names) for text in ("plain", *listed)))
    for method in methods:
        if method in PEERS and 1 not in sessions:
            raise InvalidField("methods", f"{method} answers one prompt at a time, not {sessions[0]} sessions")
        if method == HF_ASSISTED and not any(head.kind == "lm" for head in heads):
            raise InvalidField("methods", f"{HF_ASSISTED} needs a head of kind lm to draft with")
    return methods


def parse(text: str, heads: Sequence[str]) -> str:
    """A peer's name, or a policy of a stack with these heads; HEAD is short for single:HEAD. Raises InvalidField."""
    if text in PEERS:
        return text
    policy = f"single:{text}" if text in heads else text
    if policy.partition(":")[0] in POLICIES and policy.startswith(("route", "merge")) and len(heads) < 2:
        raise InvalidField("methods", f"{text} needs at least two heads, there are {len(heads)}")
    try:
        Policy.parse(policy, heads)
    except InvalidField as error:
        raise InvalidField("methods", f"{text!r}: {str(error).partition(': ')[2]}") from None
    return policy
