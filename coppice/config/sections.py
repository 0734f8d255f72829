"""Settings of the processes, section by section."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from coppice.config.gguf import as_folder
from coppice.errors import InvalidField
from coppice.failpoints import parse as parse_failpoints
from coppice.limits import MAX_HEAD_NODES, MAX_TREE_NODES
from coppice.machine import Dtype, default_dtype, extensions

SERVICES = {
    "verifier": "coppice.v1.VerifierService",
    "drafter": "coppice.v1.DrafterService",
    "orchestrator": "coppice.v1.GenerationService",
    "adapter": "coppice.v1.AdapterService",
}
"""the gRPC service of each role"""
HEADS = "coppice.heads"
"""the entry points under which packages add kinds of heads"""
HEAD_KINDS = ("bigram", "lookup", "lm", "eagle3", "specblock", "dflash", "jetspec", "dspark", "mtp")
"""Kinds of heads of this package."""


def check_kind(kind: str) -> str:
    """The same, if it is a kind of this package or of an installed one. Raises ValueError that lists them all."""
    if kind not in HEAD_KINDS and kind not in extensions(HEADS):
        raise ValueError(f"{kind!r} is no kind; there are {', '.join((*HEAD_KINDS, *extensions(HEADS)))}")
    return kind


HeadKind = Annotated[str, AfterValidator(check_kind)]
TRAINED_KINDS: tuple[HeadKind, ...] = HEAD_KINDS[3:-1]
"""Heads that `coppice train` trains on the target's features, each in a folder."""
FEATURE_KINDS: tuple[HeadKind, ...] = (*TRAINED_KINDS, "mtp")
"""Heads that read the target's features."""
ADAPTED_KINDS: tuple[HeadKind, ...] = ("eagle3", "specblock", "dspark")
"""Those that an adapter can train while they serve."""
PolicyName = Literal["bandit", "paper", "always", "full-only", "head-only"]


def _check_pairs(pairs: list[str]) -> list[str]:
    for pair in pairs:
        name, _, value = pair.partition("=")
        if not name or not value:
            raise ValueError(f"{pair!r} is not NAME=VALUE")
    return pairs


def _folder(model: str, info: ValidationInfo) -> str:
    """A model's folder, also where a GGUF file is named; what a package's head has is its own."""
    own = info.field_name == "path" and info.data.get("kind") != "lm"
    try:
        return model if own or not model else str(as_folder("", Path(model)))
    except InvalidField as error:
        raise ValueError(str(error).partition(": ")[2]) from None


def _check_names(names: str) -> str:
    if names and not all(name.strip() == name != "" for name in names.split(",")):
        raise ValueError(f"{names!r} is not names with commas between")
    return names


def _check_heads(drafters: list[str]) -> list[str]:
    for drafter in drafters:
        check_kind(drafter.partition("=")[2].partition(":")[0])
    if len({drafter.partition("=")[0] for drafter in drafters}) < len(drafters):
        raise ValueError("names a head twice")
    return _check_pairs(drafters)


ModelFolder = Annotated[str, AfterValidator(_folder)]
Pairs = Annotated[list[str], AfterValidator(_check_pairs)]
RedisUrl = Annotated[str, Field(pattern=r"^((rediss?|unix)://.*)?$")]  # a refusal shows none: it may hold a password
DRAFTERS = "NAME=HOST:PORT of each drafter, NAME=dns:HOST:PORT or NAME=redis of them all"
VERIFIERS = "HOST:PORT, dns:HOST:PORT or redis"


def setting(default: Any, description: str, **bounds: Any) -> Any:
    """A setting with its default, what `coppice settings` says of it, and pydantic's bounds."""
    return Field(default, description=description, **bounds)


