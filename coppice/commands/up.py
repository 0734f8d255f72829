"""`coppice up`, a stack on this machine that is kept whole until Ctrl-C, and `coppice top`, what a deployment does."""

import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from coppice.commands.options import Heads, file, names, stack_spec
from coppice.config.gguf import as_folder
from coppice.config.model import ends_line, shared_shards, text_ends, warning_of
from coppice.config.sections import HEAD_KINDS
from coppice.config.settings import load_settings
from coppice.errors import InvalidField, Unavailable
from coppice.limits import MAX_TREE_NODES
from coppice.machine import INVARIANT, PROMISES
from coppice.rpc.access import is_loopback
from coppice.speculation.policy import Policy
from coppice.stack.launch import ANSWERS_S, Stack, Supervisor
from coppice.stack.process import ProcessFailed, why_no_port, write_ready
from coppice.stack.spec import DEFAULT_ADAPTER_PORT, DEFAULT_HTTP_PORT, DEFAULT_PORT, target_warnings
from coppice.telemetry import scrape

WATCH_S = 0.5
# Weights that run no code, and what configures the model, its tokenizer and its chat template; in its main folder only,
# and without Mistral's second copy of the weights.
WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
UNWANTED = ("*/*", "consolidated*")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:.+)?")
Part = Literal["all", "heads", "tokenizer"]
_OF_THE_SPEC = ("policy", "budget", "device", "dtype", "port", "verifiers", "orchestrators", "one_process", "adapt")
"""options that a StackSpec has under the same names"""


