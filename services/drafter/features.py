"""The target's features of a session's committed positions, fetched from the verifier that holds them."""

from __future__ import annotations

import asyncio

import grpc

from coppice.errors import CoppiceError, InvalidField, Unavailable
from coppice.messages.steps import FeatureRef, Features
from coppice.rpc.channels import Dialer
from coppice.rpc.directory import Directory
from coppice.rpc.tracing import metadata
from coppice.v1.verifier_pb2_grpc import VerifierServiceStub
from coppice.wire.verifier import fetch_to_wire, read_feature_part

FETCH_S = 20.0
_MOST_CHANNELS = 64


class FeatureSource:
    """Fetches windows of features, over one channel to each verifier."""

    def __init__(self, dialer: Dialer, allowed: Directory | None = None) -> None:
        """`allowed` names the addresses that may be dialed; None: all may be."""
        self._dialer, self._directory = dialer, allowed
        self._allowed = frozenset(allowed.addresses if allowed else ())
        self._news = asyncio.Event()  # another one for each list of addresses
        self._stubs: dict[str, VerifierServiceStub] = {}

    async def follow(self) -> None:
        """Let what may be dialed be what the directory names, until cancelled."""
        if self._directory is not None:
            await self._directory.run(self._allow)

    def _allow(self, addresses: tuple[str, ...]) -> None:
        self._allowed = frozenset(addresses)
        for gone in self._stubs.keys() - self._allowed:
            del self._stubs[gone]
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _check(self, address: str) -> None:
        """Raise InvalidField for one that may not be dialed. One that the directory does not name yet has a moment."""
        if self._directory is None:
            return
        try:
            async with asyncio.timeout(self._directory.news_s):
                while address not in self._allowed:
                    await self._news.wait()
        except TimeoutError:
            raise InvalidField("open.features.ref.verifier", "is not one of drafter.verifiers") from None

    async def fetch(self, ref: FeatureRef) -> Features:
        """Inline rows up to the window's end, from its start or the first position that the verifier still holds.

        Raises InvalidField for an address that may not be dialed, Unavailable when the rows do not come.
        """
        await self._check(ref.verifier)
        try:
            return await self._fetch(ref)
        except (grpc.RpcError, CoppiceError) as error:
            why = error.details() if isinstance(error, grpc.RpcError) else error
            raise Unavailable(f"no features from the verifier at {ref.verifier}: {why}") from None

    async def _fetch(self, ref: FeatureRef) -> Features:
        stub = self._stub(ref.verifier)
        call = stub.FetchFeatures(fetch_to_wire(ref), timeout=FETCH_S, metadata=metadata())
        parts: list[Features] = []
        at, end = ref.start, ref.start + ref.count
        try:
            async for message in call:
                part = read_feature_part(message)
                follows = part.start == at if parts else part.start >= at
                if not follows or not part.start < part.start + part.count <= end:
                    raise InvalidField("features", f"positions {part.start} and on do not follow {at}")
                at = part.start + part.count
                parts.append(part)
        finally:
            call.cancel()
        if not parts or at != end:
            raise InvalidField("features", f"end at position {at} instead of {end}")
        start, rows = parts[0].start, b"".join(part.inline or b"" for part in parts)
        return Features(start, end - start, parts[0].dtype, rows)

    def _stub(self, address: str) -> VerifierServiceStub:
        if address not in self._stubs:
            if len(self._stubs) == _MOST_CHANNELS:
                del self._stubs[next(iter(self._stubs))]
            self._stubs[address] = VerifierServiceStub(self._dialer.open(address))
        return self._stubs[address]
