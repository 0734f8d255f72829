"""Settings of every process: flag, then COPPICE_SECTION__NAME, then YAML, then default."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    YamlConfigSettingsSource,
)

from coppice.adaptation.bandit import BanditSettings
from coppice.adaptation.drift import DriftSettings
from coppice.errors import InvalidField
from coppice.failpoints import parse as parse_failpoints
from coppice.limits import MAX_HEAD_NODES, MAX_TOP_N, MAX_TREE_NODES, MAX_WINDOW, Limits
from coppice.rpc.certificates import TlsSettings

# Variables that are no settings of a section: read by the SDK, the test suite and load_settings.
_OTHER_VARIABLES = frozenset(
    {"COPPICE_ADAPTER_ADDRESS", "COPPICE_ADDRESS", "COPPICE_CONFIG", "COPPICE_PROOF", "COPPICE_TOKEN"}
)

HeadKind = Literal["bigram", "lookup", "lm", "eagle3", "specblock", "medusa", "parallelspec", "falcon"]
FEATURE_KINDS: tuple[HeadKind, ...] = ("eagle3", "specblock", "medusa", "parallelspec", "falcon")
"""Heads that read the target's features."""
ADAPTED_KINDS: tuple[HeadKind, ...] = ("eagle3", "specblock")
"""Those of them that an adapter can train while they serve."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _pairs(pairs: list[str], form: str) -> list[str]:
    """The same, each with something on both sides of its first equals sign. Raises ValueError saying the form."""
    for pair in pairs:
        name, _, value = pair.partition("=")
        if not name or not value:
            raise ValueError(f"{pair!r} is not {form}")
    return pairs


class ServerSettings(_Section):
    """How a process listens and stops."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    health_port: int = Field(0, ge=0, le=65535, description="plaintext gRPC health port; 0 takes a free one")
    metrics_port: int = Field(0, ge=-1, le=65535, description="Prometheus port; 0 takes a free one, -1 serves none")
    advertise: str = Field(
        "", description="host that others reach this one by, and that a registry is told; empty: host"
    )
    ready_file: str = Field("", description="file to write addresses to once ready")
    grace_s: float = Field(90.0, ge=0, description="how long a stopping server lets requests finish, seconds")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe line logged")
    log_json: bool = Field(False, description="log JSON lines instead of text")
    production: bool = Field(False, description="whether people depend on this process: failpoints are refused")
    failpoints: str = Field("", description="NAME=VALUE;... of coppice.failpoints: how to misbehave, for tests")

    @field_validator("failpoints")
    @classmethod
    def _failpoints_exist(cls, failpoints: str, info: ValidationInfo) -> str:
        if parse_failpoints(failpoints) and info.data.get("production"):
            raise ValueError("are refused in production")
        return failpoints


class TorchSettings(_Section):
    """Where and how a process computes."""

    device: str = Field("cpu", description="torch device, such as cpu or cuda:0")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of weights and KV")
    threads: int = Field(0, ge=0, le=1024, description="torch threads; 0 lets torch choose")


class VerifierSettings(TorchSettings):
    """The verifier: one target and its KV cache."""

    target: str = Field("", description="folder of a Hugging Face causal LM")
    name: str = Field("", description="name shown to clients; empty: the folder's name")
    kv_tokens: int = Field(65_536, gt=0, description="KV capacity, tokens over all sessions")
    block_size: int = Field(32, gt=0, description="tokens of one KV block")
    prefill_rows: int = Field(512, gt=0, description="prompt rows added to one forward at most")
    batch_wait_ms: float = Field(50.0, ge=0, description="longest wait for sessions to join a forward, milliseconds")
    feature_window: int = Field(4096, ge=0, description="positions whose features a session keeps for fetching")
    prune: bool = Field(True, description="time forwards and leave out draft nodes that cost more than they promise")


