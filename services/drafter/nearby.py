"""Drafters in the process of a verifier: each of its heads is a pool's replica at the verifier's own address."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry

from coppice.adaptation.producer import Producer
from coppice.config.settings import Settings
from coppice.engine.batching import BatchingThread
from coppice.errors import InvalidField, Unavailable
from coppice.rpc.channels import HEAD
from coppice.rpc.directory import registration_of
from coppice.rpc.nearby import NearbyVerifier
from coppice.rpc.server import Serving
from coppice.telemetry import SessionMetrics, SignalMetrics
from coppice.v1 import drafter_pb2

from .pool import ServedHead
from .service import DrafterServicer


class Drafters:
    """DrafterService of several heads: a call's metadata name the one that it is for."""

    def __init__(
        self,
        settings: Settings,
        registry: CollectorRegistry,
        serving: Serving,
        nearby: NearbyVerifier,
        host: BatchingThread,
    ) -> None:
        """registry: of the process's metrics; serving, nearby and host: the verifier's. Raises InvalidField."""
        metrics = SessionMetrics("drafter", registry)
        each = settings.nearby_drafters()
        self._producer = Producer(settings.adaptation, SignalMetrics(registry), list(each))
        self._sends = bool(settings.adaptation.redis)
        self._heads = {
            name: ServedHead(own, metrics, self._producer, serving.waits, nearby, host) for name, own in each.items()
        }
        found = [registration_of(settings, "drafter", name) for name in each]
        serving.registrations += [registration for registration in found if registration is not None]

    async def start(self) -> None:
        """Load the heads. Raises what a head's builder raises."""
        for head in self._heads.values():
            await head.start()
        if self._sends:
            self._producer.start()

    async def stop(self) -> None:
        """End them."""
        for head in self._heads.values():
            await head.stop()
        await self._producer.stop()

    def Draft(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """One session of a head."""
        return self._named(context).Draft(requests, context)

    async def DescribeHead(
        self, request: drafter_pb2.DescribeHeadRequest, context: grpc.aio.ServicerContext
    ) -> drafter_pb2.DescribeHeadResponse:
        """What a head is."""
        return await self._named(context).DescribeHead(request, context)

    async def SyncWeights(
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext
    ) -> drafter_pb2.SyncWeightsResponse:
        """One push of weights to a head."""
        return await self._named(context).SyncWeights(requests, context)

    def _named(self, context: grpc.aio.ServicerContext) -> DrafterServicer:
        """The head that a call names; it need not where there is only one. Raises InvalidField, Unavailable."""
        names = [value.decode(errors="replace") for key, value in context.invocation_metadata() or () if key == HEAD]
        only = next(iter(self._heads)) if len(self._heads) == 1 else ""
        name = names[0] if names else only
        if name not in self._heads:
            raise InvalidField(HEAD, f"names {name!r}; here are {', '.join(self._heads)}")
        head = self._heads[name]
        if head.worker.failed.is_set():
            raise Unavailable(f"the head {name} has failed")
        return head.servicer
