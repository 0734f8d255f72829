"""What a stack on one machine consists of, and what would end it later: both are checked before anything is started."""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, get_args

from coppice.config import model
from coppice.config.gguf import as_folder
from coppice.config.sections import ADAPTED_KINDS, TRAINED_KINDS, HeadKind, check_kind
from coppice.config.settings import Settings, load_settings
from coppice.errors import InvalidField, NotFound
from coppice.limits import check_range
from coppice.machine import Dtype, usable_cores
from coppice.speculation.policy import Policy
from coppice.stack.process import as_flags, checkout, environment, module_of, why_no_port

_PLACE = ("device", "dtype", "threads")
_RESOLVED = {"verifier": ("name", *_PLACE), "drafter": _PLACE, "orchestrator": ("policy", "budget")}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
CPU_BUDGET, CUDA_BUDGET = 31, 60
DEFAULT_PORT, DEFAULT_HTTP_PORT = 50051, 8000
DEFAULT_ADAPTER_PORT = 50061
HTTP_PORT = "orchestrator.http_port"
PORTS = ("server.port", "server.health_port", "server.metrics_port", HTTP_PORT)
_TEMPLATE_S = 30  # to say what is wrong with a chat template
MAX_REPLICAS = 64
_SHIPPED = ("dspark-code", "dspark-prose", "specblock-code", "eagle3-code", "lookup")
SHIPPED_HEADS: dict[str, HeadKind] = {name: name.partition("-")[0] for name in _SHIPPED}
DEMO_HEADS = ("dspark-code", "dspark-prose", "lookup")


def _models() -> Path:
    root = checkout()
    if root is None:
        raise NotFound("the demo's models are in a checkout and in the image, not in the package: give --target DIR")
    return root / "models" / "demo"


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """One draft head: its pool's name, its kind, and its folder (or file) if it has one."""

    name: str
    kind: HeadKind
    path: Path | None = None

    def __post_init__(self) -> None:
        if self.kind == "lm" and self.path:
            object.__setattr__(self, "path", as_folder("head", self.path))

    def __str__(self) -> str:
        """NAME=KIND[:DIR], as `parse` reads it."""
        return f"{self.name}={self.kind}" + (f":{self.path}" if self.path else "")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read NAME=KIND[:DIR], or the name of a head of the demo's target. Raises InvalidField, NotFound."""
        if shipped := SHIPPED_HEADS.get(text):
            return cls(text, shipped, None if shipped in COUNTING_KINDS else _models() / text)
        name, equals, rest = text.partition("=")
        kind, _, path = rest.partition(":")
        if not equals:
            raise InvalidField("head", f"{text!r} is neither NAME=KIND[:DIR] nor one of {', '.join(SHIPPED_HEADS)}")
        try:
            return cls(name, check_kind(kind), Path(path) if path else None)
        except ValueError as error:
            raise InvalidField("head", str(error)) from None


COUNTING_KINDS = ("bigram", "lookup")
WEIGHED_KINDS = ("lm", *TRAINED_KINDS)
"""Kinds that have a folder; what a package adds says for itself whether it needs one."""
COUNTED_HEADS = (HeadSpec("bigram", "bigram"), HeadSpec("lookup", "lookup"))
"""The heads of a target that comes without any: they count the session's own text."""


def default_heads(target: Path) -> tuple[HeadSpec, ...]:
    """The heads of a target for which none are chosen: the one in its checkpoint and look-up, else those that count."""
    return (HeadSpec("mtp", "mtp"), COUNTED_HEADS[-1]) if model.find_mtp(target) else COUNTED_HEADS