class DrafterSettings(TorchSettings):
    """One drafter replica: one head."""

    name: str = Field("", description="the pool's name; empty: the kind")
    kind: HeadKind = Field("lookup", description="kind of head")
    path: str = Field("", description="folder of the head's weights; for bigram a JSON list of texts as ids")
    target: str = Field("", description="folder of the target, for heads that read its features")
    verifiers: list[str] = Field(
        default_factory=list,
        description="verifiers features may come from: HOST:PORT, dns:HOST:PORT or redis; empty: any",
    )
    vocab_size: int = Field(0, ge=0, description="the target's vocabulary width; 0: any id will do, for lm its own")
    kv_tokens: int = Field(65_536, gt=0, description="KV capacity of a head that has any, tokens over all sessions")
    top_k: int = Field(0, ge=0, le=MAX_HEAD_NODES, description="candidates kept per node of a tree; 0: 8, eagle3 10")
    depth: int = Field(0, ge=0, le=32, description="deepest draft; 0: 6, eagle3 7")
    chain: bool = Field(False, description="draft a single chain instead of a tree")
    blocks: int = Field(2, gt=0, le=4, description="forwards of a specblock or falcon draft")
    widths: tuple[int, int, int, int] = Field(
        (2, 4, 6, 10), description="tokens a specblock slot branches into, by the rank head's bucket; 0 ends the block"
    )
    rank_guided: bool = Field(
        True, description="whether the rank head decides widths and starts; else every slot has widths[1] tokens"
    )
    max_context: int = Field(0, ge=0, description="positions a session may hold; 0: the model's own limit")

    def of_kind(self) -> DrafterSettings:
        """The same with top_k and depth filled in; EAGLE-3's are those it was published with. A chain has no width."""
        top_k, depth = (10, 7) if self.kind == "eagle3" else (8, 6)
        told = {"top_k": self.top_k or top_k, "depth": self.depth or depth}
        narrow = {"top_k": 1, "widths": (1, 1, 1, 1), "rank_guided": False}
        return self.model_copy(update=told | (narrow if self.chain else {}))


class OrchestratorSettings(_Section):
    """The step loop."""

    target: str = Field("", description="folder with the target's tokenizer; empty: ids only")
    verifiers: list[str] = Field(default_factory=list, description="verifiers: HOST:PORT, dns:HOST:PORT or redis")
    heads: list[str] = Field(
        default_factory=list, description="NAME=HOST:PORT of each drafter, NAME=dns:HOST:PORT or NAME=redis of them all"
    )
    policy: str = Field("", description="default policy; empty: route with two heads, single with one, else plain")
    budget: int = Field(31, ge=0, le=MAX_TREE_NODES, description="default draft nodes verified a step")
    max_new_tokens: int = Field(256, gt=0, description="default limit of new tokens")
    draft_deadline_ms: float = Field(
        0.0, ge=0, description="wait for drafts; 0: max(20, 4 x median draft time), at most 1000"
    )
    failover_s: float = Field(60.0, gt=0, description="how long a request waits for a verifier, seconds")
    reopens: int = Field(4, gt=0, description="lost sessions that are prefilled again at once; others wait")
    chunk_tokens: int = Field(
        0, ge=0, description="tokens of every chunk sent, so that its size tells nothing; 0: those of a step"
    )
    tokens: str = Field(
        "", description="file of clients' bearer tokens, NAME SHA256HEX [SESSIONS] a line; empty: anyone may ask"
    )

    @field_validator("heads")
    @classmethod
    def _heads_name_addresses(cls, heads: list[str]) -> list[str]:
        return _pairs(heads, "NAME=HOST:PORT, NAME=dns:HOST:PORT or NAME=redis")


class RedisSettings(_Section):
    """A Redis, and what is ours in it."""

    redis: str = Field("", description="redis://, rediss:// or unix:// URL; empty: none")
    redis_ca: str = Field(
        "", description="file with the authority of a rediss:// server (PEM); empty: those of the system"
    )
    prefix: str = Field("coppice", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="what every Redis key begins with")
    timeout_s: float = Field(1.0, gt=0, description="how long Redis may take to answer, seconds")

    @field_validator("redis")
    @classmethod
    def _redis_is_a_url(cls, url: str) -> str:
        if url and not url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("is not a redis://, rediss:// or unix:// URL")  # not shown: it may hold a password
        return url

    @field_validator("redis_ca")
    @classmethod
    def _redis_ca_is_of_use(cls, file: str, info: ValidationInfo) -> str:
        if file and not info.data.get("redis", "").startswith("rediss://"):
            raise ValueError("is of use with a rediss:// URL only")
        if file and not Path(file).is_file():
            raise ValueError(f"no such file: {file}")
        return file


class DirectorySettings(RedisSettings):
    """Where replicas are found: the registry that they keep themselves in, and how often one looks."""

    redis: str = Field("", description="URL of the Redis with the registry of replicas; empty: there is none")
    lease_s: float = Field(3.0, ge=0.2, le=60, description="how long the registry believes a replica, seconds")
    poll_s: float = Field(1.0, ge=0.05, le=60, description="time between two looks at a registry or at DNS, seconds")


