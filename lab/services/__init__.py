"""Steps of the services on a target and a head that sleep: what is added to T_M and T_D, and each process's CPU.

What the two agree on lies in a folder as a target's: a made-up text, its vocabulary, the times.
"""

import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Self

import numpy as np

from coppice.limits import TREE_ROOM
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import MODULES, Stack
from coppice.stack.spec import HeadSpec, StackSpec
from coppice.training.progress import Progress
from lab.measuring import Bench, Check, asking, costs, make_row

HEAD = "asleep"
ASLEEP = {**MODULES, "verifier": "lab.services.verifier", "drafter": "lab.services.drafter"}
"""what is run for each role"""
METHODS = ("plain", f"single:{HEAD}")
PROMPT = 32  # ids


@dataclass(frozen=True, slots=True)
class Asleep:
    """The shape of what is handed out, that of an 8B target, and for how long forwards sleep."""

    t_m_ms: float
    t_d_ms: float
    vocab_size: int = 152_000
    hidden_size: int = 4096
    layers: int = 32

    def next(self, token: Any, position: Any) -> Any:
        """The token behind `token`, which stands at an absolute position; numbers, or tensors of them."""
        return (48_271 * token + 69_621 * position + 11) % self.vocab_size

    def text(self, ids: tuple[int, ...], count: int) -> tuple[int, ...]:
        made = [ids[-1]]
        for position in range(len(ids) - 1, len(ids) - 1 + count):
            made.append(self.next(made[-1], position))
        return tuple(made[1:])

    def write(self, folder: Path) -> None:
        """Make a folder a target's, with a tokenizer: an orchestrator makes text of ids."""
        from tokenizers import Tokenizer, decoders, models

        config = {"model_type": "asleep", **asdict(self)}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        words = {f"Ġ{number}": number for number in range(self.vocab_size)}  # the sign is a space's
        tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(folder / "tokenizer.json"))

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})


def sleep_out(began_ns: int, milliseconds: float) -> int:
    """Sleep, without the interpreter's lock, until so long after `began_ns`; returns how long it was, nanoseconds.

    That is about 0.08 ms more than was asked for: the kernel wakes a sleeper late. Where other threads of the process
    are busy it is more, for the lock is waited for, as it is behind a forward of a GPU.
    """
    left_ns = began_ns + int(milliseconds * 1e6) - time.perf_counter_ns()
    time.sleep(max(0, left_ns) / 1e9)
    return time.perf_counter_ns() - began_ns


def spec_of(asleep: Asleep, folder: Path, sessions: Sequence[int], new_tokens: int) -> StackSpec:
    """A stack whose target and head sleep, with KV for so many sessions; what they agree on is put into `folder`."""
    asleep.write(folder)
    return StackSpec(
        target=folder,
        name=HEAD,
        heads=(HeadSpec(HEAD, "eagle3", folder),),  # a kind that is given features; the sleeping head is built for any
        dtype="bfloat16",
        verifier_threads=1,
        drafter_threads=1,
        extra={"verifier": {"verifier.kv_tokens": max(sessions) * (PROMPT + new_tokens + 2 * TREE_ROOM)}},
    )


def run_services(bench: Bench, asleep: Asleep, sessions: Sequence[int], temperatures: Sequence[float]) -> None:
    """Add a line for each temperature, number of sessions and method to the report."""
    report, lines = bench.report, list[dict[str, Any]]()
    cells = list(product(temperatures, sessions, METHODS))
    with Progress("cells", len(cells)) as progress:
        for temperature, count, method in cells:
            progress.say(f"{method}, T={temperature:g}, {count} sessions")
            line = measured(bench, asleep, method, count, SamplingParams(temperature=temperature))
            lines.append({"method": method, "T": temperature, "sessions": count, **line})
            progress.add()
    title = f"""T_M {asleep.t_m_ms:g} ms, T_D {asleep.t_d_ms:g} ms: medians of steps, ms; beside: without T_M and T_D
client, verifier, drafter, orchestrator: CPU of a step of one session, ms"""
    report.add_figures("services", title, lines, {"T": "g", "steps/s": ".0f", "sessions/core": ".0f"})
    wrong = sum(line["wrong"] for line in lines)
    report.checks.append(Check("wrong answers", wrong, "0", not wrong))


def measured(bench: Bench, asleep: Asleep, method: str, sessions: int, sampling: SamplingParams) -> dict[str, Any]:
    """A line of the table: one answer a session, at least --n of them.

    Trees are verified whole, as who names a budget has them: what a sleeping forward's rows cost is noise.
    """
    options, ids = bench.options, range(asleep.vocab_size)
    seeds = range(max(options.n, sessions))
    prompts = [tuple(random.Random(seed).choices(ids, k=PROMPT)) for seed in seeds]  # noqa: S311
    ask = asking(bench.client, options.max_new_tokens, sessions, policy=method, budget=options.budget)
    ask(prompts[:1], sampling)
    before, began = _cpu_ns(bench.stack), time.perf_counter()
    answers = ask(prompts, sampling)
    wall_s, after = time.perf_counter() - began, _cpu_ns(bench.stack)
    texts = [asleep.text(prompt, options.max_new_tokens) for prompt in prompts]
    row, (_, split, parts) = make_row(method, answers, [], options.budget), costs(answers)
    timings, steps = [answer.timings for answer in answers], sum(answer.steps for answer in answers)
    beside = np.array([each for timing in timings for each in timing.split_ns]) / 1e6
    used = {name: (after[name] - before[name]) / steps / 1e6 for name in before}
    return {
        "tau": row["tau"],
        "nodes": row["verified_nodes"],
        "step": statistics.median(step for timing in timings for step in timing.step_ns) / 1e6,
        "T_M": parts["target forward"],
        "T_D": parts["head forward"],
        "beside": split,
        "p99": float(np.percentile(beside, 99)),
        "steps/s": steps / wall_s,
        **used,
        "sessions/core": (asleep.t_m_ms + asleep.t_d_ms * (parts["head forward"] > 0)) / used["orchestrator"],
        "wrong": sum(answer.ids != text for answer, text in zip(answers, texts, strict=True)),
    }


def _cpu_ns(stack: Stack) -> dict[str, int]:
    """CPU time that each role's process, and this one, has used, in all threads. Linux has a clock for each process."""
    used = {ready.role: time.clock_gettime_ns(~ready.pid << 3 | 2) for ready in stack.services.values()}
    return {**used, "client": time.process_time_ns()}
