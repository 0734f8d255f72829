"""What a drafter hears of a session from its verifier: the features of committed positions, and each step's commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import grpc

from coppice.errors import CoppiceError, InvalidField, Unavailable
from coppice.rpc.channels import Dialer
from coppice.rpc.directory import Directory
from coppice.rpc.nearby import NearbyVerifier, Subscription
from coppice.v1.verifier_pb2_grpc import VerifierServiceStub
from coppice.wire.common import FeatureRef, Features
from coppice.wire.verifier import Commit, fetch_to_wire, read_commit, read_feature_part

FETCH_S = 20.0
_MOST_CHANNELS = 64
_LAST_WORDS_S = 1.0


class _Stream:
    """A stream of commits, until the session or the stream ends."""

    def __init__(self, call: grpc.aio.UnaryStreamCall, vocab_size: int, heard: Callable[[Commit], None]) -> None:
        self._call, self._vocab_size, self._heard = call, vocab_size, heard
        self._task = asyncio.create_task(self._listen())

    @property
    def over(self) -> bool:
        """Whether no further commit comes."""
        return self._task.done()

    def close(self) -> None:
        """Hear no more. The call has a moment to end by itself, as it does when the session ends, too."""
        self._heard = lambda commit: None
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._call.cancel)

    async def _listen(self) -> None:
        with suppress(grpc.RpcError, CoppiceError, asyncio.CancelledError):
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._heard(read_commit(message, self._vocab_size))
        self._call.cancel()


async def _window(call: grpc.aio.UnaryStreamCall, ref: FeatureRef) -> Features:
    """The rows of a window. Raises InvalidField unless they end where it does."""
    parts: list[Features] = []
    at, end = ref.start, ref.start + ref.count
    while at < end and (message := await call.read()) is not grpc.aio.EOF:
        part = read_feature_part(message)
        follows = part.start == at if parts else part.start >= at
        if not follows or not part.start < part.start + part.count <= end:
            raise InvalidField("features", f"positions {part.start} and on do not follow {at}")
        at = part.start + part.count
        parts.append(part)
    if at != end:
        raise InvalidField("features", f"end at position {at} instead of {end}")
    start, rows = parts[0].start, b"".join(part.inline or b"" for part in parts)
    return Features(start, end - start, parts[0].dtype, rows)


class FeatureSource:
    """Follows sessions, over one channel to each verifier."""

    def __init__(
        self,
        dialer: Dialer,
        allowed: Directory | None = None,
        vocab_size: int = 0,
        nearby: NearbyVerifier | None = None,
    ) -> None:
        """`allowed` names the addresses that may be dialed; None: all may be. vocab_size: 0 admits any id. nearby: the
        verifier of this process, which is asked without a call.
        """
        self._dialer, self._directory, self._vocab_size, self._nearby = dialer, allowed, vocab_size, nearby
        self._allowed = frozenset(allowed.addresses if allowed else ())
        self._news = asyncio.Event()  # another one for each list of addresses
        self._stubs: dict[str, VerifierServiceStub] = {}

    async def run(self) -> None:
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

    async def follow(
        self, ref: FeatureRef, heard: Callable[[Commit], None], within_s: float = FETCH_S
    ) -> tuple[Features | None, Subscription]:
        """Inline rows up to the window's end, from its start or the first position that the verifier still holds.

        From then on `heard` takes what each step of the session commits. A window of no positions has no rows. Raises
        InvalidField for an address that may not be dialed, Unavailable when the rows do not come.
        """
        try:
            async with asyncio.timeout(within_s):
                return await self._follow(ref, heard)
        except TimeoutError:
            raise Unavailable(f"no features from the verifier at {ref.verifier}: not in {within_s:g} s") from None

    async def _follow(self, ref: FeatureRef, heard: Callable[[Commit], None]) -> tuple[Features | None, Subscription]:
        if self._nearby is not None and ref.verifier == self._nearby.address:
            try:
                return await self._nearby.follow(ref, heard)
            except CoppiceError as error:
                raise Unavailable(f"no features from the verifier of this process: {error}") from None
        await self._check(ref.verifier)
        call = self._stub(ref.verifier).FetchFeatures(fetch_to_wire(ref, follow=True))
        try:
            features = await _window(call, ref) if ref.count else None
        except (grpc.RpcError, CoppiceError) as error:
            call.cancel()
            why = error.details() if isinstance(error, grpc.RpcError) else error
            raise Unavailable(f"no features from the verifier at {ref.verifier}: {why}") from None
        except BaseException:
            call.cancel()
            raise
        return features, _Stream(call, self._vocab_size, heard)

    def _stub(self, address: str) -> VerifierServiceStub:
        if address not in self._stubs:
            if len(self._stubs) == _MOST_CHANNELS:
                del self._stubs[next(iter(self._stubs))]
            self._stubs[address] = VerifierServiceStub(self._dialer.open(address))
        return self._stubs[address]