class AdaptationSettings(RedisSettings):
    """What is told to the adapter, by way of Redis."""

    redis: str = Field("", description="redis://, rediss:// or unix:// URL of the adapter's Redis; empty: tell nothing")
    queue_entries: int = Field(4096, gt=0, description="records waiting to be sent; more are dropped and counted")
    queue_bytes: int = Field(64 << 20, gt=0, description="the same in bytes")
    entry_bytes: int = Field(8 << 20, gt=0, description="largest record, bytes; larger ones are dropped and counted")
    bytes_per_s: int = Field(32 << 20, gt=0, description="bytes sent a second; what exceeds it is dropped and counted")
    queries_kept: int = Field(10_000, gt=0, description="query records a stream keeps, about")
    samples_kept: int = Field(4096, gt=0, description="training samples a stream keeps, about")
    stream_bytes: int = Field(256 << 20, gt=0, description="bytes of training samples a stream keeps, about")
    window: int = Field(64, gt=1, le=MAX_WINDOW, description="positions of a full training sample")
    stride: int = Field(32, gt=0, description="least positions between the full samples of one session")
    top_n: int = Field(32, ge=0, le=MAX_TOP_N, description="the target's likeliest ids told with a rejection")


class AdapterSettings(_Section):
    """The adapter: which heads it trains, where, and what it keeps."""

    target: str = Field("", description="folder of the target, whose embedding the heads share")
    heads: list[str] = Field(default_factory=list, description="NAME=DIR of each head, its weights as deployed")
    drafters: list[str] = Field(
        default_factory=list, description="NAME=HOST:PORT of each drafter, NAME=dns:HOST:PORT or NAME=redis of them all"
    )
    lease_s: float = Field(10.0, ge=0.5, le=300, description="how long after the active adapter another one takes over")
    folder: str = Field("", description="folder for versions and state; empty: a temporary one, forgotten at the end")
    versions_kept: int = Field(8, ge=2, description="weight versions kept on disk for each head")
    canary: bool = Field(True, description="whether new weights go to one replica first, where there are several")
    head_samples: int = Field(256, gt=0, description="samples of a head-only update")
    full_samples: int = Field(32, gt=0, description="samples of a full update")
    threads: int = Field(1, ge=1, le=1024, description="torch threads of training")
    nice: int = Field(19, ge=0, le=19, description="how far training yields to others on the machine's cores")
    poll_s: float = Field(2.0, gt=0, description="time between two looks at the replicas, seconds")

    @field_validator("heads", "drafters")
    @classmethod
    def _are_pairs(cls, pairs: list[str]) -> list[str]:
        return _pairs(pairs, "NAME=VALUE")


class LearnerSettings(_Section):
    """How an update learns. Rates are AdamW's."""

    head_rate: float = Field(1e-4, gt=0, description="learning rate of head-only updates")
    full_rate: float = Field(1e-3, gt=0, description="learning rate of full updates")
    head_passes: int = Field(1, gt=0, description="times that a head-only update reads its samples")
    full_passes: int = Field(2, gt=0, description="times that a full update reads its samples")
    batch: int = Field(8, gt=0, description="samples of each optimiser step")
    clip: float = Field(0.5, gt=0, description="largest norm of a gradient")
    penalty: float = Field(0.01, ge=0, description="lambda, weight of the KL to the head as it was deployed")
    blocks: int = Field(1, gt=0, le=4, description="blocks that a SpecBlock head learns from each row")
    steps: int = Field(7, gt=0, le=32, description="steps that an EAGLE-3 head learns from each row")
    every: int = Field(3, gt=0, description="later blocks start from every so many rows")
    valid_prefix: bool = Field(False, description="whether a slot learns only behind right ones (equation 5)")
    device: str = Field("cpu", description="torch device, such as cpu or cuda:1")
    seed: int = Field(0, ge=0, description="seed of the order of samples")


