"""What the adapter does from its start to its end: load the heads, then adapt them, or stand by."""

import asyncio
import contextlib
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog
import torch
from grpc.aio import ServicerContext
from redis.exceptions import RedisError

from coppice import failpoints, limits
from coppice.adaptation.signals import NUMBER, SENDER, Stream, read_query, read_sample, redis_key
from coppice.adaptation.weights import Weights
from coppice.config.settings import Settings
from coppice.errors import Backoff, InvalidField, NotFound, Unavailable
from coppice.rpc.channels import Dialer
from coppice.rpc.directory import drafter_pools
from coppice.rpc.redis_connection import Connection
from coppice.rpc.server import Serving
from coppice.v1 import adapter_pb2 as pb

from .learn import Learner
from .loop import AdapterMetrics, HeadLoop, Replicas

log = structlog.get_logger()


class AdapterServicer:
    """Hands operators' requests to the loops, which stand by until the lease is theirs."""

    def __init__(self, loops: Sequence[HeadLoop]) -> None:
        self._loops = {loop.name: loop for loop in loops}

    def _chosen(self, head: str, ready: bool = True) -> list[HeadLoop]:
        """Return the loop of a name, or all; `ready`: none stands by. Raises InvalidField, NotFound, Unavailable."""
        if head:
            limits.check_session("head", head)
        if head and head not in self._loops:
            raise NotFound(f"head {head} is not adapted here; there are {', '.join(self._loops)}")
        chosen = [self._loops[head]] if head else list(self._loops.values())
        if ready and not all(loop.ready for loop in chosen):
            raise Unavailable("this adapter stands by: ask the active one")
        return chosen

    async def GetStatus(self, request: pb.GetStatusRequest, context: ServicerContext) -> pb.GetStatusResponse:
        limits.check_range("history", request.history, 0, limits.MAX_HISTORY)
        loops = self._chosen(request.head, ready=False)
        return pb.GetStatusResponse(heads=[loop.status(request.history) for loop in loops])

    async def Pause(self, request: pb.PauseRequest, context: ServicerContext) -> pb.PauseResponse:
        for loop in self._chosen(request.head):
            loop.pause(True)
        return pb.PauseResponse()

    async def Resume(self, request: pb.ResumeRequest, context: ServicerContext) -> pb.ResumeResponse:
        for loop in self._chosen(request.head):
            loop.pause(False)
        return pb.ResumeResponse()

    async def Rollback(self, request: pb.RollbackRequest, context: ServicerContext) -> pb.RollbackResponse:
        """Put earlier weights back on every replica."""
        chosen = self._chosen(request.head)
        if len(chosen) != 1:
            raise InvalidField("head", f"say which: {', '.join(self._loops)}")
        version = await chosen[0].rollback(request.version if request.HasField("version") else None)
        return pb.RollbackResponse(version=version)


_LOOKS = 5  # in the time of a lease, whoever has it

# A hash names the holder, and its time to live says when the lease ends: Redis prolongs that even while it is full. The
# hash outlasts the lease by this long: a holder that was stopped or cut off takes its own lease again, but not when
# somebody else had it meanwhile, for then it does not know what drafters use.
_KEPT_MS = 30 * 24 * 3600 * 1000
_TAKE = """
local holder = redis.call('HGET', KEYS[1], 'token')
local over = not holder or redis.call('PTTL', KEYS[1]) <= tonumber(ARGV[3]) and ARGV[4] == 'any'
if holder ~= ARGV[1] then
  if not over then return 0 end
  redis.call('HSET', KEYS[1], 'token', ARGV[1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[2] + ARGV[3])
return 1
"""
_GIVE_BACK = "if redis.call('HGET', KEYS[1], 'token') == ARGV[1] then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end"
LEASE_KEY = "coppice:adapter"  # the hash with the active adapter's `token`, which expires a month after its lease
LEASE_S = 10.0  # how long after the active adapter another one takes over


class LeaseLost(Exception):
    """Another adapter is the active one."""


