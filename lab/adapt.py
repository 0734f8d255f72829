"""`coppice bench adapt`: one head on a stream that changes under it, with each policy of adaptation and without.

Every policy has a stack of its own. They run in turns, the others stopped (SIGSTOP), training included: each sees the
stream as if it were alone, and what is compared was measured in the same minutes. Without --prompts they are of our own
making: nobody's, and none that a head was trained on.
"""

import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any, get_args

from coppice.client.adapter import AdapterClient, plain
from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.config.sections import ADAPTED_KINDS, PolicyName
from coppice.errors import InvalidField
from coppice.limits import MAX_HISTORY, check_range
from coppice.stack.launch import Stack
from coppice.stack.spec import StackSpec
from coppice.testing.reference import Reference, TargetText, Verdict
from coppice.training.progress import Progress
from coppice.v1 import adapter_pb2 as pb
from lab.measuring import GREEDY, Ids, Report, Row, asking, exactness, make_row, verdicts_of
from lab.options import Options, Question, read_questions

NEVER, BANDIT = "never", "bandit"
TRAINED = ("head", "full")  # what a change is called that put newly trained weights to use
BUDGET = 12  # draft nodes verified a step
INTERVAL = 10  # adapter.interval of the other policies: fit for a stream of a few hundred queries
NEW_TOKENS = 48  # of each answer
TURN = 10  # queries that a lane serves before the next one
WARM_PROMPT, WARM_TOKENS = "Once", 16
WAKE_S = 1.5  # from SIGCONT to the first query: timers fire, and the adapter's demand, which has run out, is told again

KIND_TURN = 40  # queries before a stream that turns goes on with another kind of text
WORDS: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("streams.json").read_text("utf-8"))
"""by kind of text, in the order in which a stream turns, what its prompts are made of"""


def prompts_of(kind: str) -> list[str]:
    """Every prompt that a kind's words make, all different, shuffled; the numbers of sums are drawn."""
    words, prompts, number = WORDS[kind], list[str](), random.Random(0).randint  # noqa: S311
    for first, second, text in product(words["first"], words["second"], words["texts"]):
        numbers = {"a": number(6, 40), "b": number(2, 9), "c": number(2, 6)}
        prompts.append(text.format(first, second, first.capitalize(), second.capitalize(), **numbers))
    random.Random(0).shuffle(prompts)  # noqa: S311
    return prompts


