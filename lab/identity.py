"""`coppice bench identity`: one SHA-256 of greedy and sampled ids for every way to decode, and all are plain's.

In float32 plain's text is compared with what transformers draws along it, so that a fault that all ways share is seen
too. In bfloat16, where rounding decides, and under a grammar verifiers are invariant, and all say plain's first text.
"""

import hashlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product, starmap
from threading import Event
from typing import Any

import numpy as np

from coppice.client.adapter import AdapterClient
from coppice.client.client import Client
from coppice.config.sections import ADAPTED_KINDS
from coppice.errors import CoppiceError
from coppice.machine import usable_cores
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import Stack
from coppice.stack.spec import StackSpec
from coppice.testing.reference import Reference
from coppice.training.progress import Progress
from lab.measuring import Bench, Check, Ids, running
from lab.options import Options

VERIFIERS = ORCHESTRATORS = 2
MARGIN = 2e-4
"""logits between the two best tokens of a row below which float32's rounding may decide; such answers are left out"""
SPARE = 1.2  # times as many answers are asked for as are wanted
QUICK = {"adapter.policy": "always", "adapter.interval": 4, "adapter.cpu_share": 1.0}
"""of an adapter that trains after every few queries"""
CUTS = {"server.failpoints": "link.cut=0.1"}
"""of a server that cuts each of its links every five seconds"""
KILLS, SYNCS = "kills and moves", "weight syncs"
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.95),
)
BUDGETS, SESSIONS = {"float32": (8, 60), "bfloat16": (0, 1, 8, 31)}, (8, 1)
_KILLED = ("drafter", "verifier", "orchestrator")
KILL_EVERY_S = 3.0
LEAST_HAPPENED, _HAPPENS_S = len(_KILLED), 600.0

Question = tuple[Ids, SamplingParams]
Heard = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to decode. A budget of None is the deployment's own; so many sessions are open on each verifier."""

    method: str
    budget: int | None = None
    sessions: int = 8
    during: str = ""  # what else happens

    def __str__(self) -> str:
        budget = "" if self.budget is None else f" B={self.budget}"
        return f"{self.method}{budget} sessions={self.sessions}" + (f", {self.during}" if self.during else "")


Line = dict[str, Any]
"""what a way said: its name, how many ids, their sha256, how often kills and weight syncs happened meanwhile, the
difference, where it first left what was expected, and how many ids were compared up to and with that one"""


