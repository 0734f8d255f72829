"""Records, their fields, and their way through a real Redis, which is killed, stopped, flushed and full, and whose
streams are trimmed, deleted, made again and replaced by keys of other types on the way.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from coppice import limits
from coppice.adaptation import signals
from coppice.adaptation.signals import Producer
from coppice.errors import InvalidField
from coppice.rpc.redis_connection import Connection
from coppice.speculation.sampling import SamplingParams
from coppice.stack.process import LocalRedis, find_redis
from coppice.wire.common import Features
from coppice.wire.drafter import Advance, OpenDraft
from services.adapter.loop import AdapterMetrics, State
from services.adapter.service import Inbox, Lease
from services.drafter.worker import WINDOW, Samples
from tests.certificates import Authority, documented
from tests.processes import free_port, until
from tests.signals import Counts, counts, eventually, holds, queries, samples


class Line:
    """A producer and what it counted."""

    def __init__(self, url: str, bounds: signals.Bounds = signals.BOUNDS) -> None:
        self.registry = CollectorRegistry()
        self.producer = signals.Producer(url, self.registry, ["a"], bounds)

    @property
    def counts(self) -> Counts:
        return counts(self.registry)

    def put(self, count: int) -> None:
        for _ in range(count):
            self.producer.query("a", RECORD)

    async def until(self, claim: Callable[[Counts], bool]) -> None:
        assert await holds(lambda: claim(self.counts))


@asynccontextmanager
async def line_to(url: str, bounds: signals.Bounds = signals.BOUNDS) -> AsyncIterator[Line]:
    """A started producer; in the end each of its records was sent or dropped."""
    line = Line(url, bounds)
    line.producer.start()
    try:
        yield line
    finally:
        await line.producer.stop()
    assert line.counts.settled


def client_of(redis: LocalRedis) -> Redis:
    return Redis.from_url(redis.url, socket_timeout=5)


async def test_records_arrive_as_they_were_made_and_what_waits_at_the_end_is_sent(redis: LocalRedis) -> None:
    async with line_to(redis.url) as line:
        line.put(600)  # several batches
        for rows in (3, 4):
            line.producer.sample("a", sample(rows))
        await line.until(lambda seen: seen.sent == 602)
        line.put(5)
    entries: Any = client_of(redis).xrange("coppice:a:queries")
    assert [int(fields[b"n"]) for _, fields in entries] == list(range(1, 606))  # a reader sees what is missing
    assert len({fields[b"by"] for _, fields in entries}) == 1
    assert queries(client_of(redis), "a") == [RECORD] * 605
    assert [len(each.tokens) for each in samples(client_of(redis), "a")] == [4, 5]
    assert (line.counts.produced, line.counts.dropped.total()) == (607, 0)


@pytest.mark.parametrize(
    ("bounds", "reason", "fits"),
    [
        (signals.Bounds(queue_entries=10), "full", 10),
        (signals.Bounds(queue_bytes=2000), "full", 10),
        (signals.Bounds(entry_bytes=10), "oversized", 0),
        (signals.Bounds(bytes_per_s=2000), "rate", 10),
    ],
)
async def test_what_waits_is_bounded_and_the_rest_is_counted(bounds: signals.Bounds, reason: str, fits: int) -> None:
    async with line_to("redis://127.0.0.1:1/0", bounds) as line:
        line.put(40)
        assert set(line.counts.dropped) == {reason}
        assert bool(fits) <= 40 - line.counts.dropped[reason] <= 2 * fits
    assert (line.counts.sent, line.counts.dropped.total()) == (0, 40)


async def test_a_stream_keeps_about_as_many_entries_and_bytes_as_it_may(redis: LocalRedis) -> None:
    async with line_to(redis.url, signals.Bounds(stream_entries=100, stream_bytes=20_000)) as line:
        line.put(1000)
        for _ in range(50):
            line.producer.sample("a", sample(rows=100))  # 2.4 kB and names
        await line.until(lambda seen: seen.settled)
    assert 50 <= len(queries(client_of(redis), "a")) <= 300
    assert len(samples(client_of(redis), "a")) <= 20


async def test_a_redis_that_stands_still_holds_nobody_up_and_keeps_no_connection(redis: LocalRedis) -> None:
    before = len(client_of(redis).client_list())
    async with line_to(redis.url) as line:
        line.put(1)
        await line.until(lambda seen: seen.sent == 1)
        assert redis.pid is not None
        os.kill(redis.pid, signal.SIGSTOP)
        line.put(300)
        await line.until(lambda seen: seen.dropped["redis"] > 0)
        os.kill(redis.pid, signal.SIGCONT)
        line.put(3)
        await line.until(lambda seen: seen.settled and seen.sent > 1)
        os.kill(redis.pid, signal.SIGSTOP)
        line.put(2)
    os.kill(redis.pid, signal.SIGCONT)
    entries: Any = client_of(redis).xrange("coppice:a:queries")  # some whose answers were lost are there, too
    assert len({(fields[b"by"], fields[b"n"]) for _, fields in entries}) == len(entries)
    assert await holds(lambda: len(client_of(redis).client_list()) <= before)


async def test_entries_that_redis_refuses_are_counted_one_by_one(redis: LocalRedis) -> None:
    client = client_of(redis)
    client.set("coppice:b:queries", "no stream")
    async with line_to(redis.url) as line:
        for head in ("a", "b", "a", "b", "b"):
            line.producer.query(head, RECORD)
        await line.until(lambda seen: seen.settled)
        assert (line.counts.sent, line.counts.dropped) == (2, {"refused": 3})
        client.config_set("maxmemory", 1)
        line.put(4)
        await line.until(lambda seen: seen.dropped["refused"] == 7)
        client.config_set("maxmemory", 0)
        line.put(2)
        await line.until(lambda seen: seen.sent == 4)


async def test_the_demand_is_followed_and_ends_with_redis(redis: LocalRedis) -> None:
    client = client_of(redis)

    async def until(wanted: str) -> None:
        assert await holds(lambda: line.producer.demand_for("a") == wanted)

    async with line_to(redis.url) as line:
        assert line.producer.demand_for("a") == ""
        client.set(signals.redis_key("b", "demand"), "texts")
        client.set(signals.redis_key("a", "demand"), "misses", px=1500)
        await until("misses")
        await until("")  # it ran out
        client.set(signals.redis_key("a", "demand"), "texts")
        await until("texts")
        redis.stop()
        await until("")


async def test_an_exchange_that_was_cancelled_leaves_no_answer_to_the_next_one(redis: LocalRedis) -> None:
    connection = Connection(redis.url, timeout_s=30.0)

    async def echo(text: str) -> bytes:
        async with connection.exchange() as client:
            answer: bytes = await client.execute_command("ECHO", text)
            return answer

    assert await echo("one") == b"one"
    assert redis.pid is not None
    os.kill(redis.pid, signal.SIGSTOP)
    cut = asyncio.create_task(echo("two"))
    await asyncio.sleep(0.2)
    cut.cancel()
    await asyncio.wait([cut])
    os.kill(redis.pid, signal.SIGCONT)
    assert await echo("three") == b"three"
    await connection.close()


def test_a_local_redis_is_ours_alone_and_ends() -> None:
    with LocalRedis() as running:
        config: Any = client_of(running).config_get("*")
        assert (config["bind"], config["save"], config["appendonly"]) == ("127.0.0.1", "", "no")
        pid = running.pid
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


class Reader:
    """As much of a head's loop as an inbox needs: positions, numbers, and the records that it was handed."""

    widths = 0, 0

    def __init__(self, name: str = "a", demand: signals.Demand = "") -> None:
        self.name, self.demand = name, demand
        self.state = State()
        self.taken: list[signals.QueryRecord] = []

    @property
    def sessions(self) -> list[str]:
        return [record.session for record in self.taken]

    def take_query(self, record: signals.QueryRecord) -> None:
        self.taken.append(record)

    def take_sample(self, sample: signals.Sample) -> None:
        raise AssertionError("none is sent")

    async def until(self, count: int) -> None:
        assert await holds(lambda: len(self.taken) >= count), len(self.taken)


