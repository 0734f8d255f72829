"""The target's features of a session's committed positions, fetched from the verifier that holds them."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from coppice.errors import CoppiceError, InvalidField, Unavailable
from coppice.messages import FeatureRef, Features
from coppice.rpc.channels import Dialer
from coppice.v1.verifier_pb2_grpc import VerifierServiceStub
from coppice.wire.verifier import fetch_to_wire, read_feature_part

FETCH_S = 20.0
_MOST_CHANNELS = 64


class FeatureSource:
    """Fetches windows of features, over one channel to each verifier."""

    def __init__(self, allowed: Sequence[str], dialer: Dialer) -> None:
        """`allowed` are the addresses that may be dialed, all when there is none."""
        self._allowed, self._dialer = frozenset(allowed), dialer
        self._stubs: dict[str, VerifierServiceStub] = {}

    async def fetch(self, ref: FeatureRef) -> Features:
        """Inline rows up to the window's end, from its start or the first position that the verifier still holds.

        Raises InvalidField for an address that may not be dialed, Unavailable when the rows do not come.
        """
        if self._allowed and ref.verifier not in self._allowed:
            raise InvalidField("open.features.ref.verifier", "is not one of drafter.verifiers")
        try:
            return await self._fetch(ref)
        except (grpc.RpcError, CoppiceError) as error:
            why = error.details() if isinstance(error, grpc.RpcError) else error
            raise Unavailable(f"no features from the verifier at {ref.verifier}: {why}") from None

    async def _fetch(self, ref: FeatureRef) -> Features:
        stub = self._stub(ref.verifier)
        call = stub.FetchFeatures(fetch_to_wire(ref), timeout=FETCH_S)
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
