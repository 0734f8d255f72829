"""One head's loop: records in, decisions, and one piece of work at a time (SpecBlock, algorithm 1).

What it learns goes to the head's replicas: a replica is pushed what it lacks until it uses the live weights.
"""

import asyncio
import contextlib
import itertools
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import grpc
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pydantic import BaseModel, Field, PrivateAttr, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from coppice import failpoints
from coppice.adaptation.signals import Demand, QueryRecord, Stream
from coppice.adaptation.weights import ROUTES, Routes, Weights, pack_update, variant_name
from coppice.client.adapter import STANDING_BY
from coppice.config.sections import AdapterSettings
from coppice.errors import CoppiceError, InvalidField, StaleFence, from_rpc_error
from coppice.limits import MAX_HISTORY, MAX_VERSION_STEP
from coppice.rpc.channels import Dialer, Stub
from coppice.rpc.directory import Directory
from coppice.training.answers import write_whole
from coppice.v1 import adapter_pb2 as pb
from coppice.v1 import drafter_pb2
from coppice.wire import drafter
from coppice.wire.drafter import HeadDescription, WeightsHeader, WeightsPart, WeightsSynced

from .decide import Arm, Bandit, BanditState, Paper, PaperState, Verdict
from .learn import Groups, Learner

POLL_S = 1.0  # time between two looks at the replicas

log = structlog.get_logger()

OnThread = Callable[..., Awaitable[Any]]  # runs a function on the thread that owns torch
Active = Callable[[], bool]  # whether this adapter has the lease
Work = Callable[[], Awaitable[object]]
_LOOKS_A_SAVE = 5
_CHANGES = 200  # of the weights that are remembered
_LEAST_TEXTS = 8  # to learn from, where an update is judged by texts held out
_LEAST_HELD_OUT = 2
DESCRIBE_S, PUSH_S = 5.0, 60.0
FILE = "state.json"
VERSIONS = 8  # on disk at most
_NAME = re.compile(r"version-(\d{8,})\.safetensors")


class Versions:
    """The latest versions of a head's weights, as files of the tensors that differ from the deployed ones."""

    def __init__(self, folder: Path, deployed: Weights) -> None:
        """`deployed`: version 0, which has no file."""
        self.folder, self.deployed = folder, deployed

    def numbers(self) -> list[int]:
        """List the versions on disk, ascending."""
        return sorted(int(match[1]) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name)))

    def save(self, weights: Weights, good: int) -> None:
        """Write a version, complete or not at all. The oldest ones make room, but not the good one."""
        changed = {name: weights.tensors[name].contiguous() for name in weights.differing(self.deployed)}
        write_whole(self._file(weights.version), save(changed, {"weights_hash": weights.hash.hex()}))
        *old, _ = self.numbers()
        for number in [number for number in old if number != good][: max(0, len(old) + 1 - VERSIONS)]:
            self._file(number).unlink()

    def load(self, number: int) -> Weights:
        """Read a version. Raises InvalidField when there is none, its file is damaged, or it is of another head."""
        if not number:
            return self.deployed
        file = self._file(number)
        try:
            with safe_open(file, "pt") as opened:
                changed = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                expected = (opened.metadata() or {}).get("weights_hash")
        except (OSError, SafetensorError) as error:
            raise InvalidField("version", f"{file}: {error}") from None
        weights = self.deployed.changed(changed, number)
        if weights.hash.hex() != expected:
            raise InvalidField("version", f"{file} is damaged or of another head")
        return weights

    def _file(self, number: int) -> Path:
        return self.folder / f"version-{number:08d}.safetensors"