@asynccontextmanager
async def inbox_of(redis: LocalRedis, *readers: Reader) -> AsyncIterator[CollectorRegistry]:
    """An inbox that reads for them, and what it counts."""
    metrics = AdapterMetrics()
    inbox = Inbox(redis.url, readers, metrics)
    await inbox.read()
    reading = asyncio.create_task(inbox.run())
    yield metrics.registry
    reading.cancel()
    await asyncio.wait([reading])


def add(
    redis: LocalRedis, numbers: range, key: str = "coppice:a:queries", at_ms: int = 0, client: Any = None
) -> list[str]:
    """Put a sender's numbered records into a stream, with ids of a time or of now; returns their sessions."""
    for number in numbers:
        fields: Any = signals.query_to_fields(replace(RECORD, session=f"s{number}")) | {
            signals.SENDER: b"sender",
            signals.NUMBER: str(number),
        }
        (client or client_of(redis)).xadd(key, fields, id=f"{at_ms}-{number}" if at_ms else "*")
    return [f"s{number}" for number in numbers]


def lost(registry: CollectorRegistry) -> float:
    return registry.get_sample_value("coppice_adapter_records_lost_total", {"stream": "queries"}) or 0.0


@pytest.mark.parametrize("position", [None, "0-0", "99999999999999-0"])
async def test_streams_are_read_from_their_end_or_from_a_position(position: str | None, redis: LocalRedis) -> None:
    reader = Reader()
    reader.state.positions = {} if position is None else {"queries": position, "samples": position}
    before = add(redis, range(1, 3))
    async with inbox_of(redis, reader):
        after = add(redis, range(3, 4))
        await reader.until(1 if position is None else 3)
    assert reader.sessions == (after if position is None else before + after)