def up(
    context: typer.Context,
    model: Annotated[str | None, Argument(help="Folder, GGUF file or name on the Hub; default: the demo's.")] = None,
    target: Annotated[Path | None, Option(help="A model's folder: another way to give MODEL.")] = None,
    revision: Annotated[str | None, Option(help="Branch, tag or commit of a model on the Hub; default: main.")] = None,
    name: Annotated[list[str] | None, names("What clients call it, the first is shown; default: as MODEL.")] = None,
    chat_template: Annotated[
        Path | None, Option(exists=True, dir_okay=False, help="Jinja file, in place of the model's own chat template.")
    ] = None,
    head: Heads = None,
    policy: Annotated[str | None, Option(help="plain, single:HEAD, route, merge or auto; default: route.")] = None,
    budget: Annotated[
        int | None, Option(min=0, max=MAX_TREE_NODES, help="Draft nodes verified a step; default: 31, on CUDA 60.")
    ] = None,
    max_tokens: Annotated[int | None, Option(min=1, help="Most new tokens of a request; default: 4096.")] = None,
    kv_tokens: Annotated[int | None, Option(min=1, help="KV of a verifier; default: 65536 or what fits.")] = None,
    token: Annotated[str | None, Option(help="Answer only who sends this API key; default: anyone.")] = None,
    device: Annotated[str | None, Option(help="Torch device, such as cuda or cuda:1; default: cpu.")] = None,
    dtype: Annotated[str | None, Option(help="float32 or bfloat16; default: float32 on CPUs, else bfloat16.")] = None,
    threads: Annotated[int | None, Option(min=1, max=1024, help="A verifier's; default: all cores.")] = None,
    port: Annotated[int | None, Option(min=0, max=65535, help="Default: 50051; 0 takes a free one.")] = None,
    http_port: Annotated[
        int | None, Option(min=0, max=65535, help="OpenAI's API; default: 8000 or a free one; 0 serves none.")
    ] = None,
    verifiers: Annotated[int, Option(min=1, max=64, help="Verifiers, each with the target.")] = 1,
    drafters: Annotated[int, Option(min=1, max=64, help="Drafters of each head.")] = 1,
    orchestrators: Annotated[int, Option(min=1, max=64, help="Orchestrators; the first one is at --port.")] = 1,
    one_process: Annotated[bool, Option("--one-process", help="Heads live in the verifiers' processes.")] = False,
    adapt: Annotated[bool, Option("--adapt", help="Train the heads while they serve; starts Redis too.")] = False,
    config: Annotated[Path | None, Option(help="YAML settings of every service.")] = None,
    log_dir: Annotated[Path | None, Option(file_okay=False, help="Folder in which logs stay.")] = None,
    ready_file: Annotated[Path | None, file("--ready-file", "File to write addresses to once healthy.")] = None,
) -> None:
    """Start verifiers, drafters and orchestrators here, and start again what dies, until Ctrl-C.

    A script stops it with SIGTERM: in the background of a shell (`coppice up &`) Ctrl-C's signal is ignored. `coppice
    settings` lists what --config and variables COPPICE_SECTION__NAME can set beside these options.
    """
    if config:
        os.environ["COPPICE_CONFIG"] = str(config)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop as on Ctrl-C
    folder, hub_name = find_model(model, target, revision)
    options = {option: context.params[option] for option in _OF_THE_SPEC} | {
        "name": ",".join(name or ()) or hub_name,
        "http_port": _http_port(http_port),
        "verifier_threads": threads,
        "drafter_threads": threads and max(1, threads // 2),
        "replicas": drafters,
    }
    spec = stack_spec(folder, head, "MODEL" if model else "--target", **options)
    for each in spec.heads:
        if each.path and each.kind in HEAD_KINDS and (warning := warning_of(each.path)):
            _warn(f"head {each.name}: {warning}")
    with TemporaryDirectory(prefix="coppice-") as own:
        given = {"limits.max_new_tokens": max_tokens, **_files(Path(own), spec.target, chat_template, token)}
        extra = {
            "adapter": {"server.port": 0 if port == 0 else DEFAULT_ADAPTER_PORT},
            "verifier": {"verifier.kv_tokens": kv_tokens} if kv_tokens else {},
            "orchestrator": {setting: value for setting, value in given.items() if value is not None},
        }
        _run(Stack(replace(spec, extra=extra), log_dir=log_dir, say=print), ready_file)


def _files(folder: Path, target: Path, chat_template: Path | None, token: str | None) -> dict[str, Any]:
    """Settings of an orchestrator with this chat template or token, which `folder` gets. Raises InvalidField."""
    settings: dict[str, Any] = {}
    if token is not None:
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise InvalidField("token", "is not printable ASCII without spaces")
        settings["orchestrator.tokens"] = folder / "tokens"
        settings["orchestrator.tokens"].write_text(f"up {sha256(token.encode()).hexdigest()}\n", encoding="ascii")
    if chat_template:
        if not (target / "tokenizer.json").is_file():
            raise InvalidField("chat-template", f"{target} has no tokenizer.json, so that no chats are served")
        settings["orchestrator.target"] = beside = folder / target.resolve().name
        beside.mkdir()
        for file in target.resolve().iterdir():
            if file.name not in (chat := "chat_template.jinja", "additional_chat_templates"):
                (beside / file.name).symlink_to(file)
        (beside / chat).symlink_to(chat_template.resolve())
    return settings


def find_model(model: str | None, target: Path | None, revision: str | None) -> tuple[Path | None, str]:
    """The folder, or GGUF file, of what MODEL or --target names, and a model's name if it is one of the Hugging Face
    Hub, which is fetched into its cache. Raises InvalidField.
    """
    if model and target:
        raise InvalidField("MODEL", "is the same thing as --target: give one of them")
    name = model or (str(target) if target and HUB_NAME.fullmatch(str(target)) else "")
    if name and not (Path(name).exists() or (Path(name).suffix == ".gguf" and ":" not in name)):
        return _fetch(name, revision, field="MODEL" if model else "target"), name
    if revision:
        raise InvalidField("revision", "is a MODEL's of the Hub, and none is named")
    return Path(model) if model else target, ""


def fetch(
    model: Annotated[str, Argument(help="Its name on the Hugging Face Hub, or a GGUF file.")],
    revision: Annotated[str | None, Option(help="Branch, tag or commit; default: main.")] = None,
    part: Annotated[Part, Option(help="all, heads: what its heads read of it, tokenizer: no weights.")] = "all",
    link: Annotated[Path | None, Option(help="Name for the folder, made once it is whole.")] = None,
) -> None:
    """Download a model into the cache of HF_HOME, and print its folder."""
    if link and link.is_dir() and not link.is_symlink():
        raise InvalidField("link", f"{link} is a folder already")
    folder = as_folder("MODEL", Path(model) if Path(model).is_file() else _fetch(model, revision, part))
    if link:
        link.parent.mkdir(parents=True, exist_ok=True)
        new = link.with_name(f".{link.name}.{os.getpid()}")
        new.symlink_to(os.path.relpath(folder, link.parent))
        folder = new.replace(link)
    print(folder)


def _fetch(model: str, revision: str | None, part: Part = "all", field: str = "MODEL") -> Path:
    """The folder of a snapshot, or its GGUF file; what the cache lacks of it is downloaded, with progress on stderr."""
    if load_settings([]).server.production:
        raise InvalidField(field, f"{model} is no folder, and in production (server.production) nothing is fetched")
    from huggingface_hub import constants, errors, snapshot_download

    hub, (name, _, end) = constants.ENDPOINT, model.partition(":")
    weights = f"*{end.removesuffix('.gguf')}.gguf" if end else WANTED[0]
    wanted = [weights] if end else list(WANTED if part == "all" else WANTED[1:])
    try:
        get = partial(snapshot_download, name, ignore_patterns=list(UNWANTED))
        fetched = get(revision=revision, allow_patterns=wanted)
        if part == "heads" and not end:
            get(revision=Path(fetched).name, allow_patterns=list(shared_shards(fetched)))
    except errors.HFValidationError:
        reason = "is neither a folder nor a name such as Qwen/Qwen3-8B or ORG/REPO:FILE.gguf"
    except errors.RepositoryNotFoundError:
        reason = f"is no folder, and no model at {hub} that you may read (HF_TOKEN says who you are)"
    except errors.RevisionNotFoundError:
        raise InvalidField("revision", f"{model} has no revision {revision}") from None
    except errors.LocalEntryNotFoundError:
        reason = f"is no folder, the cache does not hold it whole, and {hub} does not answer"
    except Exception as error:  # of its HTTP client, which is not the same in all versions, and of the disk
        reason = f"could not be fetched from {hub}: {' '.join(str(error).split())}"
    else:
        files = sorted(Path(fetched).glob(weights))
        if not end and (files or part == "tokenizer"):
            return Path(fetched)
        if end and len(files) == 1:
            return files[0]
        which = ", ".join(file.name for file in files) or "no file"
        reason = f"names {which}" if end else "has no weights as safetensors; a GGUF file of it is ORG/REPO:FILE.gguf"
    raise InvalidField(field, f"{model} {reason}")


def _warn(line: str) -> None:
    print(f"coppice: {line}", file=sys.stderr, flush=True)


def _http_port(given: int | None) -> int | None:
    """What a stack is told: the port that was given, else the settings' (None), else 8000, or while that is taken 0."""
    if given is not None:
        return given or -1
    settings = load_settings([])
    if "http_port" in settings.orchestrator.model_fields_set:
        return None
    host = settings.server.host
    if reason := why_no_port(host, DEFAULT_HTTP_PORT):
        _warn(f"HTTP takes a free port: {host}:{DEFAULT_HTTP_PORT} cannot be used ({reason})")
        return 0
    return DEFAULT_HTTP_PORT


def _run(stack: Stack, ready_file: Path | None) -> None:
    """Start a stack, keep it whole until Ctrl-C or SIGTERM, and stop it. Raises what Stack and Supervisor do."""
    console, logs_stay = Console(), stack.log_dir is not None
    try:
        stack.prepare()
        orchestrator = stack.spec.extra.get("orchestrator", {})
        for warning in target_warnings(stack.spec.target, orchestrator.get("orchestrator.target")):
            _warn(warning)
        stack.start()
        console.print(services_table(stack))
        for line in facts(stack, logs_stay):
            console.print(line, soft_wrap=True, highlight=False)
        _watch(stack, console, ready_file)
    except KeyboardInterrupt:
        line = f"stopping {', '.join(stack.processes)}; answers that are running have {ANSWERS_S} s to end"
        console.print(line, highlight=False, soft_wrap=True)
    finally:
        stack.stop()
        if ready_file:
            ready_file.unlink(missing_ok=True)
    if stack.unclean:
        raise ProcessFailed(f"did not stop cleanly: {', '.join(stack.unclean)}")


def _watch(stack: Stack, console: Console, ready_file: Path | None) -> None:
    """Start again what dies, for ever; on a terminal a panel shows meanwhile what the stack does."""
    supervisor, monitor, changed = Supervisor(stack, _warn), Monitor(metrics_pages(stack)), True
    with Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else nullcontext() as live:
        while True:
            if ready_file and changed:  # with new process ids
                write_ready(ready_file, stack.to_json())
            time.sleep(WATCH_S)
            changed = supervisor.look()
            if live:
                monitor.look()
                live.update(monitor.panel(), refresh=True)


def services_table(stack: Stack) -> Table:
    """What runs where; ports of health, metrics and HTTP are at the host of the address."""
    kinds = {head.name: head.kind for head in stack.spec.heads}
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))  # it fits 80 columns
    for column in ("service", "kind", "address", "health", "metrics", "http", "pid"):
        table.add_column(column, overflow="fold")
    for name, ready in stack.services.items():
        head = name.removeprefix("drafter-") if ready.role == "drafter" else ""
        kind = kinds.get(head) or kinds.get(head.rpartition("-")[0]) or ""  # a replica's name ends in its number
        ports = [address.rpartition(":")[2] or "-" for address in (ready.health, ready.metrics, ready.http)]
        table.add_row(name, kind, ready.address, *ports, str(ready.pid))
    return table