class Lease:
    """One process's hold on the lease: `take` or `wait` for it, then `keep` it beside work that asks `held`."""

    def __init__(self, url: str, lease_s: float) -> None:
        self._connection, self._lease_s = Connection(url), lease_s
        self._token = secrets.token_hex(16)
        self._until = 0.0

    def held(self) -> bool:
        """Tell whether the lease surely runs, by this machine's clock: nobody else can have it."""
        return time.monotonic() < self._until

    async def take(self, whose: str = "any") -> bool | None:
        """Take the lease, or only renew one's "own"; returns whether nobody else had it, None: Redis is away."""
        until = time.monotonic() + self._lease_s  # Redis counts from a little later
        arguments = self._token, round(1000 * self._lease_s), _KEPT_MS, whose
        with contextlib.suppress(Unavailable):
            taken = bool(await self._connection.run(_TAKE, LEASE_KEY, *arguments))
            self._until = until if taken else 0.0
            return taken
        return None

    async def wait(self) -> None:
        """Stand by until nobody else has the lease, and take it."""
        while not await self.take():  # noqa: ASYNC110
            await asyncio.sleep(self._lease_s / _LOOKS)

    async def keep(self) -> None:
        """Renew the lease for ever; while Redis is away it may end, and begin again. Raises LeaseLost."""
        had = True
        while True:
            await asyncio.sleep(self._lease_s / _LOOKS)
            if await self.take("own") is False:
                raise LeaseLost("another adapter is the active one")
            if self.held() != had:
                had = self.held()
                log.warning("the lease goes on" if had else "the lease ended; nothing is pushed until redis is back")

    async def give_back(self) -> None:
        """End the lease, so that another adapter may take it at once."""
        self._until = 0.0
        with contextlib.suppress(Unavailable):
            await self._connection.run(_GIVE_BACK, LEASE_KEY, self._token, _KEPT_MS)
        await self._connection.close()


_BATCH = 64  # entries of a stream read at a time
_PAUSE_S = 0.25  # before streams are read again that had nothing
_DEMAND_TTL_S = 10  # an adapter that is gone asks for nothing
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 5.0
_SENDERS = 256  # of a stream, whose numbers are remembered
# The id of a stream's last entry, and the next entries behind a position, if there is one.
_READ = """
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local batch = ARGV[1] ~= '' and redis.call('XREAD', 'COUNT', ARGV[2], 'STREAMS', KEYS[1], ARGV[1])
return {last and last[1] or '0-0', batch and batch[1][2] or {}}
"""


class Inbox:
    """Reads the streams of all heads, says which samples are wanted, and counts what was sent and never came.

    How far a head's streams were read, and each sender's last number, are part of that head's state, saved with all
    else that its records changed. After a crash the next adapter reads on from what it still knows: no record counts
    twice, and those since the last save are not lost.
    """

    def __init__(self, url: str, readers: Sequence[HeadLoop], metrics: AdapterMetrics) -> None:
        self._readers, self._metrics = readers, metrics
        self._connection = Connection(url)
        streams: tuple[Stream, ...] = ("samples", "queries")  # in this order, so that a query finds its samples
        self._streams = {redis_key(reader.name, stream): (reader, stream) for stream in streams for reader in readers}
        self._refused: set[str] = set()  # keys, of streams and of demands
        self._malformed: set[str] = set()  # keys with such records

    async def run(self) -> None:
        backoff = Backoff(_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)
        while True:
            try:
                pause_s = 0.0 if await self.read() else _PAUSE_S
                backoff.succeed()
            except Unavailable as error:
                if backoff.fresh:
                    log.warning("redis is away", why=str(error))
                pause_s = backoff.fail()
            await asyncio.sleep(pause_s)

    async def read(self) -> bool:
        """Say what is wanted and hand on one batch of every stream; returns whether there was any.

        A stream is read from its end if no position is known, for what is there may have been learnt before. One that
        ends before its position was made again, or Redis lost entries: it is read anew, and what was read is known by
        its numbers. A key that Redis refuses stops no other. Raises Unavailable.
        """
        demands = {redis_key(reader.name, "demand"): reader.demand for reader in self._readers}
        async with self._connection.exchange() as client:
            pipe: Any = client.pipeline(transaction=False)
            for key, demand in demands.items():
                pipe.set(key, demand, ex=_DEMAND_TTL_S) if demand else pipe.delete(key)
            for key, (reader, stream) in self._streams.items():
                pipe.eval(_READ, 1, key, reader.state.positions.get(stream, ""), _BATCH)
            answers: list[Any] = await pipe.execute(raise_on_error=False)
        answered = dict(zip((*demands, *self._streams), answers, strict=True))
        refused = {key: answer for key, answer in answered.items() if isinstance(answer, RedisError)}
        for key in refused.keys() - self._refused:
            log.warning("redis refuses a key", key=key, why=str(refused[key]))
        self._refused = {*refused}
        read = [self._take(key, *answered[key]) for key in self._streams if key not in refused]
        return any(read)

    def _take(self, key: str, end: bytes, batch: Sequence[Any]) -> bool:
        """Hand on a stream's entries, (id, [name, value, name, ...]) each; `end`: the id of its last one."""
        reader, stream = self._streams[key]
        positions, numbers = reader.state.positions, reader.state.numbers.setdefault(stream, {})
        if batch:
            failpoints.hit("adapter.read")
        for entry, values in batch:
            positions[stream] = entry.decode()
            fields = dict(zip(values[::2], values[1::2], strict=True))
            if not self._is_new(numbers, stream, fields):
                continue
            self._metrics.read.labels(reader.name, stream).inc()
            try:
                if stream == "queries":
                    reader.take_query(read_query(fields))
                else:
                    reader.take_sample(read_sample(fields, *reader.widths))
            except InvalidField as error:
                self._metrics.malformed.labels(reader.name, stream).inc()
                if key not in self._malformed:
                    log.warning("a record is malformed", key=key, why=str(error))
                self._malformed.add(key)
        position = positions.setdefault(stream, end.decode())
        if _numbers(position) > _numbers(end.decode()):
            positions[stream] = "0-0"  # before all entries
        return bool(batch)

    def _is_new(self, numbers: dict[str, int], stream: Stream, fields: Mapping[bytes, bytes]) -> bool:
        """Tell whether a record is new, and count those before it, by its sender's numbers, that were never read."""
        sender, digits = fields.get(SENDER, b"")[:64].decode("latin-1"), fields.get(NUMBER, b"")
        if not sender or not digits.isdigit() or len(digits) > 18:
            return True
        number, last = int(digits), numbers.pop(sender, None)
        numbers[sender] = max(number, last or 0)  # the newest comes last
        if len(numbers) > _SENDERS:
            del numbers[next(iter(numbers))]
        if last is not None:
            self._metrics.lost.labels(stream).inc(max(0, number - last - 1))
        return last is None or number > last