async def test_what_was_trimmed_while_the_adapter_was_away_is_counted(redis: LocalRedis) -> None:
    reader = Reader()
    async with inbox_of(redis, reader):
        add(redis, range(1, 11))
        await reader.until(10)
    add(redis, range(11, 111))
    client_of(redis).xtrim("coppice:a:queries", maxlen=1, approximate=False)
    async with inbox_of(redis, reader) as registry:
        await reader.until(11)
        assert (reader.sessions[10:], lost(registry)) == (["s110"], 99)


async def test_a_stream_that_is_made_again_with_smaller_ids_is_read_and_nothing_twice(redis: LocalRedis) -> None:
    reader, client = Reader(), client_of(redis)
    hour_ago = int(1000 * (time.time() - 3600))
    async with inbox_of(redis, reader) as registry:
        add(redis, range(1, 6))
        await reader.until(5)
        client.xadd(
            "coppice:a:queries", {"no": "record"}, id=f"{2**64 - 1}-{2**64 - 1}"
        )  # senders are refused from now on
        assert await holds(lambda: reader.state.positions["queries"].startswith(str(2**64 - 1)))
        pipe = client.pipeline()  # at once, as a fail-over to a replica that was behind
        pipe.delete("coppice:a:queries")
        add(redis, range(4, 9), at_ms=hour_ago, client=pipe)
        pipe.execute()
        await reader.until(8)
        add(redis, range(11, 12), at_ms=hour_ago + 1)
        await reader.until(9)
        assert lost(registry) == 2
    assert reader.sessions == [f"s{number}" for number in (*range(1, 9), 11)]


async def test_a_full_redis_is_read_and_asked_when_there_is_room(redis: LocalRedis) -> None:
    reader, client = Reader(demand="texts"), client_of(redis)
    async with inbox_of(redis, Reader()):
        pass  # notes where the stream ends
    reader.state.positions = {"queries": "0-0", "samples": "0-0"}
    add(redis, range(1, 31))
    client.config_set("maxmemory", 1)
    async with inbox_of(redis, reader):
        await reader.until(30)
        assert client.get("coppice:a:demand") is None
        client.config_set("maxmemory", 0)
        assert await holds(lambda: client.get("coppice:a:demand") == b"texts")