class Section(BaseModel):
    """A section of the settings: unknown names are refused, and nothing changes once it is read."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerSettings(Section):
    """How a process listens and stops."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(0, "gRPC port; 0 takes a free one", ge=0, le=65535)
    health_port: int = setting(0, "plaintext gRPC health port; 0 takes a free one", ge=0, le=65535)
    metrics_port: int = setting(0, "Prometheus port; 0 takes a free one, -1 serves none", ge=-1, le=65535)
    advertise: str = setting("", "host that others, and a registry, are told; empty: host")
    ready_file: str = setting("", "file to write addresses to once ready")
    grace_s: float = setting(90.0, "how long a stopping server lets requests finish, seconds", ge=0)
    log_json: bool = setting(False, "log JSON lines instead of text")
    production: bool = setting(False, "whether people depend on this process: failpoints are refused")
    failpoints: str = setting("", "NAME=VALUE;... of coppice.failpoints: how to misbehave, for tests")

    @field_validator("failpoints")
    @classmethod
    def _failpoints_exist(cls, failpoints: str, info: ValidationInfo) -> str:
        if parse_failpoints(failpoints) and info.data.get("production"):
            raise ValueError("are refused in production")
        return failpoints


class TelemetrySettings(Section):
    """Traces of requests; off while there is no endpoint."""

    otlp_endpoint: str = setting(
        "",
        "collector of OTLP by gRPC, http(s)://HOST:PORT, or file:FOLDER, where processes write their spans",
        pattern=r"^(https?://[^/]+:\d{1,5}|file:.+)?$",
    )


class TlsSettings(Section):
    """TLS between processes; plaintext while no file is named. A certificate's names say who its holder is."""

    ca: str = setting("", "file with the authorities that sign the other processes' certificates (PEM)")
    cert: str = setting("", "file with this process's certificate chain (PEM); a client may have none")
    key: str = setting("", "file with the key of tls.cert (PEM)")
    require: bool = setting(False, "whether clients of generation need a certificate, as callers of other services do")
    server_name: str = setting("", "name in a server's certificate; empty: its role's, for generation the host")
    tokens_in_clear: bool = setting(False, "whether clients' tokens may cross a network without TLS")

    @property
    def on(self) -> bool:
        """Whether anything is encrypted."""
        return bool(self.ca or self.cert or self.key)


class TorchSettings(Section):
    """Where and how a process computes."""

    device: str = setting("cpu", "torch device, such as cpu or cuda:0")
    dtype: Dtype = setting("", "of weights and KV; default: bfloat16 on CUDA, else float32", validate_default=True)
    threads: int = setting(0, "torch threads; 0 lets torch choose", ge=0, le=1024)

    @field_validator("dtype", mode="before")
    @classmethod
    def _dtype_by_device(cls, dtype: str, info: ValidationInfo) -> str:
        return dtype or default_dtype(info.data.get("device", "cpu"))


class VerifierSettings(TorchSettings):
    """The verifier: one target and its KV cache."""

    target: ModelFolder = setting("", "folder, or GGUF file, of a Hugging Face causal LM")
    name: Annotated[str, AfterValidator(_check_names)] = setting(
        "", "what clients call the target, names with commas between; empty: the folder's name"
    )
    kv_tokens: int = setting(
        65_536,
        "KV capacity, tokens; the default takes at most half of what the weights leave free, 0 all of that half, on "
        "CUDA what weights and heads leave of 0.9 of the device",
        ge=0,
    )
    prefix_cache: float = setting(1.0, "share of kv_tokens that may keep texts for later requests", ge=0, le=1)
    generation_config: Literal["serve", "ignore"] = setting(
        "serve", "refuse what the target's generation_config.json sets and is not served, or ignore all but ids of ends"
    )
    invariant: bool = setting(False, "compute each row alike whatever is beside it: exact in bfloat16 too")
    prune: bool = setting(True, "time forwards and leave out draft nodes that cost more than they promise")
    drafters: Annotated[list[str], AfterValidator(_check_heads)] = setting(
        [], "NAME=KIND[:DIR] of each head in this process, at its address; section drafter holds for all"
    )
    ranks: int = setting(1, "processes that share the target, on CUDA with a device each", ge=1, le=64)

    @field_validator("ranks")
    @classmethod
    def _ranks_have_devices(cls, ranks: int, info: ValidationInfo) -> int:
        if ranks > 1 and (device := info.data.get("device", "cpu")) not in ("cpu", "cuda"):
            raise ValueError(f"are devices from the first on: verifier.device must be cuda or cpu, not {device}")
        return ranks

    @property
    def prefix_cache_tokens(self) -> int:
        """Tokens that the prefix cache holds at most."""
        return int(self.prefix_cache * self.kv_tokens)


