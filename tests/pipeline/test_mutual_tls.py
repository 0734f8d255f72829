"""A whole stack whose processes know each other by their certificates, and clients by their tokens."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import expect

from coppice.client.adapter import AdapterClient
from coppice.client.client import Client
from coppice.errors import PermissionDenied, Unauthenticated, Unavailable
from coppice.rpc.channels import Dialer
from coppice.stack.launch import Stack
from coppice.stack.spec import HeadSpec
from coppice.testing.reference import Reference
from tests.certificates import Authority
from tests.pipeline.test_feature_heads import PROMPTS, heads, target
from tests.pipeline.test_page import CHROMIUM, chromium
from tests.signals import eventually
from tests.stacks import serving

__all__ = ["heads", "target"]  # fixtures

TOKEN, NEW = "a token", 16
ROLES = ("verifier", "drafter", "orchestrator", "adapter")


@pytest.fixture(scope="module")
def stack(
    authority: Authority, target: Path, heads: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    tokens = authority.folder / "tokens"
    tokens.write_text(f"tests {sha256(TOKEN.encode()).hexdigest()} 2\n")
    extra = {role: authority.flags(role) for role in ROLES}
    extra["orchestrator"] |= {"orchestrator.tokens": tokens}
    block, options = HeadSpec("block", "specblock", heads["block"]), {"adapt": True, "http_port": 0, "extra": extra}
    with serving(tmp_path_factory.mktemp("logs"), target, block, draft_deadline_ms=20_000, **options) as running:
        yield running


def answers_are_the_targets(stack: Stack, dialer: Dialer, reference: Reference) -> None:
    """With drafts of a head whose features come straight from the verifier."""
    with Client(stack.address, dialer=dialer) as client:
        for prompt in PROMPTS:
            answer = client.generate(prompt, policy="single:block", max_new_tokens=NEW, ignore_eos=True)
            assert answer.ids == tuple(reference.greedy(prompt, NEW).ids)
            assert sum(answer.verified_nodes) > 0


def test_the_text_is_the_targets(stack: Stack, authority: Authority, reference: Reference) -> None:
    answers_are_the_targets(stack, authority.dialer(token=TOKEN), reference)
    with urlopen(f"http://{stack.orchestrator.metrics}/metrics", timeout=10) as metrics:
        told = metrics.read().decode()
    assert f'coppice_client_requests_total{{client="tests",verdict="admitted"}} {len(PROMPTS)}.0' in told
    assert TOKEN not in told
    with Client(stack.address, dialer=authority.dialer()) as client, pytest.raises(Unauthenticated):
        client.generate(PROMPTS[1])


def test_the_adapter_reaches_its_drafters_and_listens_to_operators_alone(stack: Stack, authority: Authority) -> None:
    address = stack.services["adapter"].address

    def current() -> bool:
        (head,) = operator.status()
        return all(replica.current for replica in head.replicas)

    with AdapterClient(address, dialer=authority.dialer("operator")) as operator:
        assert eventually(current)
    for dialer, refusal in ((authority.dialer("drafter"), PermissionDenied), (Dialer(), Unavailable)):
        with AdapterClient(address, dialer=dialer) as client, pytest.raises(refusal):
            client.pause()


def completed(stack: Stack, authority: Authority, token: str = TOKEN, n: int = 1) -> tuple[int, Any]:
    """Status and body of a completion over HTTPS, by who trusts an authority."""
    body = json.dumps({"prompt": list(PROMPTS[0]), "max_tokens": 4, "n": n, "ignore_eos": True}).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    context = ssl.create_default_context(cafile=str(authority.folder / "ca.pem"))
    asked = Request(f"https://{stack.orchestrator.http}/v1/completions", body, headers)
    try:
        with urlopen(asked, timeout=20, context=context) as response:
            return response.status, json.load(response)
    except HTTPError as error:
        return error.code, json.load(error)


def test_http_is_https_and_asks_for_the_same_tokens(stack: Stack, authority: Authority, tmp_path: Path) -> None:
    status, told = completed(stack, authority)
    assert (status, told["usage"]["completion_tokens"]) == (200, 4)
    assert completed(stack, authority, "another")[0] == 401
    assert completed(stack, authority, n=2)[0] == 200
    assert completed(stack, authority, n=3)[0] == 429  # its bearer may have two running
    with pytest.raises(URLError, match="certificate verify failed"):
        completed(stack, Authority(tmp_path / "other"))
    context = ssl.create_default_context(cafile=str(authority.folder / "ca.pem"))
    with urlopen(f"https://{stack.orchestrator.http}/openapi.json", timeout=10, context=context) as response:
        assert b"ChatBody" in response.read()
    with pytest.raises(HTTPError, match="401"):
        urlopen(f"https://{stack.orchestrator.http}/metrics", timeout=10, context=context)
    with pytest.raises((OSError, HTTPException)):
        urlopen(f"http://{stack.orchestrator.http}/health", timeout=10)
    probing = ssl.create_default_context()  # as Kubernetes probes: it has no certificate and checks none
    probing.check_hostname, probing.verify_mode = False, ssl.CERT_NONE
    with urlopen(f"https://{stack.orchestrator.http}/ready", timeout=10, context=probing) as response:
        assert response.status == 200


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_the_page_asks_for_a_token_wherever_it_is_opened(stack: Stack) -> None:
    with chromium() as browser, browser.new_context(ignore_https_errors=True) as context:  # it knows no authority
        page = context.new_page()  # whose console tells of refusals
        page.goto(f"https://{stack.orchestrator.http}/#compare")
        field, refused = page.get_by_label("This server asks for an access token"), page.locator("#served-error")
        expect(field).to_be_visible()
        expect(refused).to_have_text("a valid bearer token is needed")
        refused.evaluate("line => line.textContent = 'another'")
        field.fill("another")
        page.get_by_role("button", name="Use it").click()
        expect(refused).to_have_text("a valid bearer token is needed")
        expect(refused).to_be_visible()
        field.fill(TOKEN)
        field.press("Enter")
        expect(page.locator("#model")).to_contain_text("float32")
        expect(field).to_be_hidden()
        expect(refused).to_be_empty()
        page.reload()
        expect(field).to_be_visible()  # a token is kept by nobody


def test_all_goes_on_by_other_certificates(
    stack: Stack, authority: Authority, reference: Reference, tmp_path: Path
) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    old.replace_by(authority)
    authority.replace_by(new)
    answers_are_the_targets(stack, authority.dialer(token=TOKEN), reference)
    assert completed(stack, authority)[0] == 200
    with Client(stack.address, dialer=old.dialer(token=TOKEN)) as client, pytest.raises(Unavailable):
        client.describe(timeout=2)
    with pytest.raises(URLError, match="certificate verify failed"):
        completed(stack, old)