async def test_a_key_of_a_wrong_type_stops_its_own_head_alone_and_until_it_is_gone(redis: LocalRedis) -> None:
    broken, sound, client = Reader("b"), Reader("a"), client_of(redis)
    async with inbox_of(redis, broken, sound):
        await holds(lambda: "samples" in sound.state.positions)
        client.set("coppice:b:queries", "no stream")
        add(redis, range(1, 9))
        await sound.until(8)
        client.delete("coppice:b:queries")
        add(redis, range(1, 9), "coppice:b:queries")
        await broken.until(8)
    assert (sound.sessions, broken.sessions) == ([f"s{number}" for number in range(1, 9)],) * 2


# --- records: they survive their way through Redis' fields, and nothing that is off passes ---


count = st.integers(0, 1 << 53)
amount = st.floats(0, 1e12)
QUERIES = st.builds(
    signals.QueryRecord,
    session=st.from_regex(r"\A[A-Za-z0-9_.-]{1,64}\Z"),
    s=amount,
    tau=amount,
    new_tokens=count,
    steps=count,
    tokens_per_s=amount,
    versions=st.tuples(count, count),
    kind=st.integers(0, limits.MAX_KINDS),
    variant=st.integers(0, limits.MAX_VARIANTS),
)
RECORD = signals.QueryRecord("s", 1.0, 3.0, 4, 5, 6.0, (9, 10))


def sample(rows: int = 3, width: int = 6, dtype: str = "float32", session: str = "s.1") -> signals.Sample:
    features = np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32)
    data = features.tobytes() if dtype == "float32" else (features.view(np.uint32) >> 16).astype("<u2").tobytes()
    return signals.Sample(session, np.arange(rows + 1), data, dtype)


@given(QUERIES)
def test_a_query_record_is_read_as_it_was_written(record: signals.QueryRecord) -> None:
    assert signals.read_query(signals.query_to_fields(record)) == record


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sample_is_read_as_it_was_written_and_its_features_as_float32(dtype: str) -> None:
    written, fields = sample(dtype=dtype), signals.sample_to_fields(sample(dtype=dtype))
    for read in (signals.read_sample(fields), signals.read_sample(fields, 10, 6)):
        assert (read.session, read.dtype, read.features) == (written.session, written.dtype, written.features)
        assert read.tokens.tolist() == written.tokens.tolist()
        np.testing.assert_allclose(read.feature_rows(), sample().feature_rows(), rtol=2**-7)
    assert signals.size_of(fields) == sum(map(len, fields)) + sum(map(len, fields.values()))


def test_records_out_of_bounds_are_refused_by_field() -> None:
    amounts = (-1, float("nan"), float("inf"), "1", None, True, [1])
    wrong = {"steps": (-1, 1.5, 1 << 63, "1", None, True), "session": ("", "a b", 3), "versions": ([1], [1, -1], "12")}
    for name, values in (dict.fromkeys(("s", "tau", "tokens_per_s"), amounts) | wrong).items():
        for value in values:
            meta = json.loads(signals.query_to_fields(RECORD)[b"meta"]) | {name: value}
            with pytest.raises(InvalidField, match=name):
                signals.read_query({b"meta": json.dumps(meta).encode()})
    for meta in (b"", b"[]", b"{", b"\xff", b"{}", b"[" * 3000, b" " * 5000):
        for read, fields in product((signals.read_query, signals.read_sample), ({b"meta": meta}, {})):
            with pytest.raises(InvalidField):
                read(fields)
    texts = (np.array([1, 2, 3, last], "<i4").tobytes() for last in (10, -1))
    nan = np.array([np.nan] * 18, "<f4").tobytes()
    for name, spoilt in {
        "dtype": (b"float16",),
        "session": (b"a b", b"\xff"),
        "tokens": (*texts, bytes(15), bytes(8), bytes(4 * limits.MAX_WINDOW + 8)),
        "features": (b"", bytes(3 * 6 * 4 - 1), bytes(3 * 6 * 4 - 3), nan, bytes(3 * 5 * 4)),
    }.items():
        fields, key = signals.sample_to_fields(sample()), name.encode()
        for off in (
            *(fields | {key: data} for data in spoilt),
            {other: fields[other] for other in fields.keys() - {key}},
        ):
            with pytest.raises(InvalidField, match=name):
                signals.read_sample(off, 10, 6)