class State(BaseModel):
    """Everything that outlives the process. What records changed and how far they were read is saved together."""

    bandit: BanditState = BanditState()
    paper: PaperState = PaperState()
    positions: dict[Stream, Annotated[str, Field(pattern=r"^\d+-\d+$")]] = {}
    """the id of the last entry that was read of each stream"""
    numbers: dict[Stream, dict[str, int]] = {}  # by stream and sender, the highest number of an entry that was read
    paused: bool = False
    live: int = 0  # the version that is to be in use
    good: int = 0  # the last version that was found good
    newest: int = 0  # the highest number that was ever given to a version
    queries: int = 0
    reverts: int = 0
    history: list[dict[str, Any]] = []  # fields of each `QueryPoint` of the adapter's status
    changes: list[dict[str, Any]] = []  # fields of each `Change` of it
    _file: Path = PrivateAttr(Path(FILE))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what an earlier run wrote into the folder; a damaged file counts as none."""
        file = folder / FILE
        try:
            state = cls.model_validate_json(file.read_bytes()) if file.exists() else cls()
        except (ValidationError, OSError) as error:
            log.warning("the state cannot be read and starts anew", file=str(file), why=str(error)[:200])
            state = cls()
        state._file = file
        return state

    def save(self) -> None:
        write_whole(self._file, self.model_dump_json().encode())


class AdapterMetrics:
    """What the adapter counts, by head."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        named: dict[str, Any] = {"registry": self.registry, "namespace": "coppice", "subsystem": "adapter"}
        counter: Any = partial(Counter, **named)
        gauge: Any = partial(Gauge, **named)
        histogram: Any = partial(Histogram, **named)
        self.read = counter("records_read", "records read from Redis", ["head", "stream"])
        self.malformed = counter("records_malformed", "records that are not what they should be", ["head", "stream"])
        self.lost = counter("records_lost", "records that were sent and never read: trimmed or flushed", ["stream"])
        self.dropped = counter("samples_dropped", "samples that taught nothing", ["head", "reason"])
        self.actions = counter("actions", "what queries were used for", ["head", "action"])
        self.updates = counter("updates", "updates trained", ["head", "action"])
        self.failed = counter("updates_failed", "updates that changed nothing or were not finite", ["head", "reason"])
        self.reverts = counter("reverts", "times the weights were taken back", ["head", "reason"])
        self.signal = histogram("signal", "s of a query", ["head"], buckets=(0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500))
        self.waiting = gauge("samples_waiting", "texts to learn from, by kind of text or by buffer", ["head", "group"])
        self.active = gauge("active", "1 while it is the active adapter, 0 while it stands by")
        self.version = gauge("version", "version that is to be in use", ["head"])
        self.live = gauge("replica_version", "version in use", ["head", "replica"])
        self.stale = gauge("replicas_stale", "replicas that do not use the weights they are to use", ["head"])
        self.paused = gauge("paused", "1 while paused", ["head"])
        seconds = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)
        self.train_seconds = histogram("train_seconds", "time of an update", ["head", "action"], buckets=seconds)
        self.sync_seconds = histogram("sync_seconds", "time of a sync to all replicas", ["head"], buckets=seconds)


