"""The pipeline as a Ray Serve application: a deployment for each drafter pool, one of verifiers, one of orchestrators.

A replica is an actor that keeps one service process. Processes find each other in the registry of `directory.redis` and
talk over gRPC streams of their own, so no step passes through Ray: it places, watches, replaces and scales them, by the
sessions they say they hold, and its gRPC proxy is a front door.
"""

from __future__ import annotations

import contextlib
import logging
import math
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Self

import grpc.aio
import ray
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.serve.grpc_util import RayServegRPCContext

from coppice.config.sections import FEATURE_KINDS, HeadKind
from coppice.config.settings import load_settings
from coppice.errors import CoppiceError, InvalidField
from coppice.rpc.access import is_loopback
from coppice.rpc.channels import Dialer, Metadata, Stub
from coppice.stack.launch import MODULES
from coppice.stack.process import ProcessFailed, Ready, ServiceProcess, checkout
from coppice.stack.spec import MAX_REPLICAS, WEIGHED_KINDS
from coppice.telemetry import metric
from coppice.v1 import generation_pb2

_log = logging.getLogger("ray.serve")  # a replica's own log
_LOG_BYTES, _LOG_POLL_S = 1 << 20, 0.2
_STOP_S = 10.0  # what a process that is told to end may take beyond its grace
_MISSING = 3  # what a process ends with when a service it needs does not answer
_HEALTH_S, _ANSWER_S = 2.0, 5.0  # between two looks, and for an answer; Serve gives a replica up at the third failure
_CALLS = 10_000  # under way in one ingress; how many may be is for orchestrators to say


Sections = dict[str, dict[str, Any]]
"""Settings by section and name, as in a service's YAML file, which are checked when the application is built"""


class FrontDoor(BaseModel):
    """The replicas of the ingress, which passes calls on to orchestrators."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    replicas: int | None = Field(None, ge=1, le=MAX_REPLICAS, description="how many; empty: 1, or as scaled")
    ray_actor_options: dict[str, Any] = Field(
        default_factory=dict, description="what Ray gives each replica: num_cpus, num_gpus, resources, runtime_env"
    )


class Pool(FrontDoor):
    """The replicas of one deployment: a fixed number, or as many as their sessions ask for."""

    min_replicas: int = Field(1, ge=1, le=MAX_REPLICAS, description="fewest, where max_replicas is given")
    max_replicas: int | None = Field(None, ge=1, le=MAX_REPLICAS, description="most; empty: the number is fixed")
    sessions_per_replica: float = Field(32.0, gt=0, description="sessions that a replica is meant to hold")
    upscale_delay_s: float = Field(10.0, ge=0, description="how long more replicas must be wanted, seconds")
    downscale_delay_s: float = Field(300.0, ge=0, description="how long fewer replicas must be wanted, seconds")
    look_back_s: float = Field(15.0, gt=10, description="time over which sessions are averaged, seconds")
    settings: Sections = Field(default_factory=dict, description="settings of these replicas, over the common ones")

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        if self.max_replicas is None:
            if "min_replicas" in self.model_fields_set:
                raise ValueError("min_replicas: is of use with max_replicas only")
        elif self.replicas is not None:
            raise ValueError("replicas: max_replicas says that the number is not fixed")
        return self


class DrafterPool(Pool):
    """The replicas of one head."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="the head's name")
    kind: HeadKind = Field("lookup", description="kind of head")
    path: str = Field("", description="folder of the head's weights, seen from the checkout")

    @model_validator(mode="after")
    def _has_weights(self) -> Self:
        if not self.path and self.kind in WEIGHED_KINDS:
            raise ValueError(f"path: a head of kind {self.kind} has a folder")
        return self


class Args(BaseModel):
    """What the application is told: `args` in a Serve config file. An unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str = Field(min_length=1, description="folder of the target, seen from the checkout")
    settings: Sections = Field(default_factory=dict, description="settings of every process; directory.redis is needed")
    verifier: Pool = Pool()
    drafters: list[DrafterPool] = Field(default_factory=list, description="one deployment each")
    orchestrator: Pool = Pool()
    ingress: FrontDoor = FrontDoor()
    ready_s: float = Field(300.0, gt=0, description="how long a process may take to load, seconds")

    @model_validator(mode="after")
    def _heads_differ(self) -> Self:
        names = [drafter.name for drafter in self.drafters]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"drafters: {min(twice)} occurs twice")
        return self


def scale_by_sessions(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Serve's policy: replicas for all sessions held, averaged over the look-back; Serve applies delays and bounds. A
    replica that has not said yet what it holds is busy: nothing is taken away meanwhile.
    """
    sessions = (context.aggregated_metrics or {}).get("sessions", {})
    replicas = math.ceil(round(sum(sessions.values()) / context.config.target_ongoing_requests, 3))
    if sessions.keys() >= set(context.running_replicas):
        return replicas, {}
    return max(replicas, context.target_num_replicas), {}


