"""Records on their way through a Redis with the access list of docs/security.md, in the clear and by TLS."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from coppice.adaptation.signals import Producer
from coppice.rpc.redis_connection import Connection
from coppice.stack.process import find_redis
from services.adapter.loop import AdapterMetrics
from services.adapter.service import Inbox, Lease
from tests.certificates import Authority, documented
from tests.processes import free_port, until
from tests.services.test_signal_stream import RECORD, Reader
from tests.signals import counts, eventually

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
def redis(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StrictRedis]:
    running = StrictRedis(tmp_path_factory.mktemp("redis"), request.param)
    assert eventually(running.answers)
    if running.process.poll() is not None:
        output = running.stop()
        assert "tls-port" in output, output
        pytest.skip("requires redis-server with TLS: this one was built without")
    yield running
    running.stop()


async def test_records_pass_with_the_documented_rights_alone(redis: StrictRedis) -> None:
    registry, head = CollectorRegistry(), Reader(demand="texts")
    lease = Lease(redis.url("coppice-adapter"), lease_s=5.0)
    assert await lease.take()
    producer = Producer(redis.url("coppice-sender"), registry, ["a"])
    inbox = Inbox(redis.url("coppice-adapter"), [head], AdapterMetrics())
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
    assert await Lease(redis.url("coppice-adapter"), lease_s=5.0).take()
    assert (counts(registry).sent, counts(registry).dropped.total()) == (3, 0)
    orchestrators = Connection(redis.url("coppice-sender"))
    async with orchestrators.exchange() as client:  # asks for no demand: it pings
        assert await client.ping()
    await orchestrators.close()


@pytest.mark.parametrize(
    ("user", "command"),
    [
        ("coppice-sender", ("XREAD", "STREAMS", "coppice:a:queries", "0")),
        ("coppice-sender", ("XADD", "elsewhere", "*", "a", "b")),
        ("coppice-sender", ("SET", "coppice:a:demand", "full")),
        ("coppice-sender", ("DEL", "coppice:a:queries")),
        ("coppice-adapter", ("XADD", "coppice:a:queries", "*", "a", "b")),
        ("coppice-adapter", ("SET", "elsewhere", "x")),
        ("coppice-adapter", ("XTRIM", "coppice:a:queries", "MAXLEN", "0")),
        ("coppice-adapter", ("CONFIG", "GET", "*")),
        ("coppice-adapter", ("FLUSHALL",)),
        ("coppice-adapter", ("EVAL", "return redis.call('XADD', KEYS[1], '*', 'a', 'b')", "1", "coppice:a:queries")),
        ("coppice-adapter", ("HSET", "elsewhere", "token", "x")),
    ],
)
def test_nobody_may_do_more(redis: StrictRedis, user: str, command: tuple[str, ...]) -> None:
    with (
        Redis.from_url(redis.url(user), socket_timeout=5) as client,
        pytest.raises(ResponseError, match=r"permission|run this command"),
    ):
        client.execute_command(*command)


@pytest.mark.parametrize("spoiled", ["password", "authority", "host"])
async def test_what_redis_or_we_refuse_costs_records_and_nothing_else(redis: StrictRedis, spoiled: str) -> None:
    urls = {
        "password": redis.url("coppice-sender", password="wrong"),
        "authority": redis.url("coppice-sender", trusting=False),  # the system's do not know ours
        "host": redis.url("coppice-sender", host="localhost"),  # its certificate says 127.0.0.1
    }
    if redis.scheme == "redis" and spoiled != "password":
        pytest.skip("requires TLS")
    registry = CollectorRegistry()
    producer = Producer(urls[spoiled], registry, ["a"])
    producer.start()
    producer.query("a", RECORD)
    await asyncio.sleep(0.3)
    assert counts(registry).sent == 0
    await producer.stop()
    assert counts(registry).sent == 0
    assert counts(registry).settled