def _numbers(entry: str) -> tuple[int, ...]:
    """By which the ids of entries, `MILLISECONDS-SEQUENCE`, are ordered."""
    return tuple(map(int, entry.split("-")))


async def _adapt(
    settings: Settings, lease: Lease, loops: Sequence[HeadLoop], metrics: AdapterMetrics, decided: asyncio.Event
) -> None:
    """Wait for the lease, set `decided`, and adapt until cancelled. Raises a group, of LeaseLost or a task's error."""
    try:
        if not await lease.take():
            log.info("standing by: another adapter is active, or redis is away")
            decided.set()
            await lease.wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(lease.keep())
            for loop in loops:
                await loop.start()
            inbox = Inbox(settings.adaptation.redis, loops, metrics)
            with contextlib.suppress(Unavailable):
                await inbox.read()  # what comes from now on will be read
            group.create_task(inbox.run())
            for loop in loops:
                group.create_task(loop.run())
            decided.set()
    finally:
        decided.set()
        for loop in loops:
            await loop.stop()
        await lease.give_back()


def _yielding() -> None:
    """Make the calling thread, and those that torch starts from it, give way to everything else on the machine."""
    os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    torch.set_num_threads(1)


async def serve(settings: Settings) -> int:
    """Load the heads and adapt them, or stand by, until told to stop; returns the exit code. Raises InvalidField."""
    adapter = settings.adapter
    paths = dict(pair.split("=", 1) for pair in adapter.heads)
    drafters = drafter_pools(adapter.drafters, settings.directory.redis, "adapter.drafters")
    for name in sorted(drafters.keys() ^ paths.keys(), key=paths.__contains__):
        reason = f"none serves {name}" if name in paths else f"{name} is none of {', '.join(paths)}"
        raise InvalidField("adapter.drafters", reason)
    thread = ThreadPoolExecutor(1, "learner", _yielding)

    async def on_thread(work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(thread, work, *arguments)

    metrics, lease = AdapterMetrics(), Lease(settings.adaptation.redis, LEASE_S)
    metrics.active.set_function(lease.held)
    with contextlib.ExitStack() as stack:
        home = adapter.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="coppice-adapter-"))
        loops: list[HeadLoop] = []
        for name, path in paths.items():
            learner = await on_thread(Learner, path, adapter.target, adapter.device, adapter.cpu_share)
            dialer, deployed = Dialer(settings.tls, head=name), Weights.of(learner.deployed)
            replicas = Replicas(name, drafters[name], deployed, dialer, metrics, lease.held)
            loops.append(HeadLoop(learner, replicas, adapter, Path(home) / name, on_thread))
        decided, failed = asyncio.Event(), asyncio.Event()
        adapting = asyncio.create_task(_adapt(settings, lease, loops, metrics, decided))
        adapting.add_done_callback(lambda done: None if done.cancelled() else failed.set())
        await decided.wait()
        serving = Serving(settings, "adapter")
        service = pb.DESCRIPTOR.services_by_name["AdapterService"]
        await serving.start({service: AdapterServicer(loops)}, metrics.registry)
        code = await serving.until_stopped(failed)
        adapting.cancel()
        for outcome in await asyncio.gather(adapting, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.error("a task of the adapter ended", why=repr(outcome))
        thread.shutdown(wait=False, cancel_futures=True)
    return code
