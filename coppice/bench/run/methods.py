"""Methods of `coppice bench run`: how one is written, and what it asks of a stack.

    METHOD = PEER | POLICY | HEAD[+SUFFIX]... | single:HEAD[+SUFFIX]...

A peer is one of transformers' own ways. Of the policies `route:A/B` and its like name the heads that draft. Suffixes
are those of SUFFIXES; `+uncoupled` also stands behind policies of several heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coppice.bench.adapt.adapt import BANDIT, DEMO_FLAGS, spec_for
from coppice.bench.report import HF_GENERATE
from coppice.bench.run.peers import HF_ASSISTED, PEERS
from coppice.errors import InvalidField
from coppice.speculation.policy import POLICIES, Policy
from coppice.stack.spec import HeadSpec, StackSpec

SUFFIXES = {
    "pq": "a chain sampled from the head, judged by p/q rejection (nanoGPT, speculative sampling)",
    "chain": "one branch instead of a tree",
    "uncoupled": "drafting without the target's noise at T > 0",
    "osd": "an adapter that trains the whole head after every query with a miss (online speculative decoding)",
    "adapt": "an adapter that a cost-aware bandit steers",
}
CHAIN = ("drafter.chain", True)
"""what the drafters of a `+chain` head are told"""
_ADAPTING = {"osd": "always", "adapt": BANDIT}
_ALONE = ("pq", *_ADAPTING)  # with no other suffix: a sampled chain is a chain that uses no noise of the target


@dataclass(frozen=True, slots=True)
class Method:
    """One method. `name` is what reports call it; `policy` what the server is asked for, empty for a peer."""

    name: str
    policy: str = ""
    suffixes: tuple[str, ...] = ()

    @property
    def peer(self) -> bool:
        """Whether transformers answers, not Coppice."""
        return not self.policy

    @property
    def head(self) -> str:
        """The head of a single one's policy, empty for others."""
        return self.policy.removeprefix("single:") if self.policy.startswith("single:") else ""

    @property
    def sampled_chain(self) -> bool:
        """Whether p/q rejection judges: its text has the right law, not plain decoding's ids."""
        return "pq" in self.suffixes

    @property
    def adaptation(self) -> str:
        """The adapter's policy; empty without one. Such a method has a stack of its own."""
        return next((_ADAPTING[suffix] for suffix in self.suffixes if suffix in _ADAPTING), "")

    @property
    def options(self) -> dict[str, Any]:
        """What else a request says."""
        return {"pq": self.sampled_chain, "coupled": "uncoupled" not in self.suffixes}


def read_methods(wanted: Sequence[str], heads: Sequence[HeadSpec], sessions: Sequence[int]) -> tuple[Method, ...]:
    """The methods to run, plain first; each of `wanted` may hold several with commas between.

    Without any: all heads, route and merge if there are several, and transformers' `generate`. Raises InvalidField for
    what this stack cannot run.
    """
    names = [head.name for head in heads]
    told = [name for text in wanted for name in text.split(",")]
    if not told:
        told = [*names, *(["route", "merge"] if len(names) > 1 else []), *([HF_GENERATE] if 1 in sessions else [])]
    methods = list(dict.fromkeys(parse(text, names) for text in ("plain", *told)))
    for method in methods:
        if method.peer and 1 not in sessions:
            raise InvalidField("methods", f"{method.name} answers one prompt at a time, not {sessions[0]} sessions")
        if method.name == HF_ASSISTED and not any(head.kind == "lm" for head in heads):
            raise InvalidField("methods", f"{HF_ASSISTED} needs a head of kind lm to draft with")
    if any("chain" in method.suffixes for method in methods):  # their heads are no part of what drafts together
        methods = [_naming(method, names) for method in methods]
    return tuple(methods)


def parse(text: str, heads: Sequence[str]) -> Method:
    """One method of a stack with these heads. Raises InvalidField naming the part that is wrong."""
    stem, *suffixes = text.split("+")
    for suffix in suffixes:
        if suffix not in SUFFIXES or suffixes.count(suffix) > 1:
            raise InvalidField("methods", f"{text!r}: +{suffix} is not one of {', '.join(SUFFIXES)}, each once")
    if stem in PEERS:
        _refuse(text, suffixes, f"{stem} takes no suffix")
        return Method(stem)
    policy = f"single:{stem}" if stem in heads else stem
    if policy.partition(":")[0] in POLICIES and policy.startswith(("route", "merge")) and len(heads) < 2:
        raise InvalidField("methods", f"{stem} needs at least two heads, there are {len(heads)}")
    try:
        Policy.parse(policy, heads)
    except InvalidField as error:
        raise InvalidField("methods", f"{text!r}: {str(error).partition(': ')[2]}") from None
    if policy == "plain":
        _refuse(text, suffixes, "plain drafts nothing")
    if not policy.startswith("single:"):
        _refuse(text, [suffix for suffix in suffixes if suffix != "uncoupled"], "is for a single head")
    if len(suffixes) > 1:
        _refuse(text, [suffix for suffix in suffixes if suffix in _ALONE], "stands alone")
    name = "+".join((policy, *sorted(suffixes)))
    if "chain" in suffixes:
        policy = f"{policy}-chain"
    return Method(name, policy, tuple(sorted(suffixes)))


def _refuse(text: str, suffixes: Sequence[str], why: str) -> None:
    if suffixes:
        raise InvalidField("methods", f"{text!r}: +{suffixes[0]}: {why}")


def _naming(method: Method, heads: Sequence[str]) -> Method:
    """A policy of all heads as one of these."""
    if method.policy in POLICIES[1:]:
        return replace(method, policy=f"{method.policy}:{'/'.join(heads)}")
    return method


def main_spec(spec: StackSpec, methods: Sequence[Method]) -> StackSpec:
    """The stack that all methods share: beside its heads, those that draft chains and those that sample."""
    sampled = {method.head for method in methods if method.sampled_chain}
    chains = {method.head for method in methods if "chain" in method.suffixes}
    flags = (("drafter.vocab_size", _vocab_size(spec.target)),) if sampled else ()
    heads = [replace(head, flags=head.flags + flags) if head.name in sampled else head for head in spec.heads]
    for head in spec.heads:
        if (name := f"{head.name}-chain") in chains:
            heads.append(replace(head, name=name, flags=(*head.flags, CHAIN)))
    return replace(spec, heads=tuple(heads))


def lane_specs(spec: StackSpec, methods: Sequence[Method], budget: int) -> dict[str, StackSpec]:
    """By method the stack of those that adapt their head. Raises InvalidField for a head that cannot be trained."""
    by_name = {head.name: head for head in spec.heads}
    return {
        method.name: spec_for(method.adaptation, by_name[method.head], replace(spec, budget=budget), DEMO_FLAGS)
        for method in methods
        if method.adaptation
    }


def _vocab_size(target: Path) -> int:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target, local_files_only=True, trust_remote_code=False)
    return int(config.get_text_config().vocab_size)