class Settings(BaseSettings):
    """Everything a Coppice process can be told; each process reads the sections it uses."""

    model_config = SettingsConfigDict(
        env_prefix="COPPICE_",
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        nested_model_default_partial_update=True,
    )

    server: ServerSettings = ServerSettings()
    tls: TlsSettings = TlsSettings()
    limits: Limits = Limits()
    verifier: VerifierSettings = VerifierSettings()
    drafter: DrafterSettings = DrafterSettings()
    directory: DirectorySettings = DirectorySettings()
    orchestrator: OrchestratorSettings = OrchestratorSettings()
    adaptation: AdaptationSettings = AdaptationSettings()
    adapter: AdapterSettings = AdapterSettings()
    bandit: BanditSettings = BanditSettings()
    drift: DriftSettings = DriftSettings()
    learner: LearnerSettings = LearnerSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags come first (pydantic-settings puts them before these), then variables, then the YAML file."""
        yaml = YamlConfigSettingsSource(settings_cls, yaml_file=os.environ.get("COPPICE_CONFIG") or None)
        return init_settings, env_settings, yaml


def _sections() -> dict[str, type[BaseModel]]:
    models = {name: field.annotation for name, field in Settings.model_fields.items()}
    return {name: model for name, model in models.items() if isinstance(model, type) and issubclass(model, BaseModel)}


def _no_such(what: str, known: Iterable[str], near_to: str | None = None) -> InvalidField:
    """The error for a name that is no setting, with the nearest one that is."""
    near = difflib.get_close_matches(near_to or what, list(known), n=1)
    return InvalidField(what, f"no such setting{f'; did you mean {near[0]}?' if near else ''}")


def _check_variables() -> None:
    """pydantic-settings ignores variables it does not know; a typo must not pass silently."""
    known = _OTHER_VARIABLES | {
        f"COPPICE_{section}__{name}".upper() for section, model in _sections().items() for name in model.model_fields
    }
    for variable in os.environ:
        if variable.upper().startswith("COPPICE_") and variable.upper() not in known:
            raise _no_such(variable, known, variable.upper())


def _check_flags(arguments: Sequence[str]) -> None:
    """argparse would print its usage, which is longer than a screen, and name no neighbour."""
    known = {"-h", "--help", "--config"}
    for section, model in _sections().items():
        known |= {f"--{section}", *(f"--{section}.{name}" for name in model.model_fields)}
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag == "--config":
            raise InvalidField("config", "write --config FILE, once")
        if flag.startswith("--") and flag not in known:
            raise _no_such(flag, known)


def _check_file(file: str) -> None:
    """What YAML itself, or a file that is no mapping, would raise is not for people to read."""
    path = Path(file)
    if not path.is_file():
        raise InvalidField("config", f"no such file: {file}")
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidField("config", f"{file} is no YAML: {' '.join(str(error).split())}") from None
    if found is not None and not isinstance(found, dict):
        raise InvalidField("config", f"{file} is not a mapping of sections")


def _explained(error: ValidationError) -> InvalidField:
    """The first thing that is wrong, by its setting's name."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"]]
    if first["type"] != "extra_forbidden":
        return InvalidField(".".join(where), first["msg"])
    sections = _sections()
    known = [*sections, *(f"{section}.{name}" for section, model in sections.items() for name in model.model_fields)]
    return _no_such(".".join(where), known)


def _with_defaults(defaults: Mapping[str, Mapping[str, Any]]) -> type[Settings]:
    """Settings whose defaults, by section and name, are these where they are given."""

    class Defaulted(Settings):
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *args: Any, **kwargs: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            last = InitSettingsSource(settings_cls, {name: dict(section) for name, section in defaults.items()})
            return (*super().settings_customise_sources(settings_cls, *args, **kwargs), last)

    return Defaulted


def load_settings(
    arguments: Sequence[str] | None = None, defaults: Mapping[str, Mapping[str, Any]] | None = None
) -> Settings:
    """Read settings from flags (`--section.name VALUE`), the environment and a YAML file (`--config FILE`).

    `defaults`, by section and name, hold where none of these says anything (a launcher's, which knows the machine).
    Raises InvalidField naming the setting when a value, a variable or a key is unusable.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "--config" in arguments[:-1]:
        at = arguments.index("--config")
        os.environ["COPPICE_CONFIG"] = arguments[at + 1]
        del arguments[at : at + 2]
    _check_flags(arguments)
    if file := os.environ.get("COPPICE_CONFIG"):
        _check_file(file)
    _check_variables()
    try:
        return (_with_defaults(defaults) if defaults else Settings)(_cli_parse_args=arguments)
    except ValidationError as error:
        raise _explained(error) from None
    except SettingsError as error:
        value = getattr(error.__cause__, "doc", None)  # of a variable that holds a list
        named = [name for name in os.environ if name.upper().startswith("COPPICE_") and os.environ[name] == value]
        raise InvalidField(named[0] if named else "settings", f"is no JSON: {error}") from None