def facts(stack: Stack, logs_stay: bool) -> Iterator[str]:
    """A line for each thing that a person would ask about what runs."""
    settings, spec = stack.settings, stack.spec
    verifier, drafter = settings.verifier, settings.drafter
    name = f"{verifier.name} ({spec.target})" if verifier.name else str(spec.target)
    yield f"target   {name}, {_place(verifier.dtype, verifier.device, verifier.threads)}"
    yield f"memory   {next(ready.memory for ready in stack.services.values() if ready.role == 'verifier')}"
    yield ends_line(text_ends(spec.target))
    yield f"{verifier.dtype}: {INVARIANT if verifier.invariant else PROMISES[verifier.dtype]}"
    if heads := [head.name if head.name == head.kind else f"{head.name} ({head.kind})" for head in spec.heads]:
        yield f"heads    {', '.join(heads)}; each {_place(drafter.dtype, drafter.device, drafter.threads)}"
    if any(head.kind == "mtp" for head in spec.heads):
        yield "mtp      read from the target's own checkpoint; --head none drafts with nothing"
    policy = settings.orchestrator.policy or Policy.default([head.name for head in spec.heads]).name
    yield f"policy   {policy}, budget {settings.orchestrator.budget}"
    yield f"failover a request waits up to {stack.failover_s:.0f} s for a verifier that died and loads again"
    yield f"logs     {stack.log_dir}{'' if logs_stay else ', deleted at the end; --log-dir FOLDER keeps them'}"
    if "orchestrator.tokens" in spec.extra.get("orchestrator", {}):
        yield "token    clients send it: COPPICE_TOKEN for `coppice` and the SDK, api_key for OpenAI's clients"
    yield f"ready at {stack.address}; Ctrl-C stops it"
    at = "" if stack.address == f"127.0.0.1:{DEFAULT_PORT}" else f" --address {stack.address}"
    yield f'try      coppice generate "Once upon a time"{at}'
    if pages := metrics_pages(stack):
        yield f"         coppice top --address {','.join(pages)}"
    if http := stack.orchestrator.http:
        address = f"{'https' if settings.tls.on else 'http'}://{http}"
        yield f"OpenAI   {address}/v1 is the base URL for OpenAI's clients"
        if settings.orchestrator.page != "never" and is_loopback(settings.server.host):
            yield f"page     {address}/ shows answers and draft trees"