def stream_of(what: str, count: int, encode: Callable[[str], Ids]) -> list[Question]:
    """What is asked, each with its part of the stream. Turns: code, stories and maths, KIND_TURN queries of each; what
    comes again has other prompts. Shift: four fifths stories, which a head of code does not know, then code again.
    """
    parts = ["stories"] * (4 * count // 5) + ["code again"] * (count - 4 * count // 5)
    if what == "turns":
        parts = [kind for kind in islice(cycle(WORDS), -(-count // KIND_TURN)) for _ in range(KIND_TURN)][:count]
    prompts = {kind: iter(prompts_of(kind)) for kind in WORDS}
    return [Question(encode(prompt), part) for part in parts for prompt in islice(prompts[part.partition(" ")[0]], 1)]


class Lane:
    """A policy's stack, which can be held still."""

    status: pb.HeadStatus | None = None  # what the adapter did, once the lane was served

    def __init__(self, name: str, spec: StackSpec) -> None:
        self.name, self.spec, self.answers = name, spec, list[Completion]()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Start the stack, warm it up and hold it still; at the end ask the adapter what it did, and stop all."""
        with Stack(self.spec) as self.stack, Client(self.stack.address) as self.client:
            with self.running():  # a plain request: an adapter hears nothing of it
                self.client.generate(WARM_PROMPT, policy="plain", max_new_tokens=WARM_TOKENS)
            try:
                yield
            finally:
                self.send(signal.SIGCONT)
            if "adapter" in self.stack.services:
                time.sleep(WAKE_S)
                with AdapterClient(self.stack.services["adapter"].address) as adapter:
                    self.status = adapter.status(history=MAX_HISTORY)[0]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let it run meanwhile; what breaks it off leaves it running, to be stopped."""
        self.send(signal.SIGCONT)
        time.sleep(WAKE_S)
        yield
        self.send(signal.SIGSTOP)

    def answer(self, prompts: Sequence[Ids]) -> None:
        """Run, and add the answers to some prompts.

        The budget is named, so that trees are verified whole: each verifier else cuts them by the costs that it
        measured when its stack started, and tau would differ where nothing was learnt.
        """
        with self.running():
            self.answers += asking(self.client, NEW_TOKENS, budget=self.spec.budget)(prompts, GREEDY)

    def send(self, number: signal.Signals) -> None:
        for pid in self.stack.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def lanes_of(options: Options) -> tuple[StackSpec, list[Lane], list[Question]]:
    """The stack that all lanes are variants of, the lanes, and what they are asked. Raises InvalidField."""
    known = (NEVER, *get_args(PolicyName))
    policies = options.methods or (known if options.what == "shift" else (NEVER, BANDIT))
    if unknown := [policy for policy in policies if policy not in known]:
        raise InvalidField("methods", f"{unknown[0]!r} is not one of {', '.join(known)}")
    base = replace(replace(options, heads=[options.head]).spec(), budget=BUDGET)
    if (kind := base.heads[0].kind) not in ADAPTED_KINDS:
        raise InvalidField("head", f"{kind} heads are not adapted; those are: {', '.join(ADAPTED_KINDS)}")
    if options.prompts:
        stream, _ = read_questions(replace(options, max_new_tokens=NEW_TOKENS), base)
    else:
        check_range("n", options.n, 3, 2 * len(prompts_of("code")))  # so many different prompts there are
        stream = stream_of(options.what, options.n, TargetText(base.target).encode)
    base, lanes = replace(base, policy=f"single:{base.heads[0].name}"), list[Lane]()
    for policy in policies:  # `never` has no adapter and sends no signals
        extra = {"adapter": {} if policy == NEVER else {"adapter.policy": policy, "adapter.interval": INTERVAL}}
        lanes.append(Lane(policy, replace(base, adapt=policy != NEVER, extra=extra)))
    return base, lanes, stream


def run_lanes(lanes: Sequence[Lane], stream: Sequence[Question]) -> None:
    """Serve the stream with every lane, some queries at a time, in alternating order."""
    with Progress("answers", len(lanes) * len(stream)) as progress, ExitStack() as served:
        for lane in lanes:
            progress.say(f"starting {lane.name}")
            served.enter_context(lane.serving())
        for number, at in enumerate(range(0, len(stream), TURN)):
            for lane in lanes if number % 2 == 0 else reversed(lanes):
                progress.say(lane.name)
                prompts = [question.ids for question in stream[at : at + TURN]]
                lane.answer(prompts)
                progress.add(len(prompts))


def report_lanes(lanes: Sequence[Lane], stream: Sequence[Question], reference: Reference, report: Report) -> None:
    """Add a row for each lane, their table and checks to the report; the first lane's answers are re-scored."""
    asked = [(question.ids, GREEDY) for question in stream]
    verdicts = reference.judge_all(asked, {lane.name: lane.answers for lane in lanes})
    report.rows = [adapt_row(lane, stream, verdicts[lane.name]) for lane in lanes]
    if report.rows[0]["method"] == NEVER:
        for row in report.rows:
            row["speedup"] = row["tokens_per_s"] / report.rows[0]["tokens_per_s"]
    title = f"{report.command}: tau (tokens/s) by part, updates counted in; {report.dtype}, {report.threads} threads"
    report.add_table(title, map(adapt_line, report.rows), {"training s": ".0f"})
    report.checks += exactness(report.rows, report.dtype, NEW_TOKENS)


def adapt_row(lane: Lane, stream: Sequence[Question], verdicts: Sequence[Verdict]) -> Row:
    """The figures of a lane, its parts of the stream and the last third of the first one; its speedup is over never."""
    answers, status = lane.answers, lane.status
    changes = [plain(change) for change in status.changes] if status else []
    trained = [change for change in changes if change["what"] in TRAINED]
    # By the median of a kind: some were held still halfway.
    seconds = [[change["train_s"] for change in trained if change["what"] == kind] for kind in TRAINED]
    places: dict[str, list[int]] = {}
    for number, question in enumerate(stream):
        places.setdefault(question.benchmark, []).append(number)
    (first, its), *others = places.items()
    parts = []
    for name, at in ((first, its), (f"{first}, last third", its[2 * len(its) // 3 :]), *others):
        row = make_row(name, [answers[number] for number in at], [], 0)
        updates = sum(at[0] < change["query"] <= at[-1] + 1 for change in trained)
        figures = {"tau": row["tau"], "tokens_per_s": row["tokens_per_s"], "updates": updates}
        parts.append({"name": name, "queries": len(at), **figures})
    return make_row(lane.name, answers, verdicts, lane.spec.budget or 0) | {
        "updates": len(trained),
        "reverts": status.reverts if status else 0,
        "train_s": sum(len(took) * statistics.median(took) for took in seconds if took),
        "parts": parts,
        "changes": changes,
    }


def adapt_line(row: Row) -> dict[str, Any]:
    """tau (tokens/s) of every part of the stream and of all of it, and what the updates cost."""
    parts = {f"{part['name']} ({part['queries']})": part for part in row["parts"]} | {"all": row}
    return {
        "method": row["method"],
        **{name: f"{figures['tau']:.2f} ({figures['tokens_per_s']:.1f})" for name, figures in parts.items()},
        "x never": row["speedup"],
        "updates": row["updates"],
        "reverts": row["reverts"],
        "training s": row["train_s"],
        "same/tie/wrong": verdicts_of(row),
    }
