"""The page in a real browser on real services of the demo's target: what it shows is what the stream says."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from coppice.client.client import Client
from coppice.stack.launch import Stack
from orchestrator.http.server import FILES
from tests.pipeline.conftest import node_modules, parts_of

PROMPT, TOKENS = "def read_lines(path):\n", 48
MARKUP = "<img src=x onerror=\"document.title='run'\">"
TAP = """() => {
  const ask = fetch;
  window.fetch = async (...all) => {
    const answer = await ask(...all);
    [window.streamed, window.fetch] = [answer.clone().text(), ask];
    return answer;
  };
}"""
"""keeps a copy of the next stream: browsers give none of a body that was read while it came"""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""where the system's Chromium is, if there is one"""
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def visiting(browser: Browser, address: str, **options: Any) -> Iterator[Page]:
    """A page of its own at an address. Raises AssertionError for errors of the page, and requests to elsewhere."""
    site = address.rpartition("/")[0]
    context = browser.new_context(**{"viewport": {"width": 1440, "height": 1000}, **options})
    page, wrong = context.new_page(), list[str]()
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    # Chromium calls a stream that was read to its end aborted.
    page.on("requestfailed", lambda one: None if "ERR_ABORTED" in (one.failure or "") else wrong.append(one.url))
    page.on("request", lambda one: None if one.url.startswith((site, "blob:")) else wrong.append(one.url))
    page.goto(address)
    yield page
    context.close()
    assert not wrong, wrong


def until(page: Page, expression: str, within_s: float = 60.0) -> None:
    """Wait until an expression is true on a page. Its policy forbids the polling that playwright brings along."""
    end = time.monotonic() + within_s
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(50)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def stack(demo: Stack) -> Stack:
    return demo


@pytest.fixture
def page(browser: Browser, stack: Stack) -> Iterator[Page]:
    with visiting(browser, f"http://{stack.orchestrator.http}/") as visited:
        expect(visited.locator("#model")).to_contain_text("float32")
        yield visited


