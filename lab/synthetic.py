"""What a target and heads of some shape cost, with random weights: `bench synthetic`, and on a GPU `bench gpu`.

Times are measured in bare loops and through the services; efficiency is the former over the latter. Random heads guess
nothing: what is known is how many tokens a step has to commit so that a head pays. Forwards are compared with the time
in which memory moves what they read, and where graphs are replayed with eager ones.
"""

import gc
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coppice.client.client import Client
from coppice.config.model import ModelSize
from coppice.engine.engine import DTYPES, Clock, Engine
from coppice.engine.loading import load_engine
from coppice.errors import InvalidField
from coppice.heads.base import DraftJob, Head, served_head
from coppice.heads.checkpoints import TargetParts, save_head
from coppice.limits import MAX_TREE_NODES
from coppice.machine import default_dtype
from coppice.stack.spec import HeadSpec, StackSpec, check_device
from coppice.training.heads import build_student, head_config, replacing
from coppice.training.progress import Progress
from coppice.wire.drafter import Advance, OpenDraft
from lab.measuring import GREEDY, Check, Report, Row, asking, costs, in_turn, make_row, reporting, running
from lab.options import Options

DRAFT_VOCAB = 32_000  # SpecBlock, A.1, as EAGLE-3
SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
"""What costs time in a config.json, by name: models/demo, Qwen2.5-0.5B, Llama-3.1-8B, Qwen3-8B."""

TESTS, WORKERS = Path(__file__).parents[1] / "tests", "8"
ROWS = (1, 16, 32, 60, 90)  # of a forward, a session
CONTEXT = 300  # tokens before the timed rows
NEW_TOKENS = 48  # of an answer of the services; bare drafts are timed along as many
ANSWERS = 3  # through the services, of each method
NOTE = "synthetic: random weights"
REPEATS = 15
STRIDE = 3  # tokens committed between two timed drafts, about what a draft is good for
COPIED = {"cuda": 1 << 30, "cpu": 1 << 27}  # bytes, more than any cache holds
CELLS = {
    "cuda": ((1, 1, 1024), (1, 61, 1024), (8, 31, 1024), (32, 1, 1024), (8, 1, 32_768)),
    "cpu": ((1, 1, 512), (1, 31, 512), (8, 1, 512)),
}
"""(sessions, rows, context) of the forwards that are set beside what memory moves, as far as their KV has room"""


def read_shape(text: str) -> Any:
    """The configuration of a preset, or of a folder's config.json. Raises InvalidField."""
    auto: Any = AutoConfig
    if text in SHAPES:
        return auto.for_model(**SHAPES[text])
    if not (Path(text) / "config.json").is_file():
        raise InvalidField("shape", f"{text!r} is neither a folder with config.json nor one of {', '.join(SHAPES)}")
    return auto.from_pretrained(text, local_files_only=True, trust_remote_code=False)