def metrics_pages(stack: Stack) -> list[str]:
    """Addresses of the pages that say how a deployment does: those of orchestrators and of the adapter."""
    roles = ("orchestrator", "adapter")
    return [ready.metrics for ready in stack.services.values() if ready.role in roles and ready.metrics]


def _place(dtype: str, device: str, threads: int) -> str:
    cores = f" with {threads} {'thread' if threads == 1 else 'threads'}" if threads and device == "cpu" else ""
    return f"{dtype} on {device}{cores}"


LOOK_S, WINDOW_S, ANSWER_S = 1.0, 10.0, 1.0
"""time between two looks, time that rates are of, and how long a page may take"""

Page = dict[tuple[str, str], float]
"""the values of one page by metric and head (or pool), each the sum over all other labels"""

ALARMS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("coppice_head_suspect", lambda value: value > 0, "{} drafts far below what is expected of it"),
    ("coppice_replicas_fit", lambda value: value == 0, "no replica of {} can be used"),
    ("coppice_adapter_replicas_stale", lambda value: value > 0, "a drafter of {} does not take its new weights"),
    ("vllm:kv_cache_usage_perc", lambda value: value > 0.9, "KV is nearly full: sessions will wait"),
)
"""metric, when its value calls for a line, and the line; docs/operations.md says what to do"""
STEPS, ACCEPTED = "vllm:inter_token_latency_seconds_count", "vllm:spec_decode_num_accepted_tokens_total"
DRAFTS = "vllm:spec_decode_num_drafts_total"
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_HTTP_PORT}"