class ServiceReplica:
    """One service process, kept as Serve expects: it is up when this is constructed, and down when that is deleted."""

    def __init__(self, name: str, role: str, flags: Mapping[str, Any], sections: Sections, ready_s: float) -> None:
        """`flags` hold over variables, and those over `sections`. Raises ProcessFailed with the end of its log."""
        self._role, self._draining = role, False
        self._grace_s = load_settings([], sections).server.grace_s
        self._folder = tempfile.TemporaryDirectory(prefix="coppice-")
        folder = Path(self._folder.name)
        file = folder / "settings.yaml"  # not flags, which others on the machine could read
        node, server = ray.util.get_node_ip_address(), sections.get("server", {})
        host = server.get("host", node)
        server = {"host": host, "advertise": "" if is_loopback(host) else node, **server}  # where others find it
        file.write_text(yaml.safe_dump({**sections, "server": server}), encoding="utf-8")
        self._process = ServiceProcess(name, role, MODULES[role], {**flags, "config": file}, folder)
        self._process.start()
        self._relay = threading.Thread(target=_relay, args=(self._process.log_file,), name="relay", daemon=True)
        self._relay.start()
        try:
            self._ready = self._wait_ready(time.monotonic() + ready_s)
        except BaseException:
            self._process.stop(0)
            raise
        file.unlink()

    def _wait_ready(self, until: float) -> Ready:
        """Start it again while it misses a verifier that still loads: Serve gives up what fails to start too often."""
        while True:
            try:
                return self._process.wait_ready(until)
            except ProcessFailed:
                if self._process.exit_code != _MISSING or time.monotonic() > until:
                    raise
            self._process.start()

    def address(self) -> str:
        """Where its gRPC server is, HOST:PORT."""
        return self._ready.address

    def check_health(self) -> None:
        """Raises ProcessFailed when the process has ended or says that it does not serve: Serve replaces it."""
        self._process.check(_ANSWER_S)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `scale_by_sessions` is told: sessions; an orchestrator's requests, waiting ones too. Raises OSError."""
        if self._draining:
            return {}
        metrics, counters = self._ready.metrics, f"coppice_{self._role}_sessions"
        if self._role == "orchestrator":
            return {"sessions": sum(metric(metrics, f"vllm:num_requests_{state}") for state in ("running", "waiting"))}
        return {"sessions": metric(metrics, f"{counters}_opened_total") - metric(metrics, f"{counters}_closed_total")}

    def __del__(self) -> None:
        """Drain: SIGTERM, and as long as requests may take to end. Serve calls it, then perhaps the interpreter."""
        if hasattr(self, "_process"):
            self._draining = True
            self._process.stop(self._grace_s + _STOP_S)
            self._folder.cleanup()
            self._relay.join(10 * _LOG_POLL_S)


def _relay(file: Path) -> None:
    """Copy what is written to a file into the replica's own log, and keep the file short, until it is deleted."""
    with file.open("r+", encoding="utf-8", errors="replace") as log:
        ended = False
        while not ended:
            ended = not file.exists()
            while line := log.readline():
                _log.info(line.rstrip())
            if log.tell() > _LOG_BYTES:
                log.truncate(0)
                log.seek(0)
            time.sleep(_LOG_POLL_S)


