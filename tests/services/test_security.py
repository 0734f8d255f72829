"""Who gets in: real servers on loopback, certificates as the documentation makes them, tokens, and bounds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, Counter

from coppice.client.client import AsyncClient, Client
from coppice.commands.doctor import find
from coppice.config.sections import ServerSettings, TlsSettings
from coppice.config.settings import Settings, load_settings
from coppice.errors import CoppiceError, InvalidField, NotFound, Overloaded, Unauthenticated
from coppice.limits import Limits
from coppice.rpc.access import ACCESS, Access, Certificates
from coppice.rpc.channels import Dialer
from coppice.rpc.link import LINKED
from coppice.rpc.server import MOST_CALLS, Serving
from coppice.wire import generation
from coppice.wire.generation import ModelDescription
from orchestrator.tokens import Tokens, client_salt, read_tokens
from tests import fake_service
from tests.certificates import ROLES, Authority, documented
from tests.processes import until

SERVED_BY = {service.name: role for role, service in fake_service.SERVICES.items()}
SERVICES = {service.name: service for service in fake_service.SERVICES.values()}
# Written out once more: an edit of the product's table alone is not to pass.
MAY_CALL = {
    "Verify": {"orchestrator"},
    "FetchFeatures": {"drafter"},
    "DescribeTarget": {"orchestrator"},
    "VerifierService.Link": {"orchestrator", "drafter"},
    "DrafterService.Link": {"orchestrator"},
    "Draft": {"orchestrator"},
    "DescribeHead": {"orchestrator", "adapter"},
    "SyncWeights": {"adapter"},
    "GetStatus": {"operator", "orchestrator"},
    "Pause": {"operator"},
    "Resume": {"operator"},
    "Rollback": {"operator"},
    "Generate": set(ROLES),
    "DescribeModel": set(ROLES),
}
TOKEN, OTHER = "t" * 64, "o" * 64
MODEL = ModelDescription("echo", 300, 512, (), ("plain",), "plain", 31, True, True)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"))


class Reached:
    """A servicer of any service: whoever gets through to it is told so."""

    def __init__(self, service: ServiceDescriptor) -> None:
        for method in service.methods:
            setattr(self, method.name, self._stream if method.server_streaming else self._unary)

    async def _unary(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        if hasattr(request, "__aiter__"):
            async for _ in request:
                pass
        raise NotFound("reached")

    async def _stream(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        raise NotFound("reached")
        yield


class Echo:
    """A GenerationService that waits until it is cancelled when the prompt is "wait", and breaks when it is "break"."""

    def __init__(self) -> None:
        self.running = 0

    async def Generate(self, message: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        self.running += 1
        try:
            text = generation.read_request(message, 300, Limits()).text
            if text == "break":
                raise RuntimeError(f"secret of {text}")
            if text == "wait":
                await asyncio.sleep(60)
        finally:
            self.running -= 1
        raise NotFound(f"{text}?")
        yield

    async def DescribeModel(self, message: Any, context: grpc.aio.ServicerContext) -> Any:
        return generation.model_to_wire(MODEL)


@contextlib.asynccontextmanager
async def served(
    name: str, tls: TlsSettings, servicer: Any = None, tokens: Tokens | None = None, idle_s: float = 300, **more: Any
) -> AsyncIterator[str]:
    """A server in this process; gives its address."""
    sections = {"server": ServerSettings(grace_s=0, **more), "limits": Limits(idle_s=idle_s), "tls": tls}
    serving = Serving(Settings().model_copy(update=sections), SERVED_BY[name], tokens)
    await serving.start({SERVICES[name]: servicer or Reached(SERVICES[name])})
    stopped = asyncio.create_task(serving.until_stopped())
    try:
        yield serving.address
    finally:
        serving.leaving.set()
        await stopped


async def ended(channel: Any, method: MethodDescriptor, data: bytes = b"", **options: Any) -> tuple[str, str]:
    """The status and details that a call ends with. On the wire a stream of one message is a unary request."""
    make = channel.unary_stream if method.server_streaming else channel.unary_unary
    call = make(f"/{method.containing_service.full_name}/{method.name}")(data, timeout=5, **options)
    if method.name == "Link":  # which says something before its end
        with contextlib.suppress(grpc.RpcError):
            _ = [frame async for frame in call]
    return (await call.code()).name, await call.details()


# --- certificates ---


def test_every_method_has_its_callers() -> None:
    assert {name: set(callers) for name, callers in ACCESS.items()} == {
        service.full_name: {method.name for method in service.methods} for service in SERVICES.values()
    }


@pytest.mark.parametrize("name", SERVICES)
async def test_each_method_is_for_its_callers_alone(name: str, authority: Authority) -> None:
    server = SERVED_BY[name]
    async with served(name, authority.tls(server)) as address:
        for role in ROLES:
            async with authority.dialer(role).open(address) as channel:
                for method in SERVICES[name].methods:
                    code, details = await ended(channel, method)
                    link, path = f"{name}.Link", f"/{SERVICES[name].full_name}/{method.name}"
                    if role in MAY_CALL.get(link, ()) and method.name == "Link":
                        assert (code, details) == ("OK", ""), role
                    elif role in MAY_CALL.get(method.name, ()):
                        assert (code, details) == ("NOT_FOUND", "reached"), (role, method.name)
                    else:
                        assert code == "PERMISSION_DENIED", (role, method.name)
                        on_link = path not in LINKED or role in MAY_CALL[link]
                        assert details.startswith(f"coppice.v1.{f'{name}.{method.name}' if on_link else link} is for ")


async def refused(dialer: Dialer, address: str, method: str = "DrafterService.DescribeHead") -> None:
    """No connection, let alone an answer."""
    service, _, name = method.partition(".")
    async with dialer.open(address) as channel:
        assert (await ended(channel, SERVICES[service].methods_by_name[name]))[0] == "UNAVAILABLE"


async def test_plaintext_strangers_and_servers_of_other_names_fail(authority: Authority, other: Authority) -> None:
    async with served("DrafterService", authority.tls("drafter")) as address:
        await refused(Dialer(), address)
        await refused(authority.dialer(), address)  # without a certificate
        await refused(other.dialer("orchestrator"), address)
        mixed = authority.tls().ca, other.tls("orchestrator")
        await refused(Dialer(tls=mixed[1].model_copy(update={"ca": mixed[0]})), address)  # trusts us, another's signed
    async with served("DrafterService", authority.tls("verifier")) as address:  # a verifier that poses as a drafter
        await refused(authority.dialer("orchestrator"), address)
        method = SERVICES["DrafterService"].methods_by_name["DescribeHead"]
        async with authority.dialer("orchestrator", server_name="verifier").open(address) as channel:
            assert await ended(channel, method) == ("NOT_FOUND", "reached")


async def test_clients_of_generation_need_a_certificate_only_where_it_is_required(authority: Authority) -> None:
    async with served("GenerationService", authority.tls("orchestrator"), Echo()) as address:
        async with AsyncClient(address, dialer=authority.dialer()) as client:
            assert (await client.describe()).name == "echo"
        named = f"localhost:{address.rpartition(':')[2]}"  # its certificate says 127.0.0.1
        await refused(authority.dialer(), named, "GenerationService.DescribeModel")
    async with served("GenerationService", authority.tls("orchestrator", require=True), Echo()) as address:
        await refused(authority.dialer(), address, "GenerationService.DescribeModel")
        async with AsyncClient(address, dialer=authority.dialer("stranger")) as client:
            assert (await client.describe()).name == "echo"


async def test_health_answers_without_a_certificate_on_its_port_and_to_any_connection_on_the_services(
    authority: Authority, tmp_path: Path
) -> None:
    ready, check = tmp_path / "ready.json", "/grpc.health.v1.Health/Check"
    async with served("DrafterService", authority.tls("drafter"), ready_file=str(ready)) as address:
        async with grpc.aio.insecure_channel(json.loads(ready.read_text())["health"]) as channel:
            assert await channel.unary_unary(check)(b"", timeout=5) == b"\x08\x01"
        for role in ("orchestrator", "stranger"):
            async with authority.dialer(role, server_name="drafter").open(address) as channel:
                assert await channel.unary_unary(check)(b"", timeout=5) == b"\x08\x01"
        async with authority.dialer(server_name="drafter").open(address) as channel:  # without a certificate
            assert await channel.unary_unary(check)(b"", timeout=5).code() is grpc.StatusCode.UNAVAILABLE


async def test_rotated_certificates_need_no_restart(other: Authority, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The authority too. A stream that is open lives on, its channel's next call takes a new connection."""
    authority = Authority(tmp_path_factory.mktemp("rotated"))
    before = Authority(tmp_path_factory.mktemp("before"))
    before.replace_by(authority)
    echo = Echo()
    async with (
        served("GenerationService", authority.tls("orchestrator", require=True), echo) as address,
        AsyncClient(address, dialer=authority.dialer("operator")) as client,
    ):
        stream = asyncio.create_task(client.generate("wait"))
        await until(lambda: echo.running == 1)
        blocking = Client(address, dialer=authority.dialer("operator"))
        await asyncio.to_thread(blocking.describe)
        for name in ("orchestrator.pem", "ca.pem"):  # half of a rotation: certificate and key do not fit
            (authority.folder / name).write_bytes((other.folder / name).read_bytes())
        async with AsyncClient(address, dialer=before.dialer("operator")) as late:
            await late.describe()
        authority.replace_by(other)
        assert (await client.describe()).name == "echo"
        assert (await asyncio.to_thread(blocking.describe)).name == "echo"
        blocking.close()
        async with AsyncClient(address, dialer=other.dialer("operator")) as new:
            await new.describe()
        await refused(before.dialer("operator"), address, "GenerationService.DescribeModel")
        assert echo.running == 1
        stream.cancel()
        await until(lambda: echo.running == 0)