def make_weights(folder: Path, config: Any, kinds: Sequence[str], dtype: str, device: str) -> StackSpec:
    """Write a random target and a random head of each kind, shaped as training would shape it; return their stack.

    The target is made on `device`, which for a large one should be an accelerator. KV is enough for one session, for
    a large model's would be large. Raises InvalidField for a kind that has no such shape.
    """
    auto: Any = AutoModelForCausalLM
    target = folder / "target"
    torch.manual_seed(0)
    with torch.device(device), replacing(target) as partial:
        auto.from_config(config, dtype=DTYPES[dtype]).to("cpu").save_pretrained(partial)
    parts = TargetParts(target)
    for kind in kinds:
        shape = head_config(kind, parts, draft_vocab_size=min(DRAFT_VOCAB, parts.vocab_size))
        student = build_student(shape, parts, torch.arange(shape.draft_vocab_size), 0)
        with replacing(folder / kind) as partial:
            save_head(partial, student.model.to(DTYPES[dtype]), shape)
    heads = tuple(HeadSpec(kind, kind, folder / kind) for kind in kinds)
    tokens = 4 * (CONTEXT + NEW_TOKENS + 2 * MAX_TREE_NODES)
    room = {"verifier": {"verifier.kv_tokens": tokens}, "drafter": {"drafter.kv_tokens": tokens}}
    return StackSpec(target=target, heads=heads, device=device, dtype=dtype, extra=room)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Plan:
    """What is measured of a stack with random weights, and how long bare loops take."""

    options: Options
    spec: StackSpec
    report: Report
    sessions: tuple[int, ...]
    vocab_size: int
    forwards: dict[tuple[int, int], float] = field(default_factory=dict)
    """milliseconds of a forward by (sessions, rows a session)"""
    drafts: dict[tuple[int, str], tuple[float, float]] = field(default_factory=dict)
    """milliseconds of a draft's forwards, and of all of it, by (sessions, head)"""

    def forward_ms(self, rows: float) -> float:
        """A forward of one session over so many rows, between the measured ones in proportion."""
        alone = {count: took for (sessions, count), took in self.forwards.items() if sessions == 1}
        return float(np.interp(rows, list(alone), list(alone.values())))

    def ids(self, count: int, seed: int) -> list[int]:
        return random.Random(seed).choices(range(self.vocab_size), k=count)  # noqa: S311


def draft_ms(
    head: Head, prompt: Sequence[int], answer: Sequence[int], budget: int, sessions: int
) -> tuple[float, float]:
    """Median milliseconds of greedy drafts of some sessions along an answer, on zeros: of forwards, and with trees."""
    text, keys, took = [*prompt, *answer], range(sessions), []
    opening = OpenDraft("", list(prompt), GREEDY, features=head.blank_features(0, len(prompt)))
    for key in keys:
        for _ in head.open(key, opening):
            pass
    for at in range(len(prompt), len(text), STRIDE):
        jobs = [DraftJob(key, text[at], at, budget, GREEDY) for key in keys]
        before, began = head.forward_ns, time.perf_counter_ns()
        for _ in head.draft(jobs):
            pass
        took.append((head.forward_ns - before, time.perf_counter_ns() - began))
        ids = text[at : at + STRIDE]
        for key in keys:
            head.advance(key, Advance(ids, head.blank_features(at, len(ids))))
    for key in keys:
        head.close(key)
    forward_ns, total_ns = np.median(took, axis=0)
    return float(forward_ns) / 1e6, float(total_ns) / 1e6


def run_synthetic(options: Options, on_gpu: bool = False) -> None:
    """Measure a target and heads as the options say; first, if `on_gpu`, run CUDA tests. Raises InvalidField."""
    check_device("device", options.device)
    config, kinds = read_shape(options.shape), options.kinds or ["eagle3", "specblock"]
    sessions, dtype = options.numbers("sessions", int, 1, 128), options.dtype or default_dtype(options.device)
    tests, name = run_tests() if on_gpu else {}, "gpu" if on_gpu else "synthetic"
    with tempfile.TemporaryDirectory(prefix="coppice-") as folder:
        spec = make_weights(Path(folder), config, kinds, dtype, options.device)
        with reporting(f"bench {name}", spec, options) as report:
            if on_gpu:
                failed = sum(end != "passed" for end in tests.values())
                report.figures["outcomes"] = tests
                report.add_figures("tests", "tests of a CUDA device", [Counter(tests.values())])
                report.checks.append(Check("tests that failed", failed, "0", not failed))
            measure(Plan(options, spec, report, sessions, config.get_text_config().vocab_size))


def run_tests() -> dict[str, str]:
    """How each test of a CUDA device ended, by its name."""
    files = [str(file) for file in TESTS.rglob("test_*.py") if "mark.gpu" in file.read_text("utf-8")]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-rfEp", "--numprocesses", WORKERS, *files]
    run = subprocess.run(command, cwd=TESTS.parent, stdout=subprocess.PIPE, text=True, check=False)
    print(run.stdout)
    ends = re.findall(r"^(PASSED|FAILED|ERROR) (.+?)(?: - .*)?$", run.stdout, re.MULTILINE)
    return {test: end.lower() for end, test in ends} or {"all": "error"}