class Ingress:
    """GenerationService behind Serve's gRPC proxy: each call goes on to some orchestrator, whose status comes back."""

    def __init__(self, orchestrators: Any, others: list[Any], sections: Sections) -> None:
        """`orchestrators` is their handle; `others` are the handles of what is deployed beside them."""
        self._orchestrators = orchestrators
        settings = load_settings([], sections)
        self._dialer = Dialer(settings.tls)

    async def Generate(
        self, request: generation_pb2.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        async with self._orchestrator(grpc_context) as (stub, metadata):
            async for response in stub.Generate(request, metadata=metadata):
                yield response

    async def DescribeModel(
        self, request: generation_pb2.DescribeModelRequest, grpc_context: RayServegRPCContext
    ) -> generation_pb2.DescribeModelResponse:
        async with self._orchestrator(grpc_context) as (stub, metadata):
            return await stub.DescribeModel(request, metadata=metadata)  # type: ignore[no-any-return]

    @contextlib.asynccontextmanager
    async def _orchestrator(self, context: RayServegRPCContext) -> AsyncIterator[tuple[Stub, Metadata]]:
        """Pick an orchestrator for a call, with the caller's bearer token, and map its error for the caller."""
        address = await self._orchestrators.address.remote()
        channel = self._dialer.open(address)
        try:
            token = tuple((key, value) for key, value in context.invocation_metadata() if key == "authorization")
            yield Stub(channel, generation_pb2), token
        except grpc.aio.AioRpcError as error:
            context.set_code(error.code())
            context.set_details(error.details() or "")
            raise CoppiceError(str(error.details())) from None  # one that another process can read
        finally:
            await channel.close()


def _deployed(
    args: Args, name: str, role: str, pool: Pool, defaults: Sections, flags: Mapping[str, Any]
) -> serve.Application:
    """One deployment. Settings of the pool hold over those of all, and those over the defaults. Raises InvalidField."""
    sections: Sections = {}
    for each in (defaults, args.settings, pool.settings):
        for section, values in each.items():
            sections[section] = {**sections.get(section, {}), **values}
    server = load_settings([], sections).server
    size: dict[str, Any] = {"num_replicas": pool.replicas or 1}
    if pool.max_replicas is not None:
        if server.metrics_port < 0:
            raise InvalidField("server.metrics_port", f"{name} is scaled by what it says there")
        scaling = AutoscalingConfig(
            min_replicas=pool.min_replicas,
            max_replicas=pool.max_replicas,
            target_ongoing_requests=pool.sessions_per_replica,
            upscale_delay_s=pool.upscale_delay_s,
            downscale_delay_s=pool.downscale_delay_s,
            look_back_period_s=pool.look_back_s,
            policy=AutoscalingPolicy(policy_function=scale_by_sessions),
        )
        size = {"autoscaling_config": scaling}
    deployment = serve.deployment(ServiceReplica).options(
        name=name,
        ray_actor_options=pool.ray_actor_options,
        health_check_period_s=_HEALTH_S,
        graceful_shutdown_timeout_s=server.grace_s + 2 * _STOP_S,
        **size,
    )
    return deployment.bind(name, role, flags, sections, args.ready_s)


def _folder(field: str, folder: str) -> str:
    """A folder of models, as every replica finds it. Raises InvalidField."""
    root = checkout()
    if root is None and not Path(folder).is_absolute():
        raise InvalidField(field, f"{folder} is not absolute, and there is no checkout to see it from")
    return str((root or Path()) / folder)


def build(args: Args) -> serve.Application:
    """The application, for `serve run` and RayService. Raises pydantic.ValidationError, InvalidField."""
    args = Args.model_validate(args)  # Serve hands over a dict: it does not read annotations that are text
    target = _folder("target", args.target)
    others = [_deployed(args, "verifier", "verifier", args.verifier, {"verifier": {"target": target}}, {})]
    for pool in args.drafters:
        defaults: Sections = {"drafter": {"target": target}}
        if pool.kind in FEATURE_KINDS:
            defaults["drafter"]["verifiers"] = ["redis"]
        flags = {"drafter.name": pool.name, "drafter.kind": pool.kind}
        if pool.path:
            flags["drafter.path"] = _folder("path", pool.path)
        others.append(_deployed(args, f"drafter-{pool.name}", "drafter", pool, defaults, flags))
    heads = [f"{pool.name}=redis" for pool in args.drafters]
    defaults = {"orchestrator": {"target": target, "verifiers": ["redis"], "heads": heads}}
    orchestrators = _deployed(args, "orchestrator", "orchestrator", args.orchestrator, defaults, {})
    door = serve.deployment(Ingress).options(
        name="ingress",
        num_replicas=args.ingress.replicas or 1,
        ray_actor_options=args.ingress.ray_actor_options,
        max_ongoing_requests=_CALLS,
        graceful_shutdown_timeout_s=load_settings([], args.settings).server.grace_s + _STOP_S,
    )
    return door.bind(orchestrators, others, args.settings)
