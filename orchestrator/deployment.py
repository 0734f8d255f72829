"""What a deployment does, as this orchestrator knows it: what the page looks at once a second."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from coppice.errors import from_rpc_error
from coppice.rpc.channels import Dialer
from coppice.telemetry import head_of
from coppice.v1.adapter_pb2_grpc import AdapterServiceStub
from coppice.wire import adapter

from .drafters import DrafterReplica
from .replicas import Pool, Replica
from .service import GenerationServicer
from .verifiers import VerifierReplica

_ADAPTER_S = 1.0
_NOT_SHOWN = ("_bucket", "_created")  # of histograms and counters


class Deployment:
    """The pools and counts of one orchestrator, and the adapter that settings name."""

    def __init__(self, servicer: GenerationServicer, dialer: Dialer) -> None:
        self._servicer = servicer
        address = servicer.settings.orchestrator.adapter
        self._adapter = AdapterServiceStub(dialer.open(address)) if address else None

    async def look(self) -> dict[str, Any]:
        """What is so now; dataclasses in it are to be written field by field."""
        servicer = self._servicer
        pools: list[Pool[Any]] = [servicer.verifiers, *servicer.heads.values()]
        return {
            "model": servicer.describe(),
            "dtype": servicer.target.dtype,
            "waiting": servicer.seats.waiting,
            "kv_usage": servicer.verifiers.kv_usage,
            "pools": {pool.name: list(map(_replica, pool.replicas)) for pool in pools},
            "metrics": _metrics(servicer.metrics.registry),
            "adapter": await self._look_at_adapter(),
        }

    async def _look_at_adapter(self) -> Any:
        """The status of every head that an adapter trains, why it is not known, or None where there is no adapter."""
        if self._adapter is None:
            return None
        try:
            answer = await self._adapter.GetStatus(adapter.status_request(), timeout=_ADAPTER_S)
        except grpc.RpcError as error:
            return str(from_rpc_error(error))
        return adapter.read_status(answer)


def _replica(replica: Replica) -> dict[str, Any]:
    """One process; `wrong` says why no session goes there, and is empty when some do."""
    wrong = "" if replica.fit else "left alone for a while"
    wrong = "does not answer" if replica.silent else replica.unfit or wrong
    known: dict[str, Any] = {"address": replica.address, "sessions": replica.sessions, "wrong": wrong}
    if isinstance(replica, VerifierReplica):
        known |= {"kv_tokens": replica.kv_tokens, "kv_tokens_used": replica.kv_tokens_used}
    if isinstance(replica, DrafterReplica):
        known |= {"weights_version": replica.weights_version, "suspect": replica.watch.suspect}
    return known


def _metrics(registry: CollectorRegistry) -> dict[str, dict[str, float]]:
    """The values of metrics by name and head (or pool), each the sum over all other labels."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for sample in [sample for metric in registry.collect() for sample in metric.samples]:
        if not sample.name.endswith(_NOT_SHOWN):
            found[sample.name][head_of(sample)] += sample.value
    return found