def test_an_unknown_demand_wants_nothing() -> None:
    values = (b"texts", b"misses", None, b"", b"TEXTS", b"head")
    assert [signals.read_demand(value) for value in values] == ["texts", "misses", *[""] * 4]


# --- samples as a drafter makes them: of what is committed, every position once, and none that nobody asked for ---

WIDTH, PROMPT = 3, 10


class Taken:
    """Stands for the producer: wants something, keeps what it is given."""

    def __init__(self, demand: str) -> None:
        self.demand = demand
        self.samples: list[signals.Sample] = []

    def demand_for(self, head: str) -> str:
        assert head == "a"
        return self.demand

    def sample(self, head: str, sample: signals.Sample) -> None:
        assert head == "a"
        self.samples.append(sample)


def feature_rows(start: int, count: int) -> Features:
    rows = np.arange(start, start + count, dtype="<f4").repeat(WIDTH)
    return Features(start, count, "float32", rows.tobytes())


def sampled(demand: str, end: int) -> list[signals.Sample]:
    """A text whose token at position p is p, committed one by one behind a prompt of ten tokens."""
    taken: Any = Taken(demand)
    samples = Samples(taken, "a")
    samples.open(0, OpenDraft("s", list(range(PROMPT)), SamplingParams(), features=feature_rows(0, PROMPT)))
    for position in range(PROMPT, end):
        samples.advance(0, Advance([position], feature_rows(position, 1)))
    samples.close(0)
    return taken.samples  # type: ignore[no-any-return]


def test_texts_hold_every_position_once_and_a_short_end_with_what_was_before_it() -> None:
    assert sampled("", 300) == []
    whole = [list(range(PROMPT, PROMPT + WINDOW)), list(range(PROMPT + WINDOW, PROMPT + 2 * WINDOW))]
    texts = sampled("texts", PROMPT + 2 * WINDOW + 15)
    assert [sample.tokens.tolist() for sample in texts] == whole  # the rest is too short to be worth a sample
    for sample in texts:
        assert sample.feature_rows()[:, 0].tolist() == sample.tokens[:-1].tolist()
        assert sample.session == "s"
    assert [sample.tokens.tolist() for sample in sampled("misses", 28)] == [list(range(28))]


# A Redis with the access list of docs/security.md, in the clear and by TLS.

PASSWORDS = {"coppice-sender": "SENDER-PASSWORD", "coppice-adapter": "ADAPTER-PASSWORD"}


class StrictRedis:
    """A redis-server that speaks, with TLS alone or without, to whom its access list knows."""

    def __init__(self, folder: Path, scheme: str) -> None:
        self.scheme = scheme
        self.authority = Authority(folder / "authority")
        (folder / "users.acl").write_text(documented("acl") + "user root on >root ~* &* +@all\n")
        self.port = free_port()
        tls = self.authority.tls("orchestrator")  # its names hold 127.0.0.1
        options: dict[str, object] = {
            "port": self.port,
            "bind": "127.0.0.1",
            "save": "",
            "dir": folder,
            "aclfile": folder / "users.acl",
        }
        if scheme == "rediss":
            options |= {"port": 0, "tls-port": self.port, "tls-auth-clients": "no"}
            options |= {"tls-cert-file": tls.cert, "tls-key-file": tls.key, "tls-ca-cert-file": tls.ca}
        command = [str(find_redis()), *(str(part) for name, value in options.items() for part in (f"--{name}", value))]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def url(self, user: str, password: str = "", host: str = "127.0.0.1", trusting: bool = True) -> str:
        """Where a user finds it; `trusting` its authority, where it speaks TLS."""
        query = f"?ssl_ca_certs={self.authority.tls().ca}" if trusting and self.scheme == "rediss" else ""
        return f"{self.scheme}://{user}:{password or PASSWORDS[user]}@{host}:{self.port}/0{query}"

    def answers(self) -> bool:
        with suppress(RedisError), Redis.from_url(self.url("root", "root"), socket_timeout=5) as client:
            return bool(client.ping())
        return self.process.poll() is not None

    def stop(self) -> str:
        self.process.terminate()
        return self.process.communicate(timeout=10)[0]