def two_of_each(spec: StackSpec, invariant: bool) -> StackSpec:
    """The same stack with verifiers and orchestrators that take one another's place."""
    return replace(
        spec,
        verifiers=VERIFIERS,
        orchestrators=ORCHESTRATORS,
        verifier_threads=max(1, usable_cores() // VERIFIERS),
        drafter_threads=1,
        extra={"verifier": {"verifier.invariant": invariant}},
    )


def ways_of(methods: Sequence[str], dtype: str, learning: Sequence[str]) -> tuple[list[Way], list[Way]]:
    """Plain decoding, every method, budget and batch mix, and every method beside kills; then what is done once more
    where links are cut and, to the heads of the methods that are `learning`, new weights are pushed.
    """
    ways = [Way("plain", None, sessions) for sessions in SESSIONS]
    ways += starmap(Way, product(methods, BUDGETS[dtype], SESSIONS))
    ways += (Way(method, during=KILLS) for method in methods)
    more = f"{KILLS}, links cut", f"{KILLS}, links cut and {SYNCS}"
    return ways, [Way(method, during=more[method in learning]) for method in methods]


def questions(prompts: Sequence[Ids], count: int, seed: int = 1) -> list[Question]:
    """Parts of the prompts, each drawn in one of the SAMPLINGS with a seed of its own."""
    asked = []
    for number in range(count):
        turn, at = divmod(number, len(prompts))
        part = prompts[at][turn % 8 :][: 8 + (5 * turn + at) % 40] or prompts[at]
        asked.append((part, SAMPLINGS[(turn + at) % len(SAMPLINGS)].model_copy(update={"seed": seed + number})))
    return asked


def compare(way: str, expected: Sequence[Ids], answers: Sequence[Ids | str], happened: int = 0) -> Line:
    """The line of a way, with the hash of all answers, each behind its length; one that is text is its own error."""
    whole, compared = [ids for ids in answers if not isinstance(ids, str)], 0
    digest = hashlib.sha256(b"".join(np.array([len(ids), *ids], "<i8").tobytes() for ids in whole))
    line = {"way": way, "ids": sum(map(len, whole)), "sha256": digest.hexdigest(), "happened": happened}
    for number, (expected_ids, ids) in enumerate(zip(expected, answers, strict=True)):
        if isinstance(ids, str):
            return line | {"compared": compared + 1, "difference": f"prompt {number} failed: {ids}"}
        for position, (right, other) in enumerate(itertools.zip_longest(expected_ids, ids)):
            compared += 1
            if right != other:
                difference = f"prompt {number}, token {position}: {other} instead of {right}"
                return line | {"compared": compared, "difference": difference}
    return line | {"compared": 0, "difference": ""}


def drawn_by(reference: Reference, question: Question, ids: Ids | str) -> Ids | None:
    """What transformers draws along an answer; None where rounding may decide a token of it."""
    drawn, margin = ([], MARGIN) if isinstance(ids, str) else reference.redraw(question[0], ids, question[1])
    return tuple(drawn) if margin >= MARGIN else None


def ask(
    address: str, asked: Sequence[Question], way: Way, new_tokens: int, heard: Heard = int, regex: str = ""
) -> list[Ids | str]:
    """The answer to each question, or why it failed; `heard` is told how many ids came. regex: what answers match."""
    options: Any = {"policy": way.method, "budget": way.budget, "max_new_tokens": new_tokens}
    options |= {"structured_outputs": {"regex": regex}} if regex else {"ignore_eos": True}

    def answer(question: Question) -> Ids | str:
        try:
            completion = client.generate(question[0], sampling=question[1], **options)
        except CoppiceError as error:
            return f"{error.status}: {error}"[:200]
        heard(completion.new_tokens)
        return completion.ids

    with Client(address) as client, ThreadPoolExecutor(way.sessions * VERIFIERS) as pool:
        return list(pool.map(answer, asked))


@contextmanager
def meanwhile(stack: Stack, during: str) -> Iterator[Callable[[], int]]:
    """Kills, weight syncs or both as long as this is open; gives how often each has happened at least."""
    done, killed = Event(), list[str]()
    adapting = AdapterClient(stack.services["adapter"].address) if SYNCS in during else nullcontext()
    with adapting as adapter, ThreadPoolExecutor(1) as pool:
        killing = pool.submit(_kill, stack, done, killed) if KILLS in during else None

        def happened() -> int:
            counts = [len(killed)] if killing else []
            if adapter:
                counts.append(sum(head.version for head in adapter.status()))
            return min(counts, default=0)

        try:
            yield happened
        finally:
            done.set()
            if killing:
                killing.result()


def _kill(stack: Stack, done: Event, killed: list[str]) -> None:
    by_role = [[name for name, service in stack.services.items() if service.role == role] for role in _KILLED]
    for turn in itertools.count():
        for names in filter(None, by_role):
            if done.wait(KILL_EVERY_S):
                return
            name = names[turn % len(names)]
            if turn // len(names) % 2 == 0:  # else it is told to end, and hands its sessions over
                os.kill(stack.services[name].pid, signal.SIGKILL)
            stack.restart(name)
            killed.append(name)


def run_identity(bench: Bench, asked: Sequence[Question], count: int, methods: Sequence[str]) -> None:
    """Report a line for every way as it ends, and check that all are equal, long enough, and what was to happen did."""
    spec, report, options = bench.stack.spec, bench.report, bench.options
    fixed = [f"single:{head.name}" for head in spec.heads if head.kind not in ADAPTED_KINDS]
    learning = [method for method in methods if len(fixed) < len(spec.heads) and method not in fixed]
    ways, rough = ways_of(methods, report.dtype, learning)
    with Progress("ids", (1 + len(ways) + len(rough)) * count * options.max_new_tokens) as progress:

        def add(line: Line) -> None:
            report.rows.append(line)
            times = f"{line['happened']} times" if line["happened"] else ""
            note = f"FAILED {line['difference']}" if line["difference"] else times
            progress.print(f"{line['sha256']}  {line['ids']} ids  {line['way']}  {note}".rstrip())

        def run(stack: Stack, some: Sequence[Way]) -> None:
            for way in some:
                progress.say(str(way))
                add(repeated(stack, way, chosen, expected, options, progress.add))

        chosen, expected, line = first(bench, asked, count, progress.add)
        add(line)
        run(bench.stack, ways)
        extra = {role: {**spec.extra.get(role, {}), **CUTS} for role in ("verifier", "drafter")}
        with running(replace(spec, adapt=bool(learning), extra=extra | {"adapter": QUICK}), report) as cut:
            run(cut, rough)
    differ = [f"{line['way']}: {line['difference']}" for line in report.rows if line["difference"]]
    report.checks.append(Check("ways that differ", len(differ), "0", not differ, "; ".join(differ[:3])))
    least, bound = min(line["ids"] for line in report.rows), bench.options.ids
    report.checks.append(Check("ids of a line", least, f">= {bound}", least >= bound, weak=True))
    idle = [line["way"] for line in report.rows if KILLS in line["way"] and line["happened"] < LEAST_HAPPENED]
    report.checks.append(Check("ways that nothing happened to", len(idle), "0", not idle, ", ".join(idle), weak=True))


def first(bench: Bench, asked: Sequence[Question], count: int, heard: Heard) -> tuple[list[Question], list[Ids], Line]:
    """Ask plain decoding; gives `count` questions (in float32 none that rounding decides), their texts, and a line."""
    address, new_tokens, regex = bench.stack.address, bench.options.max_new_tokens, bench.options.regex
    if bench.report.dtype != "float32" or regex:
        asked = asked[:count]
        answers = ask(address, asked, Way("plain", None, 1), new_tokens, heard, regex)
        expected = [() if isinstance(ids, str) else ids for ids in answers]
        return list(asked), expected, compare("plain, first", expected, answers)
    answers = ask(address, asked, Way("plain"), new_tokens, heard)
    drawn = [drawn_by(bench.reference, *pair) for pair in zip(asked, answers, strict=True)]
    places = [at for at, ids in enumerate(drawn) if ids is not None][:count]
    expected = [drawn[at] or () for at in places]
    line = compare("plain, by transformers", expected, [answers[at] for at in places])
    return [asked[at] for at in places], expected, line


def repeated(
    stack: Stack, way: Way, asked: Sequence[Question], expected: Sequence[Ids], options: Options, heard: Heard
) -> Line:
    """Ask everything one way; all again until what is to happen meanwhile has happened as often as it must."""
    until = time.monotonic() + _HAPPENS_S
    with meanwhile(stack, way.during) as happened:
        while True:
            answers = ask(stack.address, asked, way, options.max_new_tokens, heard, options.regex)
            line = compare(str(way), expected, answers, happened())
            enough = not way.during or line["happened"] >= LEAST_HAPPENED or time.monotonic() > until
            if line["difference"] or enough:
                return line