@dataclass(frozen=True, kw_only=True)
class StackSpec:
    """Verifiers, drafter pools and orchestrators on loopback ports. None leaves a value to the settings, and where
    those are silent to the machine: the verifier is on all cores, a drafter on half of them.
    """

    target: Path
    name: str = ""
    """what clients call the target where settings do not say, names with commas between; empty: as its folder"""
    heads: tuple[HeadSpec, ...] = COUNTED_HEADS
    policy: str | None = None
    device: str | None = None
    dtype: Dtype | None = None
    port: int | None = 0
    """the first orchestrator's; 0 takes a free one"""
    http_port: int | None = -1
    """of OpenAI's API at the first orchestrator; 0 takes a free one, as all others do, -1 serves none"""
    verifier_threads: int | None = None
    drafter_threads: int | None = None
    budget: int | None = None
    verifiers: int = 1
    replicas: int = 1
    """drafters of each head"""
    orchestrators: int = 1
    one_process: bool = False
    """whether the heads live in the verifier's process"""
    adapt: bool = False
    """whether an adapter trains the heads of ADAPTED_KINDS; with a Redis of its own unless settings name one"""
    extra: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """more settings by role: {"verifier": {"verifier.kv_tokens": 4096}}"""

    def __post_init__(self) -> None:
        if self.dtype not in (None, *get_args(Dtype)):
            raise InvalidField("dtype", f"{self.dtype!r} is not one of {', '.join(get_args(Dtype))}")
        for name in ("verifiers", "replicas", "orchestrators"):
            check_range(name, getattr(self, name), 1, MAX_REPLICAS)
        names = [head.name for head in self.heads]
        for head in self.heads:
            if not _NAME.fullmatch(head.name):
                raise InvalidField("head", f"the name {head.name!r} must be 1 to 64 of [A-Za-z0-9_-]")
            if names.count(head.name) > 1:
                raise InvalidField("head", f"{head.name} is given twice")
            if head.kind in WEIGHED_KINDS and (reason := model.why_no_model(head.path, typed=head.kind == "lm")):
                form = "" if head.path else ": write NAME=KIND:DIR"
                raise InvalidField("head", f"{head.name}: {reason}{form}")
            if head.kind == "mtp" and head.path:
                raise InvalidField("head", f"{head.name}: is in the target's checkpoint: write {head.name}=mtp")
            if head.kind == "mtp" and not model.find_mtp(self.target):
                raise InvalidField("head", f"{head.name}: {self.target} {model.NO_MTP}")
            if head.path and not head.path.exists():
                raise InvalidField("head", f"{head.name}: {head.path} does not exist")
        if self.one_process and self.replicas > 1:
            raise InvalidField("one-process", "serves each head once")
        if self.adapt and not self.adapted:
            raise InvalidField("adapt", f"no head can be adapted; those of these kinds can: {', '.join(ADAPTED_KINDS)}")
        if self.policy:
            Policy.parse(self.policy, names)
        object.__setattr__(self, "target", as_folder("target", self.target))
        model.check_model("target", self.target, typed=True)

    @property
    def adapted(self) -> tuple[HeadSpec, ...]:
        """The heads that an adapter trains."""
        return tuple(head for head in self.heads if self.adapt and head.kind in ADAPTED_KINDS)

    @classmethod
    def demo(cls, **changes: Any) -> Self:
        """The demo's target with its heads. Raises NotFound, or InvalidField while the models are not there."""
        heads = tuple(map(HeadSpec.parse, DEMO_HEADS))
        changes["name"] = changes.get("name") or "coppice-demo"
        return cls(**{"target": _models() / "target", "heads": heads, **changes})

    def settings(self) -> Settings:
        """What holds for the services: this spec, then variables and YAML, then the machine's defaults."""
        values = {"server.port": self.port, "orchestrator.policy": self.policy, "orchestrator.budget": self.budget}
        values |= {HTTP_PORT: self.http_port, "verifier.device": self.device, "drafter.device": self.device}
        values |= {"verifier.dtype": self.dtype, "verifier.threads": self.verifier_threads}
        values |= {"drafter.dtype": self.dtype, "drafter.threads": self.drafter_threads}
        flags = as_flags({name: value for name, value in values.items() if value is not None})
        device, cores = load_settings(flags).verifier.device, usable_cores()
        defaults: dict[str, dict[str, Any]] = {"verifier": {"name": self.name, "threads": cores}}
        defaults |= {"server": {"port": DEFAULT_PORT}, "drafter": {"device": device, "threads": max(1, cores // 2)}}
        defaults["orchestrator"] = {"budget": CUDA_BUDGET if device.startswith("cuda") else CPU_BUDGET}
        return load_settings(flags, defaults)

    def flags(self, settings: Settings) -> dict[str, Any]:
        """What every process of the stack is told, by dotted name: what its own variables and YAML may not say."""
        flags: dict[str, Any] = {f"{role}.target": self.target for role in (*_RESOLVED, "adapter")}
        for role, names in _RESOLVED.items():
            flags |= {f"{role}.{name}": getattr(getattr(settings, role), name) for name in names}
        return {name: value for name, value in flags.items() if value != ""}


def preflight(spec: StackSpec, settings: Settings) -> int:
    """The KV tokens of each verifier. Raises InvalidField over a port that is taken, a device that is not here, a
    target that memory cannot hold, or a draft model with another vocabulary.
    """
    first = {f"server.{name}": value for name, value in settings.server}
    first |= {HTTP_PORT: settings.orchestrator.http_port, **spec.extra.get("orchestrator", {})}
    adapter = {"server.host": "127.0.0.1", **(spec.extra.get("adapter", {}) if spec.adapted else {})}
    numbers: set[int] = set()
    for flags, name in ((flags, name) for flags in (first, adapter) for name in PORTS):
        if (port := int(flags.get(name, 0))) > 0:
            host = flags["server.host"]
            reason = f"two of these services would listen on {port}" if port in numbers else why_no_port(host, port)
            numbers.add(port)
            if reason:
                choose = "choose another port, or 0 for a free one"
                raise InvalidField(name, f"{host}:{port} cannot be used ({reason}); {choose}")
    kv_tokens = check_target(spec, settings)
    check_device("drafter.device", settings.drafter.device)
    for head in spec.heads:
        try:
            if head.kind == "lm" and head.path:
                model.common_tokens(head.path, spec.target)
        except InvalidField as error:
            raise InvalidField("head", f"{head.name}: {str(error).partition(': ')[2]}") from None
    return kv_tokens


def check_target(spec: StackSpec, settings: Settings) -> int:
    """The KV tokens of each verifier. Raises InvalidField over a device that is not here, or a target of no use."""
    own = {name.partition(".")[2]: value for name, value in spec.extra.get("verifier", {}).items()}
    own |= {"target": str(spec.target), "drafters": [str(head) for head in spec.heads if spec.one_process]}
    verifier, room = settings.verifier.model_copy(update=own), None
    check_device("verifier.device", verifier.device, verifier.ranks)
    model.text_ends(spec.target)
    if verifier.device.startswith("cuda"):
        import torch

        room = float(torch.cuda.get_device_properties(verifier.device).total_memory)
    sessions = int(own.get("sessions", settings.limits.sessions))
    return model.fit_verifier(verifier, sessions, room, spec.verifiers)


def target_warnings(target: Path, text_folder: Path | None = None) -> Iterator[str]:
    """What is odd about a target's files, or about those of its text elsewhere: a line each. Raises InvalidField."""
    yield from model.disagreements(target)
    folder = text_folder or target
    if not (folder / "tokenizer.json").is_file():
        return
    command = [sys.executable, "-m", module_of("orchestrator.text"), "check", str(folder.resolve())]
    try:
        checked = subprocess.run(command, capture_output=True, timeout=_TEMPLATE_S, env=environment())
        yield from filter(None, checked.stdout.decode().splitlines())
    except subprocess.TimeoutExpired:
        yield "chats will be refused: this target's chat template does not end"


def check_device(field: str, device: str, ranks: int = 1) -> None:
    """Raise InvalidField unless torch can use a device here, or so many. torch is loaded for it, but for the CPU."""
    if device == "cpu":
        return
    import torch

    try:
        place = torch.device(device)
        if place.type != "cuda":
            torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidField(field, f"{device!r} is no device here: {str(error).splitlines()[0]}") from None
    if place.type == "cuda" and (place.index or 0) + ranks > (count := torch.cuda.device_count()):
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        what = f"{device!r} for {ranks} ranks" if ranks > 1 else f"{device!r}"
        raise InvalidField(field, f"{what} is not here: torch is built {built} and finds {count} CUDA devices")