@pytest.fixture(scope="module", params=["redis", "rediss"])
def strict(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StrictRedis]:
    running = StrictRedis(tmp_path_factory.mktemp("redis"), request.param)
    assert eventually(running.answers)
    if running.process.poll() is not None:
        output = running.stop()
        assert "tls-port" in output, output
        pytest.skip("requires redis-server with TLS: this one was built without")
    yield running
    running.stop()


async def test_records_pass_with_the_documented_rights_alone(strict: StrictRedis) -> None:
    registry, head = CollectorRegistry(), Reader(demand="texts")
    lease = Lease(strict.url("coppice-adapter"), lease_s=5.0)
    assert await lease.take()
    producer = Producer(strict.url("coppice-sender"), registry, ["a"])
    inbox = Inbox(strict.url("coppice-adapter"), [head], AdapterMetrics())
    await inbox.read()
    reading = asyncio.create_task(inbox.run())
    producer.start()
    for _ in range(3):
        producer.query("a", RECORD)
    await until(lambda: len(head.taken) >= 3 and producer.demand_for("a") == "texts")
    head.demand = ""
    await until(lambda: not producer.demand_for("a"))
    reading.cancel()
    await producer.stop()
    assert head.taken == [RECORD] * 3
    await lease.give_back()
    assert await Lease(strict.url("coppice-adapter"), lease_s=5.0).take()
    assert (counts(registry).sent, counts(registry).dropped.total()) == (3, 0)
    orchestrators = Connection(strict.url("coppice-sender"))
    async with orchestrators.exchange() as client:  # asks for no demand: it pings
        assert await client.ping()
    await orchestrators.close()


FORBIDDEN = {
    "coppice-sender": (
        *("XREAD STREAMS coppice:a:queries 0", "XADD elsewhere * a b", "SET coppice:a:demand full"),
        "DEL coppice:a:queries",
    ),
    "coppice-adapter": (
        *("XADD coppice:a:queries * a b", "SET elsewhere x", "XTRIM coppice:a:queries MAXLEN 0", "CONFIG GET *"),
        *("FLUSHALL", "EVAL return(redis.call('XADD',KEYS[1],'*','a','b')) 1 coppice:a:queries"),
        "HSET elsewhere token x",
    ),
}


def test_nobody_may_do_more(strict: StrictRedis) -> None:
    for user, commands in FORBIDDEN.items():
        with Redis.from_url(strict.url(user), socket_timeout=5) as client:
            for command in commands:
                with pytest.raises(ResponseError, match=r"permission|run this command"):
                    client.execute_command(*command.split())


async def test_what_redis_or_we_refuse_costs_records_and_nothing_else(strict: StrictRedis) -> None:
    urls = [strict.url("coppice-sender", password="wrong")]
    if strict.scheme == "rediss":
        urls.append(strict.url("coppice-sender", trusting=False))  # the system's authorities do not know ours
        urls.append(strict.url("coppice-sender", host="localhost"))  # its certificate says 127.0.0.1
    for url in urls:
        registry = CollectorRegistry()
        producer = Producer(url, registry, ["a"])
        producer.start()
        producer.query("a", RECORD)
        await asyncio.sleep(0.3)
        await producer.stop()
        assert counts(registry).sent == 0
        assert counts(registry).settled