class DrafterLink(contextlib.AbstractAsyncContextManager["DrafterLink"]):
    """One drafter that weights are pushed to; an async context manager that closes its channel."""

    def __init__(self, address: str, dialer: Dialer) -> None:
        self.address = address
        self.used: HeadDescription | None = None  # what it answered last, None: it did not
        self.trouble = ""
        self._channel = dialer.open(address)
        self._stub = Stub(self._channel, drafter_pb2)

    async def describe(self) -> HeadDescription:
        """Ask what it serves, the version and hash in use among others. Raises CoppiceError."""
        answer = await self._call(self._stub.DescribeHead, drafter_pb2.DescribeHeadRequest(), DESCRIBE_S)
        return drafter.read_head(answer)

    async def push(self, header: WeightsHeader, parts: Sequence[WeightsPart]) -> WeightsSynced:
        """Send an update; returns when the next draft reads it.

        What was pushed may be in use also when this raises DeadlineExceeded or Unavailable: the same push again is
        acknowledged then. Raises the CoppiceError it was refused with, InvalidField on an answer about other weights.
        """
        messages: Sequence[WeightsHeader | WeightsPart] = (header, *parts)
        answer = await self._call(self._stub.SyncWeights, map(drafter.weights_to_wire, messages), PUSH_S)
        synced = drafter.read_synced(answer)
        if (synced.version, synced.weights_hash) != (header.version, header.weights_hash):
            raise InvalidField("weights_hash", f"{self.address} answers with version {synced.version} of other weights")
        return synced

    async def _call(self, method: Callable[..., Awaitable[Any]], request: Any, timeout_s: float) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def close(self) -> None:
        await self._channel.close()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Replicas:
    """Pushes what a replica lacks: the tensors that differ from what it uses, or from the checkpoint."""

    def __init__(
        self, head: str, where: Directory, checkpoint: Weights, dialer: Dialer, metrics: AdapterMetrics, active: Active
    ) -> None:
        """`checkpoint`: version 0. Nothing is pushed while not `active`."""
        self.head, self.where, self.metrics, self.active, self._dialer = head, where, metrics, active, dialer
        self.checkpoint = self._before = self.live = checkpoint
        self._links: dict[str, DrafterLink] = {}
        self._busy = asyncio.Lock()

    def use(self, weights: Weights) -> None:
        self._before, self.live = self.live, weights

    async def bring(self) -> None:
        """Ask every replica that the directory names what it uses, and push the live weights to those of others."""
        async with self._busy:
            addresses = self.where.addresses
            for address in self._links.keys() - set(addresses):
                log.info("a replica is gone", head=self.head, replica=address)
                await self._links.pop(address).close()
                with contextlib.suppress(KeyError):  # it never answered
                    self.metrics.live.remove(self.head, address)
            for address in addresses:
                if address not in self._links:
                    self._links[address] = DrafterLink(address, self._dialer)
            await asyncio.gather(*map(self._bring, self._links.values()))
        self.metrics.stale.labels(self.head).set(sum(not self._is_current(link) for link in self._links.values()))

    def numbers(self) -> set[int]:
        """Return the numbers that the live weights have, here and at replicas."""
        current = filter(self._is_current, self._links.values())
        return {self.live.version, *(link.used.weights_version for link in current if link.used)}

    def status(self) -> list[pb.ReplicaStatus]:
        """Report each replica as it answered last."""
        links = sorted(self._links.items())
        versions = [link.used.weights_version if link.used else None for _, link in links]  # None: it did not answer
        return [
            pb.ReplicaStatus(address=at, reachable=used is not None, version=used, current=self._is_current(link))
            for (at, link), used in zip(links, versions, strict=True)
        ]

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def _is_current(self, link: DrafterLink) -> bool:
        return link.used is not None and link.used.weights_hash == self.live.hash

    async def _bring(self, link: DrafterLink) -> None:
        """Push what this replica lacks, under a number above its own: it refuses others. One that has a version far
        above any that it was given counts as silent.
        """
        try:
            used = link.used = await link.describe()
            if used.weights_version > self.live.version + MAX_VERSION_STEP:
                raise InvalidField("weights_version", f"{used.weights_version} is not of this adapter's making")
        except CoppiceError as error:
            link.used = None
            self._note(link, f"does not say what it uses: {error}")
            return
        live, parent, in_use = self.live, self.checkpoint, self.metrics.live.labels(self.head, link.address)
        in_use.set(used.weights_version)
        if self._is_current(link):
            link.trouble = ""
            return
        adds = self._before.tensors.keys() <= live.tensors.keys()  # an update takes no tensors away
        if used.weights_hash == self._before.hash and adds:
            parent = self._before.changed({}, used.weights_version)
        pushed = live.changed({}, max(live.version, used.weights_version + 1))
        header, parts = await asyncio.to_thread(pack_update, self.head, parent, pushed)
        if not self.active():
            return
        try:
            failpoints.hit("adapter.push")
            synced = await link.push(header, parts)
            failpoints.hit("adapter.acknowledge")
        except CoppiceError as error:
            self._note(link, f"refused version {pushed.version}: {error}")
            return
        log.info("pushed", replica=link.address, version=synced.version, bytes=sum(len(part.data) for part in parts))
        link.used = replace(used, weights_version=synced.version, weights_hash=synced.weights_hash)
        in_use.set(synced.version)

    def _note(self, link: DrafterLink, trouble: str) -> None:
        """Log a trouble once, not with every look."""
        if trouble != link.trouble:
            log.warning("a replica is in trouble", replica=link.address, why=trouble)
        link.trouble = trouble