@pytest.fixture(scope="module")
def axe(pytestconfig: pytest.Config) -> str:
    """The source of axe-core."""
    return (node_modules(pytestconfig, "axe", "axe-core@4") / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


def generate(page: Page, **fields: str) -> list[dict[str, Any]]:
    """Have the playground generate an answer; the events that its stream held."""
    form = page.locator("#ask")
    for name, value in {"prompt": PROMPT, "tokens": str(TOKENS), "temperature": "0", **fields}.items():
        field = form.locator(f"[name={name}]")
        if name in ("policy", "kind"):
            field.select_option(value)
        else:
            field.fill(value)
    page.evaluate(TAP)
    form.get_by_role("button", name="Generate").click()
    until(page, "shown.finished && text.spans.length === shown.tokens.length")
    return parts_of(page.evaluate("streamed"))


def open_trace(page: Page, trace: dict[str, Any]) -> None:
    content = json.dumps(trace).encode()
    page.locator("#open").set_input_files({"name": "t.json", "mimeType": "application/json", "buffer": content})
    expect(page.locator("#source")).to_have_text("t.json")


def made_trace(texts: list[str], nodes: list[str] | None = None, head: str = "lookup") -> dict[str, Any]:
    """A trace of one step a token, each with the same tree: a chain of one accepted node, the others below the root."""
    pieces = nodes or ["a", "b"]
    count = len(pieces)
    lists = {"tokens": [*range(count)], "parents": [0] * count, "log_probs": [-1.0 - at for at in range(count)]}
    lists |= {"forwards": [1] * count, "pieces": pieces, "owners": [1] * count, "accepted": [1], "cut": [count]}
    tree = {"root": 1, "root_piece": pieces[0], **lists, "routed": 0, "draft_ns": 1_000_000, "verify_ns": 2_000_000}
    ids = {"ids": [0, 1], "origins": [2, 1], "log_probs": [-0.1, -0.2], "tree": tree}
    events = [
        {"started": {"heads": [head], "policy": "route"}},
        *({"chunk": {"text": text, "pieces": [text, text], **ids}} for text in texts),
        {"finished": {"timings": {"decode_ns": 10**9}, "new_tokens": 2 * len(texts)}},
    ]
    return {"format": "coppice-trace-1", "model": "m", "asked": {}, "events": events}


def test_the_text_and_every_token_are_those_of_the_stream_and_of_plain_decoding(page: Page, stack: Stack) -> None:
    chunks = [event["chunk"] for event in generate(page, temperature="0.7", seed="5") if "chunk" in event]
    with Client(stack.address) as client:
        plain = client.generate(PROMPT, temperature=0.7, seed=5, max_new_tokens=TOKENS, policy="plain")
    assert [token for chunk in chunks for token in chunk["ids"]] == list(plain.ids)
    assert page.locator("#text").evaluate("panel => panel.textContent") == plain.text
    looks_shown = page.evaluate("text.spans.map(span => span.className.includes('drafted') ? 2 : 1)")
    assert looks_shown == [origin for chunk in chunks for origin in chunk["origins"]]
    assert {1, 2} == set(looks_shown)
    page.locator("#text").focus()
    page.keyboard.press("Home")
    expect(page.locator("#token")).to_contain_text("from the target · log-prob")
    drafted = looks_shown.index(2)
    for _ in range(drafted):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#token")).to_contain_text("drafted by")


def test_a_tree_is_drawn_as_the_stream_has_it(page: Page) -> None:
    events = generate(page, policy="merge")
    trees = [event["chunk"]["tree"] for event in events if "chunk" in event and event["chunk"]["tree"]]
    number = max(range(len(trees)), key=lambda at: len(trees[at]["accepted"]))
    page.evaluate(f"player.go({number})")
    tree = trees[number]
    (origins,) = [event["chunk"]["origins"] for event in events if "chunk" in event and event["chunk"]["tree"] == tree]
    nodes = page.locator("#tree [data-node]").evaluate_all(
        "nodes => nodes.map(node => [Number(node.dataset.node), node.classList[1]])"
    )
    drawn = {node: fate for node, fate in nodes if 0 < node <= len(tree["tokens"])}
    accepted, cut = set(tree["accepted"]), set(tree["cut"])
    assert drawn == {
        node: "accepted" if node in accepted else "cut" if node in cut else "rejected"
        for node in range(1, len(tree["tokens"]) + 1)
    }
    assert len(nodes) == len(drawn) + 1 + (origins[-1] == 1)  # the root, and what the target wanted
    page.locator("#tree").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#node")).to_contain_text("accepted")
    page.locator("#scores").check()
    expect(page.locator("#tree .score")).to_have_count(len(tree["tokens"]))


def test_steps_are_played_and_a_saved_trace_opens_again(page: Page, tmp_path: Path) -> None:
    generate(page)
    count = page.evaluate("shown.steps.length")
    title, controls = page.locator("#route"), page.locator("#controls")
    controls.get_by_role("button", name="First step").click()
    controls.get_by_role("button", name="Step forward").click()
    expect(title).to_contain_text("Step 2 of")
    controls.get_by_role("combobox").select_option("20")
    controls.get_by_role("button", name="Play").click()
    expect(title).to_contain_text(f"Step {count} of")  # and stops there
    expect(controls.get_by_role("button", name="Play")).to_be_visible()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save trace").click()
    saved.value.save_as(tmp_path / "trace.json")
    before = page.evaluate("JSON.stringify(shown)")
    assert json.loads((tmp_path / "trace.json").read_text()) == json.loads(before)
    page.locator("#open").set_input_files(tmp_path / "trace.json")
    most = page.evaluate("Math.max(...shown.steps.map(({ taken }) => taken))")
    assert page.evaluate("shown.steps[player.at].taken") == most
    expect(page.locator("#source")).to_have_text(f"trace.json: “{PROMPT.strip()}”")
    assert page.evaluate("JSON.stringify(shown)") == before


def test_side_by_side_says_that_two_policies_say_the_same(page: Page) -> None:
    page.get_by_role("link", name="Side by side").click()
    page.locator("#race [name=tokens]").fill(str(TOKENS))
    page.locator("#race [name=prompt]").fill(PROMPT)
    assert page.locator("#race [name=temperature]").input_value() == "1"
    page.locator(".lane select").nth(1).select_option("route")
    page.get_by_role("button", name="Compare").click()
    until(page, "lanes.every(({ trace }) => trace?.finished)")
    ids = page.evaluate("lanes.map(({ trace }) => trace.tokens.map(({ id }) => id))")
    assert ids[0] == ids[1]
    count = len(ids[0])
    steps = page.evaluate("lanes.map(({ trace }) => trace.steps.length)")
    times = page.evaluate("lanes.map(({ trace }) => trace.finished.timings.decode_ns)")
    assert steps[1] < steps[0]
    faster = f"{times[0] / times[1]:.1f}"
    gain = f"identical: {count} of {count} tokens. route: {steps[1]} forwards instead of {steps[0]}"
    expect(page.locator("#verdict")).to_have_text(f"{gain}, {faster} times as fast")
    assert page.evaluate("verdictOn(lanes[0].trace, lanes[1].trace, false)") == gain  # together they share the machine
    for other in ([1, 2, 4], [1, 2]):
        traces = [{"tokens": [{"id": token} for token in tokens]} for tokens in ([1, 2, 3], other)]
        assert page.evaluate("traces => verdictOn(...traces)", traces).startswith("different from token 3 on: 2 of 3")


def test_what_looks_like_markup_stays_text(page: Page, browser: Browser) -> None:
    trace = made_trace([MARKUP, "b"], [MARKUP, MARKUP], head=MARKUP)

    def shown_as_text(visited: Page) -> None:
        open_trace(visited, trace)
        expect(visited.locator("#text")).to_contain_text(MARKUP)
        expect(visited.locator("#legend")).to_contain_text(MARKUP)
        visited.locator("#tree [data-node='1']").hover()
        expect(visited.locator("#node")).to_contain_text("<img")
        assert visited.locator("img[src=x]").count() == 0
        assert visited.title() == "Coppice"

    shown_as_text(page)
    with visiting(browser, next(iter(FILES.values())).parent.joinpath("index.html").as_uri()) as alone:
        expect(alone.locator("#model")).to_contain_text("from a file")
        shown_as_text(alone)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_serious_hinders_who_cannot_see_well(browser: Browser, stack: Stack, axe: str, scheme: Any) -> None:
    with visiting(browser, f"http://{stack.orchestrator.http}/", color_scheme=scheme) as page:
        expect(page.locator("#model")).to_contain_text("float32")
        generate(page, tokens="16")
        page.evaluate(axe)
        for view in ("playground", "compare"):
            page.goto(f"http://{stack.orchestrator.http}/#{view}")
            expect(page.locator(f"#{view}")).to_be_visible()
            found = page.evaluate("axe.run()")["violations"]
            serious = {
                (view, one["id"], node["html"][:120], node["failureSummary"][:200])
                for one in found
                if one["impact"] in ("serious", "critical")
                for node in one["nodes"]
            }
            assert serious == set()


def test_a_conversation_goes_on(page: Page) -> None:
    events = generate(page, kind="chat", prompt="Tell me a story.", tokens="12")
    expect(page.locator("#turns li")).to_have_text(["Tell me a story."])  # the answer stands below
    said = "".join(event["chunk"]["text"] for event in events if "chunk" in event)
    generate(page, prompt="Go on.", tokens="12")
    expect(page.locator("#turns li")).to_have_count(3)
    assert page.locator("#turns .assistant").evaluate("turn => turn.textContent") == said
    assert page.evaluate("shown.asked.messages.length") == 3
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#turns li")).to_have_count(0)
    generate(page, prompt="Hello.", tokens="4")
    assert page.evaluate("shown.asked.messages.length") == 1