class DrafterSettings(TorchSettings):
    """One drafter replica: one head."""

    name: str = setting("", "the pool's name; empty: the kind")
    kind: HeadKind = setting("lookup", f"{', '.join(HEAD_KINDS)}, or what a package adds")
    path: ModelFolder = setting("", "folder of the head's weights")
    target: ModelFolder = setting("", "folder of the target, for heads that read its features or vocabulary")
    verifiers: list[str] = setting([], f"verifiers features may come from: {VERIFIERS}; empty: any")
    kv_tokens: int = setting(65_536, "KV capacity of a head that has any, tokens over all sessions", gt=0)
    top_k: int = setting(
        0, "children of a node; 1: a chain; 0: 8, eagle3 10, dflash and jetspec the budget", ge=0, le=MAX_HEAD_NODES
    )
    depth: int = setting(0, "levels of the deepest draft; 0: 6, eagle3 8, of a block all", ge=0, le=32)
    memory_tokens: int = setting(
        0, "tokens of ended requests that a lookup head keeps for later ones of the same client", ge=0, le=1_000_000
    )


class OrchestratorSettings(Section):
    """The step loop."""

    target: ModelFolder = setting("", "folder with the target's tokenizer; empty: ids only")
    verifiers: list[str] = setting([], f"verifiers: {VERIFIERS}")
    heads: Pairs = setting([], DRAFTERS)
    policy: str = setting("", "default policy; empty: route with two heads, single with one, else plain")
    budget: int = setting(31, "default draft nodes verified a step", ge=0, le=MAX_TREE_NODES)
    draft_deadline_ms: float = setting(0.0, "wait for drafts; 0: max(20, 4 x median draft time), at most 1000", ge=0)
    failover_s: float = setting(60.0, "how long a request waits for a verifier, seconds", gt=0)
    stream_interval: int = setting(1, "steps whose tokens a client is sent together", ge=1, le=64)
    http_port: int = setting(-1, "port of OpenAI's API; 0 takes a free one, -1 serves none", ge=-1, le=65535)
    page: Literal["loopback", "always", "never"] = setting(
        "loopback", "when the HTTP port serves the page: while server.host is loopback, always, or never"
    )
    hosts: list[str] = setting([], "names of this server that HTTP on loopback answers to")
    tokens: str = setting("", "file of clients' bearer tokens, NAME SHA256HEX [SESSIONS] a line; empty: anyone may ask")


class DirectorySettings(Section):
    """Where replicas are found: the registry that they keep themselves in."""

    redis: RedisUrl = setting("", "redis://, rediss:// or unix:// URL of the registry; empty: there is none")


class AdaptationSettings(Section):
    """The way of signals to the adapter: a Redis."""

    redis: RedisUrl = setting("", "redis://, rediss:// or unix:// URL of the adapter's; empty: send nothing")


class AdapterSettings(Section):
    """The adapter: which heads it trains, where, and by which rule."""

    target: ModelFolder = setting("", "folder of the target, whose embedding the heads share")
    heads: Pairs = setting([], "NAME=DIR of each head, its weights as deployed")
    drafters: Pairs = setting([], DRAFTERS)
    folder: str = setting("", "folder for versions and state; empty: a temporary one, forgotten at the end")
    policy: PolicyName = setting(
        "bandit",
        "bandit: variants for kinds of text; paper: SpecBlock's rule, one variant for all; full-only and head-only: "
        "with one action; always: online speculative decoding",
    )
    interval: int = setting(20, "queries that other policies measure before and after an update of as many texts", ge=2)
    cpu_share: float = setting(0.25, "largest share of the time that an update computes", gt=0, le=1)
    device: str = setting("cpu", "torch device of training, such as cpu or cuda:1")