def measure(plan: Plan) -> None:
    """Add to the report what a shape costs: bare forwards, beside the roofline, and drafts; the steps that they make;
    and steps of the services at one session, if that is measured.
    """
    report, budget, heads = plan.report, plan.options.budget, [head.name for head in plan.spec.heads]
    rows = sorted({1, budget + 1, *ROWS})
    report.figures |= {"synthetic": NOTE, "shape": plan.options.shape, "budget": budget}
    report.figures |= {"context": CONTEXT, "torch": torch.__version__}
    with Progress("parts", 1 + ((1 + len(heads)) * (1 + ANSWERS) if 1 in plan.sessions else 0)) as progress:
        measure_bare(plan, rows, progress)
        times = plan.forwards
        lines = [{"sessions": str(count)} | {str(each): times[count, each] for each in rows} for count in plan.sessions]
        on = f"{NOTE}\n{report.dtype}, {report.device}"
        report.add_figures("forward_ms", f"{on}: milliseconds of a forward by rows a session", lines)
        gc.collect()  # the services load the target again: the device has room for one
        torch.cuda.empty_cache()
        report.rows = [step_line(plan, sessions, head) for sessions in plan.sessions for head in ("", *heads)]
        title = f"bare forwards and drafts of a step, budget {budget}; tau from which a head pays"
        report.add_figures("steps", title, report.rows, {"draft_share": ".0%"})
        if 1 in plan.sessions:
            progress.say("the services")
            steps = measure_services(plan, progress)
            report.add_figures("pipeline", "milliseconds a step of the services, one session", steps)


def measure_bare(plan: Plan, rows: Sequence[int], progress: Progress) -> None:
    """Time the target and the heads in this process, set up as services are; forwards of CELLS beside the roofline."""
    prompt, answer = plan.ids(CONTEXT, 0), plan.ids(NEW_TOKENS, 1)
    device, most, settings = plan.options.device, math.inf, plan.spec.settings()
    if device.startswith("cuda"):
        most = ModelSize.of(plan.spec.target, plan.report.dtype).fit_kv(0, device, torch.cuda.mem_get_info(device)[0])
    sizes = {cell: cell[0] * (cell[1] + cell[2] + MAX_TREE_NODES) for cell in CELLS.get(device[:4], CELLS["cpu"])}
    cells = {cell: tokens for cell, tokens in sizes.items() if tokens <= most}
    room = max(plan.sessions) * (CONTEXT + NEW_TOKENS + max(rows) + 2 * MAX_TREE_NODES)
    tokens = max([room, *cells.values()])
    engine = load_engine(plan.spec.target, device=device, dtype=plan.report.dtype, kv_tokens=tokens)
    shared = settings.drafter.model_copy(update={"target": str(plan.spec.target), "kv_tokens": room})
    own = {head.name: {"name": head.name, "kind": head.kind, "path": str(head.path)} for head in plan.spec.heads}
    heads = {name: served_head(shared.model_copy(update=its)) for name, its in own.items()}
    add_roofline(engine, list(cells), plan.report)
    for sessions in plan.sessions:
        for count in rows:
            progress.say(f"a forward of {sessions} x {count} rows")
            plan.forwards[sessions, count] = bare_ms(engine, count, CONTEXT, sessions)
        torch.set_num_threads(settings.drafter.threads or torch.get_num_threads())
        for name, head in heads.items():
            progress.say(f"{sessions} drafts of {name}")
            plan.drafts[sessions, name] = draft_ms(head, prompt, answer, plan.options.budget, sessions)
        torch.set_num_threads(settings.verifier.threads or torch.get_num_threads())
    progress.add()