def test_unusable_files_are_named(authority: Authority) -> None:
    for told, named in (
        ({"cert": "drafter.pem", "key": "drafter.key"}, "tls.ca: is missing"),
        ({"ca": "ca.pem", "cert": "drafter.pem"}, "tls.key: is missing"),
        ({"ca": "ca.pem", "key": "drafter.key"}, "tls.cert: is missing"),
        ({"ca": "nowhere.pem"}, "tls.ca: .*nowhere.pem cannot be read: No such file"),
        ({"ca": "drafter.key"}, "tls.ca: .*drafter.key holds no PEM certificate"),
        ({"ca": "ca.pem", "cert": "drafter.pem", "key": "adapter.key"}, "tls.cert: .* are no PEM pair: KEY_VALUES_MIS"),
        ({"ca": "ca.pem", "cert": "drafter.key", "key": "drafter.key"}, "tls.cert: .* are no PEM pair"),
    ):
        tls = TlsSettings.model_validate({name: str(authority.folder / file) for name, file in told.items()})
        for use in (Certificates.read, lambda tls: Dialer(tls=tls).open_blocking("127.0.0.1:1")):
            with pytest.raises(InvalidField, match=named):
                use(tls)
    with pytest.raises(InvalidField, match=r"tls\.cert: is missing"):
        Certificates.of_server(authority.tls())