class HeadLoop:
    """Adapts one head: its rule decides; `run` trains and pushes, one thing at a time.

    The deployed weights stay as they are. What is learnt becomes a variant of the head beside them, and `routes` say
    which texts it drafts for.
    """

    def __init__(
        self, learner: Learner, replicas: Replicas, settings: AdapterSettings, folder: Path, on_thread: OnThread
    ) -> None:
        """Nothing in `folder` is read before `start`; nothing begins or is saved while `replicas.active` is false."""
        self.name, self.active, self._metrics = replicas.head, replicas.active, replicas.metrics
        self.widths = learner.config.vocab_size, learner.config.feature_width
        self._learner, self._replicas, self._settings, self._folder = learner, replicas, settings, folder
        self._on_thread = on_thread
        self._versions = Versions(folder, replicas.checkpoint)
        self._groups = Groups(lambda reason: self._metrics.dropped.labels(self.name, reason).inc())
        self.take_sample = self._groups.take
        self._work: asyncio.Queue[Work] = asyncio.Queue()
        self._doing = STANDING_BY
        self._remember(State())

    def _remember(self, state: State) -> None:
        self.state, policy = state, self._settings.policy
        paper = Paper(policy, self._settings.interval, state.paper) if policy != "bandit" else None
        self._rule = paper or Bandit(state.bandit)

    @property
    def demand(self) -> Demand:
        """What drafters are to send now: nothing while paused."""
        return "" if self.state.paused else self._rule.demand

    @property
    def ready(self) -> bool:
        """Whether it adapts, and does not stand by."""
        return self.active() and self._doing != STANDING_BY

    async def start(self) -> None:
        """Go on from what the folder remembers of an earlier run, and give its weights to every replica that answers;
        in the place of a damaged version the good one, or version 0.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remember(state := State.load(self._folder))
        for number in (state.live, state.good, 0):
            try:
                weights = await asyncio.to_thread(self._versions.load, number)
                break
            except InvalidField as error:
                log.warning("a version cannot be read; going back to the last good one", why=str(error))
        if weights.version != state.live:
            state.good = weights.version
            self._rule.follow(Routes.of(weights.tensors), state.good)
        state.newest = max([state.newest, state.live, *self._versions.numbers()])
        self._use(weights)
        await self._keep_up()
        self._doing = "idle"
        log.info("adapting", head=self.name, version=state.live, replicas=len(self._replicas.status()))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._replicas.where.run(lambda addresses: None))
            group.create_task(self._look_after_replicas())
            group.create_task(self._do_work())

    async def stop(self) -> None:
        """Give up an update under way, and remember everything."""
        self._learner.stopped.set()
        if self._doing != STANDING_BY:
            self._save()
        await self._replicas.close()

    async def _do_work(self) -> None:
        while True:
            work = await self._work.get()
            self._doing = "syncing"
            try:
                while not self.active():  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
                await work()
                self._save()
            except Exception:
                log.exception("the loop goes on without what failed", head=self.name)
            self._doing = "idle"

    async def _look_after_replicas(self) -> None:
        """Bring replicas to the live weights, also while an update is trained, and save what records changed."""
        for look in itertools.count():
            try:
                if self.active():
                    await self._keep_up()
                    if look % _LOOKS_A_SAVE == 0:
                        self.state.save()
            except Exception:
                log.exception("replicas are looked after again", head=self.name)
            await asyncio.sleep(POLL_S)

    def _save(self) -> None:
        if self.active():  # else the folder may be another adapter's
            self.state.save()

    # --- records ---

    def take_query(self, record: QueryRecord) -> None:
        """Measure a query, judge the weights in use, and choose what to do with its text."""
        state, rule, metrics = self.state, self._rule, self._metrics
        live = self._replicas.numbers().issuperset(record.versions)
        metrics.signal.labels(self.name).observe(record.s)
        group, begins = rule.take(record, live, self._doing == "training")
        if begins:
            self._groups.forget(group)
        self._groups.claim(record.session, 0 if state.paused else group)
        if verdict := rule.settle(record, state.live, state.newest):
            if verdict.what == "good":
                state.good = verdict.version
            else:
                self._work.put_nowait(partial(self._act, verdict))
        arm = self._choose(group)
        metrics.actions.labels(self.name, arm.value).inc()
        for number, count in self._groups.counts().items():
            metrics.waiting.labels(self.name, str(number)).set(count)
        state.queries += 1
        figures = {"tau": record.tau, "tokens_per_s": record.tokens_per_s, "s": record.s, "action": arm.value}
        version = state.live if live else None  # the weights changed meanwhile
        state.history.append({"query": state.queries, "version": version, **figures})
        del state.history[:-MAX_HISTORY]

    def _choose(self, group: int) -> Arm:
        """Choose an arm for a group of texts; what is not skip is planned."""
        if not group or self.state.paused or self._busy():
            return Arm.SKIP
        texts, held_out = self._groups.of(group)
        if not self._rule.empties and (len(texts) < _LEAST_TEXTS or len(held_out) < _LEAST_HELD_OUT):
            return Arm.SKIP
        arm = self._rule.choose(group, len(texts))
        if arm is not Arm.SKIP:
            self._work.put_nowait(partial(self._update, group, arm))
        return arm

    def _busy(self) -> bool:
        return not self._work.empty() or self._doing != "idle"

    # --- work ---

    async def _update(self, group: int, arm: Arm) -> None:
        """Train a variant on the texts of a group, and put it to use if the rule says so."""
        rule, live, names = self._rule, self._replicas.live.tensors, self._replicas.checkpoint.tensors.keys()
        texts, held_out = self._groups.of(group)
        begin, variant = rule.variants(group)
        if not variant or not texts:
            return
        if rule.empties:
            self._groups.forget(group)
        values = {name: live.get(variant_name(begin, name), live[name]) for name in names}
        self._doing = "training"
        try:
            result, tensors = await self._on_thread(self._learner.learn, arm, values, texts, held_out, rule.penalty)
        except Exception as error:
            reason = "not finite" if isinstance(error, FloatingPointError) else "error"
            log.exception("an update failed", head=self.name)
            self._metrics.failed.labels(self.name, reason).inc()
            rule.trained(group, arm, None, variant, 0)
            return
        failpoints.hit("adapter.step")
        self._metrics.train_seconds.labels(self.name, arm.value).observe(result.seconds)
        why = f"drafts of {result.before:.2f} to {result.after:.2f}, {result.texts} texts"
        if not rule.trained(group, arm, result, variant, self.state.newest + 1):
            log.warning("an update is thrown away", head=self.name, group=group, why=why)
            self._metrics.failed.labels(self.name, "no better").inc()
            return
        self._metrics.updates.labels(self.name, arm.value).inc()
        stale = {name: live[name] for name in names if variant_name(variant, name) in live}
        changed = {variant_name(variant, name): tensor for name, tensor in (stale | tensors).items()}
        await self._release(changed, arm.value, f"variant {variant} of group {group}: {why}", result.seconds)

    async def _act(self, verdict: Verdict) -> None:
        """Go back to good weights, or give drafters the routes that follow from a verdict."""
        if verdict.what != "pays":
            reason = "falling" if verdict.what == "revert" else "no better"
            self._metrics.reverts.labels(self.name, reason).inc()
            self.state.reverts += 1
        if verdict.what == "revert":
            log.warning("accepted length has fallen", head=self.name, why=verdict.why, good=verdict.version)
            await self._put_back(verdict.version, "revert", verdict.why)
        else:
            await self._release({}, verdict.what, verdict.why)
            self.state.good = self.state.live

    async def _put_back(self, back_to: int, what: str, why: str) -> int:
        """Give every replica an earlier version's weights under a new number; returns it. Raises InvalidField."""
        earlier = await asyncio.to_thread(self._versions.load, back_to)
        weights = await self._go_live(earlier, {}, what, why)
        self._rule.follow(Routes.of(weights.tensors), weights.version)
        self.state.good = weights.version
        return weights.version

    # --- weights ---

    async def _release(self, tensors: dict[str, Tensor], what: str, why: str, train_s: float = 0.0) -> None:
        """Give every replica the live weights with some tensors added or replaced, and the rule's routes."""
        await self._go_live(self._replicas.live, tensors | {ROUTES: self._rule.routes().tensor()}, what, why, train_s)

    async def _go_live(
        self, begin: Weights, tensors: dict[str, Tensor], what: str, why: str, train_s: float = 0.0
    ) -> Weights:
        """Write `begin` with some tensors replaced to disk under a new number, then give it to every replica."""
        self._doing, began, state = "syncing", time.monotonic(), self.state
        state.newest += 1
        weights = await asyncio.to_thread(begin.changed, tensors, state.newest)
        await asyncio.to_thread(self._versions.save, weights, state.good)
        self._use(weights)
        await self._replicas.bring()
        sync_s = time.monotonic() - began
        self._metrics.sync_seconds.labels(self.name).observe(sync_s)
        facts = {"what": what, "version": weights.version, "why": why}
        state.changes.append({"query": state.queries, **facts, "train_s": train_s, "sync_s": sync_s})
        del state.changes[:-_CHANGES]
        log.info("weights changed", head=self.name, **facts)
        return weights

    def _use(self, weights: Weights) -> None:
        self.state.live = weights.version
        self._replicas.use(weights)
        self._metrics.version.labels(self.name).set(weights.version)

    async def _keep_up(self) -> None:
        """Bring replicas that came, restarted or were pushed something else to the live weights.

        Next weights get a number above those that replicas have for these: queries are told apart by it.
        """
        await self._replicas.bring()
        self.state.newest = max(self.state.newest, *self._replicas.numbers())

    # --- operators ---

    def pause(self, paused: bool) -> None:
        """Stop or go on training; what is under way is finished."""
        self.state.paused = paused
        self._metrics.paused.labels(self.name).set(paused)
        self._save()

    async def rollback(self, version: int | None) -> int:
        """Put back a version, None: the last good one; returns the new one. Raises InvalidField, StaleFence."""
        if self._busy():
            raise StaleFence(f"{self.name} has work under way; pause it, and try again when it is idle")
        back_to = self.state.good if version is None else version
        there = [0, *self._versions.numbers()]
        if back_to not in there:
            raise InvalidField("version", f"{back_to} is not there; there are {', '.join(map(str, there))}")
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def work() -> None:
            try:
                done.set_result(await self._put_back(back_to, "rollback", "asked for"))
            except Exception as error:
                done.set_exception(error)

        self._work.put_nowait(work)
        return await asyncio.shield(done)  # the operator may leave, the work is done all the same

    def status(self, history: int) -> pb.HeadStatus:
        """Report what the loop does and knows, with that many of the latest queries."""
        state, rule = self.state, self._rule
        values, updates = rule.state.values, rule.state.updates
        taus: dict[int, list[float]] = defaultdict(list)
        for point in state.history:
            if point["version"] is not None:
                taus[point["version"]].append(point["tau"])
        return pb.HeadStatus(
            head=self.name,
            policy=self._settings.policy,
            paused=state.paused,
            doing=self._doing if self.active() else STANDING_BY,
            version=state.live,
            weights_hash=self._replicas.live.hash,
            good_version=state.good,
            queries=state.queries,
            events=sum(updates.values()),
            reverts=state.reverts,
            actions=[pb.ActionStatus(action=arm, value=values.get(arm), updates=updates.get(arm)) for arm in rule.arms],
            kinds=rule.kinds(self._groups.counts()) if isinstance(rule, Bandit) else [],
            replicas=self._replicas.status(),
            history=[pb.QueryPoint(**point) for point in state.history[-history:] if history],
            versions=[
                pb.VersionStatus(version=version, queries=len(its), tau=statistics.fmean(its))
                for version, its in sorted(taus.items())
            ],
            changes=[pb.Change(**change) for change in state.changes],
        )