def bare_ms(engine: Engine, rows: int, context: int, sessions: int) -> float:
    """Median milliseconds of one forward over `rows` rows a session behind `context` tokens."""
    engine.timing(rows, sessions=sessions, context=context, repeats=3)  # warm-up
    return engine.timing(rows, sessions=sessions, context=context, repeats=REPEATS) / 1e6


def step_line(plan: Plan, sessions: int, head: str = "") -> Row:
    """T_M and T_D of a head's step, or of a plain one; `pays_from` is the tau at which both make as many tokens/s."""
    forward_ms = plan.forwards[sessions, plan.options.budget + 1 if head else 1]
    head_ms, draft_ms = plan.drafts.get((sessions, head), (0.0, 0.0))
    return {
        "method": f"single:{head}" if head else "plain",
        "sessions": sessions,
        "t_m_ms": forward_ms,
        "t_d_ms": head_ms,
        "t_d_total_ms": draft_ms,
        "draft_share": head_ms / (forward_ms + head_ms),
        "pays_from": (forward_ms + head_ms) / plan.forwards[sessions, 1],
    }


def measure_services(plan: Plan, progress: Progress) -> list[Row]:
    """Answers of the real services, one session: each method's step, its parts and its efficiency."""
    prompts = [tuple(plan.ids(CONTEXT, seed)) for seed in range(ANSWERS)]
    lines = []
    spec = replace(plan.spec, budget=plan.options.budget)
    with running(spec, plan.report) as stack, Client(stack.address) as client:
        methods = ("plain", *(f"single:{head.name}" for head in plan.spec.heads))
        ways = {method: asking(client, NEW_TOKENS, policy=method) for method in methods}
        _, *groups = (in_turn(ways, [each], GREEDY, turn, progress) for turn, each in enumerate((prompts[0], *prompts)))
        for method in methods:
            answers = [answer for group in groups for answer in group[method]]
            (step, _, parts), row = costs(answers), make_row(method, answers, [], plan.options.budget)
            head_ms, _ = plan.drafts.get((1, method.removeprefix("single:")), (0.0, 0.0))
            bare_ms = plan.forward_ms(row["verified_nodes"] + 1) + head_ms
            line = {"method": method, "step_ms": step, "efficiency": bare_ms / step, "tau": row["tau"]}
            lines.append(line | parts)
    return lines


def add_roofline(engine: Engine, cells: Sequence[tuple[int, int, int]], report: Report) -> None:
    """Time forwards of (sessions, rows, context), and compare them with a copy of as many bytes as they read."""
    speed, lines = bytes_a_second(engine.pool.device), []
    token_bytes = sum(part[0].nbytes for layer in engine.pool.layers for part in layer)  # keys and values
    for sessions, rows, context in cells:
        took, read = bare_ms(engine, rows, context, sessions), sessions * (context + rows) * token_bytes
        read += engine.bytes_read
        line = {"sessions": sessions, "rows": rows, "context": context, "ms": took, "GB read": read / 1e9}
        roofline_ms = read / speed * 1e3
        line |= {"roofline ms": roofline_ms, "over roofline": took / roofline_ms}
        if engine.steps is not None:
            graphs, engine.steps.graphs = engine.steps.graphs, []
            line["eager ms"] = bare_ms(engine, rows, context, sessions)
            engine.steps.graphs = graphs
        lines.append(line)
    report.add_figures("roofline", f"forwards; memory moves {speed / 1e9:.0f} GB/s in a copy", lines)


def bytes_a_second(device: torch.device) -> float:
    """How many bytes memory reads and writes in a second of a long copy."""
    source = torch.ones(COPIED.get(device.type, COPIED["cpu"]), dtype=torch.uint8, device=device)
    target, took = torch.empty_like(source), []
    for _ in range(REPEATS):
        clock = Clock(device)
        clock(target.copy_, source)
        took.append(clock.taken())
    return 2e9 * len(source) / median(took)