# --- tokens ---


def line(name: str, token: str, sessions: str = "") -> str:
    return f"{name} {sha256(token.encode()).hexdigest()} {sessions}".strip() + "\n"


class Door:
    """A server of generation behind tokens."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "tokens"
        self.write(line("alice", TOKEN, "1"), line("bob", OTHER))
        self.registry = CollectorRegistry()
        requests = Counter("requests", "", ["client", "verdict"], registry=self.registry)
        self.tokens, self.echo = Tokens(str(self.file), requests), Echo()

    def write(self, *lines: str) -> None:
        new = self.file.with_suffix(".new")
        new.write_text("# clients\n\n" + "".join(lines))
        new.replace(self.file)

    def count(self, client: str, verdict: str) -> float:
        return self.registry.get_sample_value("requests_total", {"client": client, "verdict": verdict}) or 0.0


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(tmp_path)


async def described(address: str, token: str) -> str:
    async with AsyncClient(address, dialer=Dialer(token=token)) as client:
        return (await client.describe()).name


async def test_what_tells_clients_apart_cannot_be_made_of_a_name(door: Door) -> None:
    async def salt(token: str) -> str:
        async with Access(TlsSettings(), door.tokens).client([("authorization", f"Bearer {token}")], counted=False):
            return client_salt()

    door.write(line("alice", TOKEN), line("alice", "another"), line("bob", OTHER))
    alice = await salt(TOKEN)
    assert alice == await salt("another")
    assert alice not in (await salt(OTHER), sha256(b"alice").hexdigest())
    door.write(line("alice", TOKEN), line("bob", OTHER))
    assert await salt(TOKEN) != alice


async def test_health_asks_for_no_token_and_takes_no_place_that_others_need(door: Door) -> None:
    """Strangers who watch, or never send a call's message, fill the places of health alone."""
    asked = health_pb2.HealthCheckRequest(service="coppice.v1.GenerationService")
    serving, full = health_pb2.HealthCheckResponse.SERVING, grpc.StatusCode.RESOURCE_EXHAUSTED
    async with (
        served("GenerationService", TlsSettings(), door.echo, door.tokens, idle_s=1.5) as address,
        Dialer().open(address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="an.Other"))
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watching = [stub.Watch(asked) for _ in range(MOST_CALLS - 1)]
        assert {(await call.read()).status for call in watching} == {serving}
        assert await stub.Watch(asked).code() is full
        assert (await stub.Check(asked)).status == serving
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Check(health_pb2.HealthCheckRequest(service="an.Other"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        silent = [channel.stream_unary("/grpc.health.v1.Health/Check")() for _ in range(MOST_CALLS)]
        await asyncio.sleep(0.5)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Check(asked)
        assert refused.value.code() is full
        assert await described(address, TOKEN) == "echo"
        assert {await call.code() for call in silent} == {grpc.StatusCode.UNAVAILABLE}  # soon
        assert (await stub.Check(asked)).status == serving


async def test_only_the_right_token_is_answered_without_reason(door: Door, capfd: pytest.CaptureFixture[str]) -> None:
    async with served("GenerationService", TlsSettings(), door.echo, door.tokens) as address:
        for token in (TOKEN, OTHER):
            assert await described(address, token) == "echo"
        wrong = ("", TOKEN[:-1], TOKEN + "t", TOKEN.upper(), sha256(TOKEN.encode()).hexdigest(), "alice")
        outcomes = await asyncio.gather(*(described(address, token) for token in wrong), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {Unauthenticated}
        reasons = {str(outcome) for outcome in outcomes}
        method = SERVICES["GenerationService"].methods_by_name["Generate"]
        right = ("authorization", f"Bearer {TOKEN}")
        async with Dialer().open(address) as channel:
            wrong_metadata = [(("authorization", TOKEN),), (("authorization", f"Basic {TOKEN}"),), (("token", TOKEN),)]
            wrong_metadata.append((right, ("authorization", "Bearer x")))
            answers = await asyncio.gather(*(ended(channel, method, metadata=sent) for sent in wrong_metadata))
            assert {code for code, _ in answers} == {"UNAUTHENTICATED"}
            reasons |= {details for _, details in answers}
            code, _ = await ended(channel, method, metadata=(("authorization", f"bearer {TOKEN}"),))
            assert code == "INVALID_ARGUMENT"  # there was no prompt in it
    assert len(reasons) == 1
    assert (door.count("alice", "admitted"), door.count("bob", "admitted")) == (2, 1)
    assert door.count("", "unauthenticated") == 10
    told = capfd.readouterr()
    assert TOKEN not in told.out + told.err + repr(Dialer(token=TOKEN)) + repr(vars(door.tokens))


async def test_a_name_runs_as_many_requests_as_it_may(door: Door) -> None:
    async with (
        served("GenerationService", TlsSettings(), door.echo, door.tokens) as address,
        AsyncClient(address, dialer=Dialer(token=TOKEN)) as alice,
        AsyncClient(address, dialer=Dialer(token=OTHER)) as bob,
    ):
        running = [asyncio.create_task(client.generate("wait")) for client in (alice, bob, bob)]
        await until(lambda: door.echo.running == 3)
        with pytest.raises(Overloaded, match="alice has 1 requests running, which is its limit"):
            await alice.generate("hi")
        assert (await alice.describe()).name == "echo"  # is no session
        assert door.count("alice", "limited") == 1
        running[0].cancel()
        await until(lambda: door.echo.running == 2)
        with pytest.raises(NotFound, match=r"hi\?"):
            await alice.generate("hi")
        for task in running:
            task.cancel()
        await until(lambda: door.echo.running == 0)


async def test_the_file_is_read_again_when_it_changes(door: Door) -> None:
    async with served("GenerationService", TlsSettings(), door.echo, door.tokens) as address:
        door.write(line("alice", OTHER), line("alice", "new"))  # two of one name
        for token in (OTHER, "new"):
            assert await described(address, token) == "echo"
        with pytest.raises(Unauthenticated):
            await described(address, TOKEN)
        door.write(line("alice", TOKEN), "nonsense\n")
        with pytest.raises(Unauthenticated):
            await described(address, TOKEN)
        assert await described(address, "new") == "echo"  # what held before the bad line holds
        door.file.unlink()
        assert await described(address, "new") == "echo"
        door.write(line("alice", TOKEN))
        assert await described(address, TOKEN) == "echo"


def test_the_documented_command_makes_an_entry_and_a_bad_line_is_named_and_not_shown(tmp_path: Path) -> None:
    command, file = ["sh", "-euc", documented("sh", "rand -hex")], tmp_path / "tokens"
    token = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout.strip()
    (entry,) = read_tokens(str(file))
    assert (entry.name, entry.sessions, entry.digest) == ("alice", 4, sha256(token).digest())
    for content, named in (
        ("alice 12", "line 1: is not NAME SHA256HEX"),
        (line("ok", "a") + line("al/ice", "b"), "line 2: is not NAME SHA256HEX"),
        *((line("alice", "a", wrong), "line 1") for wrong in ("0", "-1", "4 5")),
        (line("alice", ""), "line 1: is the hash of no token at all"),
    ):
        file.write_text(content)
        with pytest.raises(InvalidField, match=f"orchestrator.tokens: .*{named}") as error:
            read_tokens(str(file))
        assert sha256(b"a").hexdigest() not in str(error.value)
    with pytest.raises(InvalidField, match=r"orchestrator\.tokens: .* cannot be read"):
        read_tokens(str(tmp_path / "missing"))


def test_tokens_cross_no_network_in_clear(door: Door) -> None:
    def serving(host: str, tls: TlsSettings = TlsSettings()) -> Serving:  # noqa: B008
        return Serving(Settings(server=ServerSettings(host=host), tls=tls), "orchestrator", door.tokens)

    async def check() -> None:
        with pytest.raises(InvalidField, match=r"tls\.tokens_in_clear: clients would send tokens to 0\.0\.0\.0"):
            serving("0.0.0.0")
        for host in ("127.0.0.1", "127.1.2.3", "localhost", "[::1]"):
            serving(host)
        serving("0.0.0.0", TlsSettings(tokens_in_clear=True))

    asyncio.run(check())
    with pytest.raises(InvalidField, match=r"token: would go to example\.com:1 in clear"):
        Client("example.com:1", dialer=Dialer(token=TOKEN))
    Client("example.com:1", dialer=Dialer(token=TOKEN, tls=TlsSettings(tokens_in_clear=True))).close()
    with pytest.raises(InvalidField, match="token: is not printable ASCII"):
        Client("127.0.0.1:1", dialer=Dialer(token="a\nb"))


async def test_clients_read_the_environment(monkeypatch: pytest.MonkeyPatch, authority: Authority, door: Door) -> None:
    def described_blocking() -> str:
        with Client(address) as client:
            return client.describe().name

    monkeypatch.setenv("COPPICE_TLS__CA", str(authority.folder / "ca.pem"))
    monkeypatch.setenv("COPPICE_TOKEN", TOKEN)
    assert load_settings([]).tls == authority.tls()  # a process started here reads the same, and knows both variables
    async with served("GenerationService", authority.tls("orchestrator"), door.echo, door.tokens) as address:
        assert await asyncio.to_thread(described_blocking) == "echo"
        monkeypatch.delenv("COPPICE_TOKEN")
        with pytest.raises(Unauthenticated):
            await asyncio.to_thread(described_blocking)
        (found,) = [one for one in await asyncio.to_thread(lambda: list(find(address))) if one.name == "server"]
        assert (found.value, found.ok) == (f"{address} refuses: a valid bearer token is needed", None)
    monkeypatch.setenv("COPPICE_TLS__TOKENS_IN_CLEAR", "maybe")
    with pytest.raises(InvalidField, match="COPPICE_TLS__TOKENS_IN_CLEAR"):
        Client("127.0.0.1:1")


# --- bounds, and what a caller learns ---


async def test_what_a_client_sends_is_bounded_and_it_learns_nothing_of_the_server() -> None:
    method = SERVICES["GenerationService"].methods_by_name["DescribeModel"]
    async with served("GenerationService", TlsSettings(), Echo()) as address, Dialer().open(address) as channel:
        for size, code in ((8 << 10, "OK"), (17 << 10, "RESOURCE_EXHAUSTED"), (64 << 10, "RESOURCE_EXHAUSTED")):
            assert (await ended(channel, method, metadata=(("x", "y" * size),)))[0] == code, size
        unknown = b"\x7a\x80\x80\x08"  # the tag of a field that there is not
        for data, code in ((unknown + bytes(1 << 17), "OK"), (bytes(2 << 20), "RESOURCE_EXHAUSTED")):
            assert (await ended(channel, method, data))[0] == code
        async with AsyncClient(address) as client:
            with pytest.raises(CoppiceError, match=r"^internal error [0-9a-f]{16}$"):
                await client.generate("break")
        call = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")(timeout=5)
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