def top(
    address: Annotated[
        str, Option(help="HOST:PORT of HTTP or of metrics, as `coppice up` prints them, several with commas.")
    ] = DEFAULT_ADDRESS,
) -> None:
    """Show what a running deployment does, from its pages of metrics; once where there is no terminal."""
    addresses = address.split(",")
    console, monitor = Console(), Monitor(addresses)
    monitor.look()
    if len(monitor.silent) == len(addresses):
        hint = "start a server with `coppice up`, or name yours with --address: its HTTP or metrics port, not gRPC's"
        raise Unavailable(f"no metrics at {address}; {hint}")
    try:
        with Live(monitor.panel(), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(LOOK_S)
                monitor.look()
                live.update(monitor.panel(), refresh=console.is_terminal)
                if not console.is_terminal:
                    return
    except KeyboardInterrupt:
        return


class Monitor:
    """What a deployment's pages say, now and some seconds ago."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """`addresses`: HOST:PORT of each page, of orchestrators and adapters."""
        self._addresses = addresses
        self._looks: deque[tuple[float, dict[str, Page]]] = deque()
        self.silent: list[str] = []  # addresses that left the latest look unanswered

    def look(self) -> None:
        """Read every page."""
        now, pages, self.silent = time.monotonic(), {}, []
        for address in self._addresses:
            try:
                pages[address] = read(address)
            except OSError:
                self.silent.append(address)
        self._looks.append((now, pages))
        while now - self._looks[0][0] > WINDOW_S:
            self._looks.popleft()

    def panel(self) -> Panel:
        """The latest figures. Those of steps are of the last seconds, or of all time when there was no step in them."""
        steps = self._steps(STEPS)
        seconds = self._looks[-1][0] - self._looks[0][0]
        figures = {
            "tokens/s": f"{self._growth('vllm:generation_tokens_total') / seconds if seconds else 0:.1f}",
            "running": f"{sum(self._values('vllm:num_requests_running')):.0f}",
            "waiting": f"{sum(self._values('vllm:num_requests_waiting')):.0f}",
            "tau": f"{1 + self._steps(ACCEPTED) / steps:.2f}" if steps else "-",
            "KV": f"{max(self._values('vllm:kv_cache_usage_perc'), default=0):.0%}",
        }
        line = Text("   ").join(Text.assemble(f"{name} ", (value, "bold")) for name, value in figures.items())
        alarms = [Text(f"! {alarm}", style="red") for alarm in self._alarms()]
        title = ", ".join(self._labels("coppice_model_info"))
        return Panel(Group(line, Text(), self._table(steps), *alarms), title=title or None, expand=False)

    def _table(self, steps: float) -> Table:
        """What each head does, and how many replicas of each pool can be used."""
        table = Table("", "share of steps", "tau", "replicas", "version", box=None, pad_edge=False)
        merged = drafts = self._steps(DRAFTS)
        for pool in self._labels("coppice_replicas_fit"):
            routed = self._steps("coppice_routed_total", pool)
            merged -= routed
            tau = f"{1 + self._steps('coppice_routed_accepted_tokens_total', pool) / routed:.2f}" if routed else "-"
            fit = max(self._values("coppice_replicas_fit", pool))
            versions = [f"{version:.0f}" for version in self._values("coppice_adapter_version", pool)]
            share = f"{routed / steps:.0%}" if routed else "-"
            table.add_row(pool, share, tau, f"{fit:.0f}", ", ".join(versions) or "-")
        for name, count in {"merged": merged, "plain": steps - drafts}.items():
            if steps and count > 0:
                table.add_row(name, f"{count / steps:.0%}", "-", "-", "-")
        return table

    def _alarms(self) -> Iterator[str]:
        for address in self.silent:
            yield f"no answer from {address}"
        for metric, wrong, line in ALARMS:
            for label in self._labels(metric):
                if wrong(max(self._values(metric, label))):
                    yield line.format(label)

    def _labels(self, metric: str) -> list[str]:
        """The heads (or pools) that a metric has values of now, in the order of the pages."""
        pages = self._looks[-1][1].values()
        return list(dict.fromkeys(label for page in pages for name, label in page if name == metric))

    def _values(self, metric: str, label: str = "") -> list[float]:
        """What each page says now."""
        return [page[metric, label] for page in self._looks[-1][1].values() if (metric, label) in page]

    def _growth(self, metric: str, label: str = "") -> float:
        """By how much a counter grew on the pages that answer; one that began anew in the window counts from 0."""
        (_, first), (_, last) = self._looks[0], self._looks[-1]
        growth = 0.0
        for address, page in last.items():
            before, now = (each.get((metric, label), 0.0) for each in (first.get(address, page), page))
            growth += now - before if now >= before else now
        return growth

    def _steps(self, metric: str, label: str = "") -> float:
        """A count of steps, or of what they accepted: in the window, or of all time when it has no steps."""
        return self._growth(metric, label) if self._growth(STEPS) else sum(self._values(metric, label))


def read(address: str) -> Page:
    """The page at HOST:PORT. Raises OSError."""
    page: Page = {}
    for sample in scrape(address, ANSWER_S):
        label = sample.labels.get("head") or sample.labels.get("pool") or ""
        if sample.name == "coppice_model_info":
            label = f"{sample.labels['model_name']}, {sample.labels['dtype']}"
        page[sample.name, label] = page.get((sample.name, label), 0.0) + sample.value
    return page
